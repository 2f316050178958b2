"""Random modules train with every trick at its no-op limit as without it, or are refused before the first step."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Trick
from tests.fuzz.modules import (
    BATCHES,
    CALLBACKS,
    CLASSES,
    TRAINERS,
    Planned,
    Spec,
    loader,
    module_of,
    samples,
    specs,
    suited,
)
from tests.fuzz.profiles import cases
from tests.fuzz.states import told
from tests.nets import trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do


def callback(make: Callable[[], pl.Callback]) -> Trick:
    return Trick(callbacks={"off": lambda: [make()]})


# Limits in which the whole machinery runs and nothing comes of it, beside those of the conformance tests.
WORKING = {
    "HardExampleFilter(0.999)": callback(lambda: lt.HardExampleFilter(0.999)),
    "HardExampleFilter(start=1.0)": callback(lambda: lt.HardExampleFilter(start=1.0)),
    'HardExampleFilter(start=1.0, mode="loss")': callback(lambda: lt.HardExampleFilter(start=1.0, mode="loss")),
    "Mixup(prob=1e-9)": callback(lambda: lt.Mixup(prob=1e-9)),
    "CutMix(prob=1e-9)": callback(lambda: lt.CutMix(prob=1e-9)),
    "HiddenMixup(prob=1e-9)": callback(lambda: lt.HiddenMixup("layers.1", prob=1e-9)),
    "SAM(rho=0, adaptive=True)": Trick(sam={"off": 0.0}),
}
# Not here: schedules, which a user writes into configure_optimizers; Compile, which takes seconds; GradCacheMixin, for
# modules of another form.
SWEEP = Trick()  # find_lr before the fit
TRICKS = {
    **{
        name: trick
        for name, trick in SETTINGS.items()
        if not trick.schedule and name not in ("Compile", "GradCacheMixin")
    },
    **WORKING,
    "find_lr": SWEEP,
}


@dataclass
class Outcome:
    """What came of a fit: all that a trick could have changed, and how the fit ended."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: list[Any] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    beside: list[Any] = field(default_factory=list)  # of the user's callbacks, what each has seen
    random: tuple[float, ...] = ()
    error: str = ""
    refused: BaseException | None = None


def run(spec: Spec, trick: Trick, folder: Path, state: str = "off") -> Outcome:
    """A fit with a trick at its no-op limit, or at work; for one that resumes, two."""
    first = TRAINERS[spec.trainer]
    if spec.trainer != "resumes":
        return fitted(spec, trick, {"max_epochs": 2, **first}, folder, None, state)
    outcome = fitted(spec, trick, {"max_epochs": 1}, folder, None, state)
    if outcome.refused or outcome.error:
        return outcome
    return fitted(spec, trick, {"max_epochs": 2}, folder, folder / "first.ckpt", state)


def fitted(
    spec: Spec, trick: Trick, settings: dict[str, Any], folder: Path, checkpoint: Path | None, state: str
) -> Outcome:
    outcome, made = Outcome(), 0

    def count(*_: Any) -> None:
        nonlocal made
        made += 1

    pl.seed_everything(spec.seed, verbose=False)
    bare = replace(trick, images=False, grows=False, convolutions=False, experts=False, wide=False)
    module = bare.module(module_of(spec), state)()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters() if not is_lazy(weight)}
    users = [CALLBACKS[name]() for name in spec.callbacks]
    settings = {"enable_checkpointing": "checkpoint" in spec.callbacks, **settings}
    fit = trainer(callbacks=[*users, *trick.make_callbacks(state)], default_root_dir=folder, **settings)
    try:
        if trick is SWEEP:
            lt.find_lr(trainer(), module, loader(spec), steps=10)
    except MisconfigurationException as error:
        outcome.refused = error
        return outcome
    counting = register_optimizer_step_post_hook(count)
    try:
        fit.fit(module, loader(spec), ckpt_path=checkpoint, weights_only=False)
        if settings["max_epochs"] == 1:
            fit.save_checkpoint(folder / "first.ckpt")
    except Planned as error:
        outcome.error = str(error)
    except (MisconfigurationException, UnknownTotalSteps) as error:
        outcome.refused = error
    finally:
        counting.remove()
    if outcome.refused is not None:
        now = dict(module.named_parameters())
        names = before.keys() & now.keys() - {"words.weight"}  # which its own forward pass writes
        whole = [name for name in names if not isinstance(now[name], DTensor)]
        off = [name for name in whole if not torch.equal(before[name], now[name])]
        assert not made, f"refused after {made} steps: {outcome.refused}"
        assert checkpoint or not off, f"refused, but changed {off}: {outcome.refused}"
        return outcome
    outcome.random = (torch.rand(1).item(), random.random(), float(np.random.rand()))
    outcome.weights = {name: weight.detach().clone() for name, weight in module.state_dict().items()}
    outcome.weights |= {f"buffer {name}": each.clone() for name, each in module.named_buffers()}
    outcome.weights |= {f"outside {i}": each.detach() for i, each in enumerate(getattr(module, "outside", ()))}
    outcome.memory = [*module.memory(), getattr(module, "saved", 0)]
    outcome.logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    mine = [each for each in fit.callbacks if any(each is user for user in users)]
    assert len(mine) == len(users), "callbacks of the user are gone"
    outcome.beside = [(type(each).__name__, getattr(each, "seen", None)) for each in fit.callbacks if counts(each)]
    return outcome


def counts(each: Any) -> bool:
    return hasattr(each, "seen")


def difference(plain: Outcome, other: Outcome) -> str:
    """What is not the same, in words; "" if all is."""
    if plain.error != other.error:
        return f"the user's error {plain.error!r} became {other.error!r}"
    if plain.weights.keys() != other.weights.keys():
        return f"weights {plain.weights.keys() ^ other.weights.keys()} are there in one only"
    off = [name for name, weight in plain.weights.items() if not same(weight, other.weights[name])]
    if off:
        return f"weights {off} differ, {[plain.weights[off[0]], other.weights[off[0]]]}"
    if plain.memory != other.memory:
        return f"memory {plain.memory} became {other.memory}"
    if changed := [n for n, v in plain.logged.items() if n not in other.logged or repr(other.logged[n]) != repr(v)]:
        return f"logged {changed} of {plain.logged} became {other.logged}"
    if plain.beside != other.beside:
        return f"callbacks have seen {plain.beside}, then {other.beside}"
    if plain.random != other.random:
        return "the random numbers afterwards differ"
    return ""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


# -- the property -----------------------------------------------------------------------------------------------------

RATES: dict[str, Counter[str]] = {name: Counter() for name in TRICKS}  # of all runs, how they ended


BY_TARGETS = ("Mixup(prob", "CutMix(prob", "HiddenMixup(prob", 'HardExampleFilter(start=1.0, mode="loss")')
DRAWS = ("SAM", "HardExampleFilter(0", "HardExampleFilter(start=1.0)")


def known(spec: Spec, name: str) -> str:
    """Why a trick does something else with such a module, where that is known; "" if it should not."""
    if name.startswith(DRAWS) and spec.net == "lazy":
        return "lazy layers draw their weights in a run that gives its random numbers back"
    if (
        name == "ActivationCheckpointing"
        and "renames" in spec.callbacks
        and any(s.place == "layer" for s in spec.states)
    ):
        return "what a layer of torch holds is looked into once it has got another class, in mid-fit"
    if name == "ChannelsLast" and spec.net == "convolution":
        return "convolutions in another memory format are equal to rounding; the conformance tests compare them so"
    if name == "BatchTransform" and spec.batch in ("one tensor", "ragged", "nodes and edges", "opaque inputs"):
        return "CutOut refuses what is no image, by an error of its own"
    if name == "GradualUnfreeze" and spec.manual == "two optimizers":
        return "that a loss depends on frozen weights alone is known at its backward pass, after a step of the other"
    if name == "ScheduleFree" and spec.optimizer in ("step schedule", "epoch schedule", "tuple of lists", "none"):
        return "its optimizer takes the place of another one here; tests/callbacks/test_schedule_free.py has schedules"
    if name.startswith("HardExampleFilter") and "embedding with max_norm" in spec.extras and "raises" in spec.callbacks:
        return "an embedding scales the rows of a batch when it is scored, before the step, which never comes here"
    if name == "SWA" and spec.manual == "past Lightning":
        return "that an optimizer steps past Lightning is known after its first step; SWA names itself then"
    if name == "SWA" and spec.trainer == "resumes":
        return "its start is a share of a training that is made longer here"
    if name == "LRSchedule" and spec.trainer == "reload":
        return "what it says of an unknown number of steps names neither it nor the module"
    if name.startswith(BY_TARGETS) and spec.manual == "two optimizers" and spec.loss == "without targets":
        return "that no loss saw the target is known at the end of the batch only, since another loss might follow"
    return ""


def check(spec: Spec, names: list[str]) -> None:
    """A module trains with these tricks as without them, or is refused in time."""
    with TemporaryDirectory() as folder:
        plain = run(spec, Trick(), Path(folder))
        assert plain.refused is None, f"{spec} does not train: {plain.refused}"
        for name in names:
            if known(spec, name):
                RATES[name]["known"] += 1
                continue
            try:
                other = run(spec, TRICKS[name], Path(folder))
                problem = refusal_problem(name, other.refused) if other.refused else difference(plain, other)
            except Exception as error:
                raise AssertionError(f"{name} with {spec}: {type(error).__name__}: {error}") from error
            RATES[name]["refused" if other.refused else "accepted"] += 1
            assert not problem, f"{name} with {spec}: {problem}"


def refusal_problem(name: str, error: BaseException) -> str:
    """What a user is not told by the error; "" if all is."""
    text = str(error)
    named = name.split("(")[0].removesuffix("Mixin").removesuffix("Callback")
    if named not in text and "Net" not in text:
        return f"the refusal names neither {named} nor the module: {text}"
    return "" if text.endswith(".") else f"the refusal is no sentence: {text}"


IMAGES = ("BatchTransform", "ChannelsLast", "CutMix(prob=1e-9)")  # tricks for images


@st.composite
def specs_and_tricks(draw: st.DrawFn) -> tuple[Spec, list[str]]:
    """A description, and the tricks that it is run with."""
    spec = draw(specs())
    names = draw(st.lists(st.sampled_from(sorted(TRICKS)), min_size=3, max_size=3, unique=True))
    return (suited(replace(spec, net="convolution")) if any(name in IMAGES for name in names) else spec), names


def many(part: int, modules: int = 100) -> None:
    """So many modules, other ones for each part; most runs must be accepted, so that refusing is no way out."""
    for counts in RATES.values():
        counts.clear()

    @seed(part)
    @cases(modules, print_blob=False)
    @given(made=specs_and_tricks())
    def test(made: tuple[Spec, list[str]]) -> None:
        check(*made)

    test()
    total = sum(RATES.values(), Counter[str]())
    print(f"part {part}: {dict(total)}; { ({name: dict(counts) for name, counts in RATES.items()}) }")
    # Iterators, closures and files in a module cannot be set back, so that some tricks rightly refuse it.
    assert total["accepted"] >= 0.6 * (total["accepted"] + total["refused"]), RATES


def test_modules_train_as_without_a_trick_or_are_refused_in_time() -> None:
    many(0, modules=16)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 21))
def test_many_more_modules_train_as_without_a_trick_or_are_refused_in_time(part: int) -> None:
    many(part)


# -- batches that are cut, guards that guard, masks that are pasted: where a trick does something ---------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ["HardExampleFilter", "SAM(micro_batch_size=2)"])
def test_a_batch_that_is_cut_is_one_of_fewer_samples(name: str, batch: str) -> None:
    spec = Spec(batch=batch)
    (make, read), (x, y), sizes = BATCHES[batch], samples(spec), set()
    rows = read(make(x, y))[0]

    class Checks(module_of(spec)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if torch.is_grad_enabled():  # not in the run that compares samples
                found = [(rows == row).flatten(1).all(1) for row in read(copy.copy(batch))[0]]
                ids = [int(same.nonzero()) for same in found]
                assert told(batch) == told(make(x[ids], y[ids])), f"no batch of the samples {ids}"
                sizes.add(len(ids))
            return super().training_step(batch, batch_idx)

    if name == "HardExampleFilter":
        module, callbacks = Checks(), [lt.HardExampleFilter()]
    else:
        module, callbacks = type("Net", (lt.SAMMixin, Checks), {"sam": lt.SAM(0.1, micro_batch_size=2)})(), []
    with stopped_in_time():
        trainer(callbacks=callbacks, max_epochs=1).fit(module, loader(spec))
        assert 2 in sizes


@contextmanager
def stopped_in_time() -> Iterator[None]:
    """Lets an error of ours pass, if it came before the first step of an optimizer."""
    made: list[Any] = []
    counting = register_optimizer_step_post_hook(lambda *_: made.append(1))
    try:
        yield
    except MisconfigurationException:
        if made:
            raise
    finally:
        counting.remove()


GUARDS: dict[str, Callable[[], pl.Callback]] = {
    "SkipNonFinite": lambda: lt.SkipNonFinite(max_consecutive=99),
    "RewindOnSpike": lambda: lt.RewindOnSpike(every_n_steps=1),
    "TerminateOnNonFinite": lt.TerminateOnNonFinite,
}


@cases(30)
@given(spec=specs(), name=st.sampled_from(sorted(GUARDS)))
def test_a_guard_keeps_weights_finite_or_is_refused_in_time(spec: Spec, name: str) -> None:
    with TemporaryDirectory() as folder, stopped_in_time():
        pl.seed_everything(spec.seed, verbose=False)
        module = module_of(spec)()
        guarded = trainer(callbacks=[GUARDS[name]()], default_root_dir=folder, max_epochs=1)
        with suppress(FloatingPointError, RuntimeError):
            guarded.fit(module, loader(spec, spoiled=True))
        off = [
            name for name, weight in module.named_parameters() if not is_lazy(weight) and not weight.isfinite().all()
        ]
        assert not off, f"{name} with {spec}: {off} are not finite"


class Pixels(pl.LightningModule):
    """Labels every pixel by itself, and rightly."""

    def __init__(self, form: str, batch: str) -> None:
        super().__init__()
        self.form, self.batch, self.losses = form, batch, list[float]()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        image, mask = BATCHES[self.batch][1](batch)
        logits = self.scale * image
        if self.form == "channels last":
            mask = mask.movedim(-1, 1)
        mask = mask.squeeze(1) if self.form == "one channel" else mask
        loss = F.cross_entropy(logits, mask)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mask": lambda labels: labels,
    "one channel": lambda labels: labels[:, None],
    "one-hot": lambda labels: F.one_hot(labels, CLASSES).movedim(-1, 1).float(),
    "channels last": lambda labels: F.one_hot(labels, CLASSES).float(),
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("batch", ["tuple", "dict", "OrderedDict", "dataclass", "three parts", "TensorDict"])
def test_pasted_pixels_keep_their_labels(batch: str, form: str) -> None:
    labels = torch.randint(CLASSES, (8, 6, 6), generator=torch.Generator().manual_seed(0))
    images = F.one_hot(labels, CLASSES).movedim(-1, 1).float()
    train = DataLoader(range(8), 8, collate_fn=lambda ids: BATCHES[batch][0](images[ids], MASKS[form](labels[ids])))
    module = Pixels(form, batch)
    pl.seed_everything(1, verbose=False)
    with stopped_in_time():
        trainer(callbacks=[lt.CutMix()], max_epochs=4).fit(module, train)
        assert max(module.losses) < 1e-3, module.losses
