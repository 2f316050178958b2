"""Fits of random modules: all that a trick could have changed, how they ended, and what two of them differ in."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

import lightning_tricks as lt
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from tests.conformance.trick import Enrolment
from tests.fuzz.migrations import NEW, OLD, SIDES
from tests.fuzz.modules import CALLBACKS, SEVERAL, TRAINERS, VALIDATES, Planned, Spec, data_of, loader, module_of
from tests.fuzz.states import number
from tests.fuzz.tricks import AT_WORK, LIKE, TOLERANCES, TRICKS, Sweeps, kind, known, suited_to, together
from tests.nets import trainer


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


Run = Callable[[Spec, Enrolment, Path], Outcome]


def run(spec: Spec, trick: Enrolment, folder: Path, **attributes: Any) -> Outcome:
    """A fit with a trick as it is "off"; for one that resumes, two. The class of the module has the attributes."""
    first = TRAINERS[spec.trainer]
    if not spec.trainer.startswith("resumes"):
        return fitted(spec, trick, {"max_epochs": 2, **first}, folder, **attributes)
    outcome = fitted(spec, trick, {"max_epochs": 1}, folder, **{"is_old": True, **attributes})
    if outcome.refused or outcome.error:
        return outcome
    others = others_of(spec) if "other settings" in spec.trainer else {}
    return fitted(spec, trick, {"max_epochs": 2, **others}, folder, folder / "first.ckpt", **attributes)


def others_of(spec: Spec) -> dict[str, Any]:
    """Other settings of a second fit, which has optimizer steps of another number of batches, or fewer of them."""
    by_hand = spec.manual or "accumulation" in spec.callbacks
    return {"limit_train_batches": 2} if by_hand else {"accumulate_grad_batches": 2}


def data_for(spec: Spec) -> dict[str, Any]:
    """The arguments of a fit that are its data."""
    if spec.data == "of the module":
        return {}
    if spec.data == "datamodule":
        return {"datamodule": data_of(spec)}
    given = {"train_dataloaders": loader(spec)}
    return {**given, "val_dataloaders": loader(spec)} if spec.trainer in VALIDATES else given


def fitted(
    spec: Spec,
    trick: Enrolment,
    settings: dict[str, Any],
    folder: Path,
    checkpoint: Path | None = None,
    **attributes: Any,
) -> Outcome:
    outcome, made, data = Outcome(), 0, data_for(spec)

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal made
        stepped = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        made += any(id(weight) in stepped for weight in module.parameters())  # else it is a trial on other weights

    L.seed_everything(spec.seed, verbose=False)
    mixed = replace(trick, chunk=None).module(module_of(spec, **attributes), "off")
    if trick.chunk:
        mixed = type("Net", (lt.GradCacheMixin, mixed), {"chunk": trick.chunk["off"]})
    module = mixed()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters() if not is_lazy(weight)}
    users = [CALLBACKS[name]() for name in spec.callbacks]
    settings = {"enable_checkpointing": "checkpoint" in spec.callbacks, **settings}
    callbacks = trick.make_callbacks("off")
    fit = trainer(callbacks=[*users, *callbacks], default_root_dir=folder, **settings)
    try:
        if any(isinstance(callback, Sweeps) for callback in callbacks):
            lt.find_lr(trainer(), module, steps=10, **{name: data[name] for name in data if name != "val_dataloaders"})
    except MisconfigurationException as error:
        outcome.refused = error
        return outcome
    counting = register_optimizer_step_post_hook(count)
    try:
        fit.fit(module, ckpt_path=checkpoint, weights_only=False, **data)
        if settings["max_epochs"] == 1:
            fit.save_checkpoint(folder / "first.ckpt")
        if spec.trainer.startswith("again"):
            fit.fit_loop.max_epochs = 3
            vars(fit).update(others_of(spec) if "other settings" in spec.trainer else {})
            made = 0
            fit.fit(module, **data)
    except Planned as error:
        outcome.error = str(error)
    except (MisconfigurationException, UnknownTotalSteps) as error:
        outcome.refused = error
    finally:
        counting.remove()
    if outcome.refused is not None:
        now = dict(module.named_parameters())
        names = before.keys() & now.keys() - {"words.weight"}  # which its own forward pass writes
        names -= {name for name, weight in now.items() if any(weight is own for own in module.written_by_hand())}
        whole = [name for name in names if not isinstance(now[name], DTensor)]
        off = [name for name in whole if not torch.equal(before[name], now[name])]
        assert not made, f"refused after {made} steps: {outcome.refused}"
        assert checkpoint or spec.trainer in SEVERAL or not off, f"refused, but changed {off}: {outcome.refused}"
        return outcome
    if dist.is_initialized():
        copies: list[Any] = [None] * dist.get_world_size()
        whole = {name: number(w) for name, w in module.named_parameters() if not isinstance(w, DTensor)}
        dist.all_gather_object(copies, whole)
        assert all(copy == whole for copy in copies), f"the ranks have different weights, {copies}"
    outcome.random = (torch.rand(1).item(), random.random(), float(np.random.rand()))
    adapted = hasattr(module, "lightning_tricks_lora")
    state_dict = lt.merge_adapters(module) if adapted else module.state_dict()
    outcome.weights = {name: weight.detach().clone() for name, weight in state_dict.items()}
    outcome.weights |= {f"buffer {name}": each.clone() for name, each in module.named_buffers()}
    outcome.weights |= {f"outside {i}": each.detach() for i, each in enumerate(getattr(module, "outside", ()))}
    outcome.weights = as_old(spec, outcome.weights)
    outcome.memory = [*module.memory(), getattr(module, "saved", 0), getattr(data.get("datamodule"), "seen", {})]
    outcome.logged = {name: float(value) for name, value in fit.callback_metrics.items()}
    mine = [each for each in fit.callbacks if any(each is user for user in users)]
    assert len(mine) == len(users), "callbacks of the user are gone"
    outcome.beside = [(type(each).__name__, getattr(each, "seen", None)) for each in fit.callbacks if counts(each)]
    return outcome


def as_old(spec: Spec, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights by the names and in the shapes that they had before a migration."""
    if not spec.migration:
        return weights
    kept = {name: weight for name, weight in weights.items() if name.split()[-1] not in ("added", "gone")}
    named = {name.replace(f"{NEW}.", f"{OLD}."): weight for name, weight in kept.items()}
    return {name: w.T if w.shape == SIDES[::-1] and name.startswith(f"{OLD}.") else w for name, w in named.items()}


def counts(each: Any) -> bool:
    return hasattr(each, "seen")


def difference(plain: Outcome, other: Outcome, tolerance: float = 0.0) -> str:
    """What is not the same, in words; "" if all is, but for the last digits of numbers."""
    if plain.error != other.error:
        return f"the user's error {plain.error!r} became {other.error!r}"
    if plain.weights.keys() != other.weights.keys():
        return f"weights {plain.weights.keys() ^ other.weights.keys()} are there in one only"
    off = [name for name, weight in plain.weights.items() if not same(weight, other.weights[name], tolerance)]
    if off:
        return f"weights {off} differ, {[plain.weights[off[0]], other.weights[off[0]]]}"
    if plain.memory != other.memory:
        return f"memory {plain.memory} became {other.memory}"
    if changed := [n for n, v in plain.logged.items() if not same(v, other.logged.get(n), tolerance)]:
        return f"logged {changed} of {plain.logged} became {other.logged}"
    if not same(plain.beside, other.beside, tolerance):
        return f"callbacks have seen {plain.beside}, then {other.beside}"
    if plain.random != other.random:
        return "the random numbers afterwards differ"
    return ""


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Whether values are the same; numbers may differ by the tolerance, and what is undefined is so in both."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(*pair, tolerance) for pair in zip(a, b, strict=True))
    if isinstance(a, float):
        return repr(a) == repr(b) or abs(a - b) <= tolerance * (1 + abs(a))
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    exact = torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    return exact or (tolerance > 0 and torch.allclose(a, b, tolerance, tolerance, equal_nan=True))


def refusal_problem(names: tuple[str, ...], error: BaseException) -> str:
    """What a user who has these tricks is not told by the error; "" if all is."""
    text = str(error)
    named = [kind(name).removesuffix("Mixin").removesuffix("Callback") for name in names]
    if not any(name in text for name in [*named, "Net"]):
        return f"the refusal names neither {' nor '.join(named)} nor the module: {text}"
    return "" if text.endswith(".") else f"the refusal is no sentence: {text}"


def accepted(spec: Spec, *names: str, run: Run = run) -> bool:
    """Whether a module trains with tricks at their no-op limits as without them; else it is refused in time."""
    return compared(spec, names, [(LIKE.get(name, Enrolment()), "off") for name in names], off(names), run)


def beside(spec: Spec, name: str, other: str) -> bool:
    """Whether a module trains with a trick at work and another one at its limit as with the first alone."""
    work = (AT_WORK[name], "on")
    return compared(spec, (name, other), [work, (LIKE.get(other, Enrolment()), "off")], [work, *off([other])], run)


def repeated(spec: Spec, name: str, run: Run = run) -> bool:
    """Whether a module trains twice the same with a trick at work; else it is refused in time."""
    return compared(spec, (name,), [(AT_WORK[name], "on")], [(AT_WORK[name], "on")], run)


def off(names: Iterable[str]) -> list[tuple[Enrolment, str]]:
    return [(TRICKS[name], "off") for name in names]


def compared(
    spec: Spec,
    names: tuple[str, ...],
    first: list[tuple[Enrolment, str]],
    second: list[tuple[Enrolment, str]],
    run: Run,
) -> bool:
    """Whether tricks are accepted; what they train is what others do, or what their refusal says is right."""
    spec = suited_to(spec, *names)
    if any(known(spec, name, state) for name, (_, state) in zip(names, second, strict=True)):
        return False
    runs = [partial(run, spec, together(*tricks)) for tricks in (first, second)]
    return alike(spec, names, *runs, at_work=any(state == "on" for _, state in first))


def alike(
    spec: Spec,
    names: tuple[str, ...],
    first: Callable[[Path], Outcome],
    second: Callable[[Path], Outcome],
    *,
    at_work: bool = True,
    tolerance: float = 0.0,
) -> bool:
    """Whether two ways to train a module both do, and the same; where tricks are at work, both may be refused.

    Args:
        spec: The module.
        names: The tricks, one of which a refusal names.
        first: Trains it in a folder, as is right.
        second: Trains it as is to be tested; only this may be refused where tricks are at their limits.
        at_work: Whether tricks are at work in the first, too.
        tolerance: By how much numbers may differ, in their own size.
    """
    tolerance = max([tolerance, *(TOLERANCES.get(name, 0.0) for name in names)])
    try:
        with TemporaryDirectory() as folder, TemporaryDirectory() as another:
            plain, other = first(Path(folder)), second(Path(another))
        assert plain.refused is None or (at_work and other.refused), f"refused without the other: {plain.refused}"
        problem = refusal_problem(names, other.refused) if other.refused else difference(plain, other, tolerance)
        assert not problem, problem
    except Exception as error:
        raise AssertionError(f"{names} with {spec}: {type(error).__name__}: {error}") from error
    return not other.refused
