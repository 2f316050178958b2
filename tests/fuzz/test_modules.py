"""Random modules train with every trick at its no-op limit as without it, or are refused before the first step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.fuzz.batches import BATCHES
from tests.fuzz.layers import CLASSES
from tests.fuzz.modules import Spec, loader, module_of, samples, specs
from tests.fuzz.profiles import cases, modules
from tests.fuzz.runs import accepted
from tests.fuzz.states import told
from tests.fuzz.tricks import TRICKS
from tests.nets import trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do


@pytest.fixture(scope="module", autouse=True)
def _quick_collection() -> Iterator[None]:
    """FitsMemory collects garbage after each failure, and need not look through torch and Lightning for it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_every_trick_is_there_at_its_limit() -> None:
    assert all(trick.make_callbacks("off") or trick.sam or trick.chunk for trick in TRICKS.values())


def many(name: str, number: int) -> None:
    """So many modules, other ones for each trick; it must accept some, so that refusing is no way out."""
    found: list[bool] = []

    @seed(crc32(name.encode()))
    @cases(number, print_blob=False)
    @given(spec=specs())
    def test(spec: Spec) -> None:
        found.append(accepted(spec, name))

    test()
    assert sum(found) >= number // 10, f"{name} was accepted by {sum(found)} of {len(found)} modules"


@pytest.mark.few(6)
@pytest.mark.parametrize("name", TRICKS)
def test_modules_train_as_without_a_trick_or_are_refused_in_time(name: str) -> None:
    many(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRICKS)
def test_many_more_modules_train_as_without_a_trick_or_are_refused_in_time(name: str) -> None:
    many(name, modules(100))


# -- batches that are cut, guards that guard, masks that are pasted: where a trick does something ---------------------


@pytest.mark.few(10)
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


GUARDS: dict[str, Callable[[], L.Callback]] = {
    "SkipNonFinite": lambda: lt.SkipNonFinite(max_consecutive=99),
    "RewindOnSpike": lambda: lt.RewindOnSpike(every_n_steps=1),
    "TerminateOnNonFinite": lt.TerminateOnNonFinite,
}


@cases(30)
@given(spec=specs(), name=st.sampled_from(sorted(GUARDS)))
def test_a_guard_keeps_weights_finite_or_is_refused_in_time(spec: Spec, name: str) -> None:
    with TemporaryDirectory() as folder, stopped_in_time():
        L.seed_everything(spec.seed, verbose=False)
        module = module_of(spec)()
        guarded = trainer(callbacks=[GUARDS[name]()], default_root_dir=folder, max_epochs=1)
        with suppress(FloatingPointError, RuntimeError):
            guarded.fit(module, loader(spec, spoiled=True))
        off = [
            name for name, weight in module.named_parameters() if not is_lazy(weight) and not weight.isfinite().all()
        ]
        assert not off, f"{name} with {spec}: {off} are not finite"


class Pixels(L.LightningModule):
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
    L.seed_everything(1, verbose=False)
    with stopped_in_time():
        trainer(callbacks=[lt.CutMix()], max_epochs=4).fit(module, train)
        assert max(module.losses) < 1e-3, module.losses
