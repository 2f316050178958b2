"""Cases that fresh eyes and random modules found after the first eleven."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import random
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, StepLR
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.nets import PlainNet, assert_equal, build, data, fit, loader, trainer, weights


class AttrDict(dict[str, Any]):
    """A dictionary whose keys are attributes, as many projects have one."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def batches(collate: Callable[[Tensor, Tensor], Any]) -> DataLoader[Any]:
    return DataLoader(data(24), 8, collate_fn=lambda rows: collate(*torch.utils.data.default_collate(rows)))


def refused(kind: type[PlainNet], message: str, callbacks: list[Callback], **settings: Any) -> None:
    """A fit is refused before its first optimizer step."""
    module = build(kind)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=callbacks, limit_val_batches=0, **settings)
    assert_equal(weights(module), before)


# -- state ------------------------------------------------------------------------------------------------------------


class Counts(PlainNet):
    """Its loss depends on what it has counted, in objects of several kinds."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.settings, self.seen = AttrDict(lr=lr), types.SimpleNamespace(steps=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.steps += 1
        return super().training_step(batch, batch_idx) * self.seen.steps * self.settings.lr


@pytest.mark.parametrize("trick", [lambda: lt.SAMCallback(rho=0.0), lambda: lt.HardExampleFilter(keep=1.0)])
def test_attribute_dictionaries_and_namespaces_are_restored(trick: Callable[[], Callback]) -> None:
    plain, tricked = build(Counts), build(Counts)
    fit(plain)
    fit(tricked, callbacks=[trick()])
    assert_equal(weights(tricked), weights(plain))
    assert tricked.seen.steps == plain.seen.steps


class AverageMeter:
    """A mean as many projects compute it, in an object of a class of their own."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, list[float]()

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class LockedMeter(AverageMeter):
    """One that threads may share; a lock has no state that Python can restore."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def metered(kind: type[AverageMeter]) -> type[PlainNet]:
    class Metered(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.meters = {"loss": kind()}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            self.meters["loss"].update(loss.item())
            return loss

    return Metered


def test_an_object_of_the_users_own_class_counts_a_step_once() -> None:
    plain, sharp, swept = (build(metered(AverageMeter)) for _ in range(3))
    fit(plain)
    fit(sharp, callbacks=[lt.SAMCallback(rho=0.0)])
    lt.find_lr(trainer(), swept, loader())
    assert vars(sharp.meters["loss"]) == vars(plain.meters["loss"])
    assert swept.meters["loss"].values == []


def test_an_object_that_cannot_be_restored_is_refused_by_its_path() -> None:
    message = r"Metered\.meters\['loss'\] \(LockedMeter\) has changed .* cannot be set back"
    refused(metered(LockedMeter), message, [lt.SAMCallback()])
    refused(metered(LockedMeter), message, [lt.HardExampleFilter()])
    with pytest.raises(MisconfigurationException, match=message):
        lt.find_lr(trainer(), build(metered(LockedMeter)), loader())


def test_a_file_is_written_once_or_refused(tmp_path: Path) -> None:
    class Writes(PlainNet):
        hook = "training_step"

        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.log_file = log_file

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.write("training_step", batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.write("on_train_batch_end", batch_idx)

        def write(self, hook: str, batch_idx: int) -> None:
            if hook == self.hook:
                self.log_file.write(f"{batch_idx}\n")

    with (tmp_path / "refused.txt").open("w") as log_file:
        refused(Writes, r"Writes\.log_file \(TextIOWrapper\) has changed", [lt.SAMCallback()])
    Writes.hook = "on_train_batch_end"
    with (tmp_path / "losses.txt").open("w") as log_file:
        fit(build(Writes), callbacks=[lt.SAMCallback()], max_epochs=1)
    assert (tmp_path / "losses.txt").read_text() == "".join(f"{number}\n" for number in range(6))


@pytest.mark.parametrize(
    "made", [itertools.count, lambda: iter([1, 2]), lambda: (n for n in range(3)), lambda: itertools.cycle("ab")]
)
def test_an_iterator_is_refused_by_its_path(made: Callable[[], Iterator[Any]]) -> None:
    class Draws(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.source = made()

    refused(Draws, r"Draws\.source is an iterator", [lt.SAMCallback()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_buffer_is_no_error() -> None:
    class Buffers(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), persistent=False)

    plain, tricked = build(Buffers), build(Buffers)
    fit(plain)
    fit(tricked, callbacks=[lt.SAMCallback(rho=0.0)])
    assert_equal(weights(tricked), weights(plain))


class OwnBackward(PlainNet):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.backwards = getattr(self, "backwards", 0) + 1


def test_state_that_backward_changes_is_refused_under_sam() -> None:
    refused(OwnBackward, r"OwnBackward\.backwards is changed in the backward pass", [lt.SAMCallback()])


# -- batches ----------------------------------------------------------------------------------------------------------


class Opaque:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Opaque:
        return self


class Doubles(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.x = batch.x * 2
        return F.cross_entropy(self(batch.x), batch.y)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_step_that_sets_attributes_of_an_object_in_its_batch_is_refused() -> None:
    refused(Doubles, "Doubles.training_step sets an attribute of a Opaque", [lt.SAMCallback()], train=batches(Opaque))


class Keyed(PlainNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"])


def test_a_batch_that_is_an_attribute_dictionary_is_cut() -> None:
    train = batches(lambda x, y: AttrDict(x=x, y=y))
    fit(build(Keyed), train=train, callbacks=[lt.HardExampleFilter()], limit_val_batches=0)


@pytest.mark.parametrize(
    ("name", "part"),
    [("edges", torch.zeros(2, 20, dtype=torch.long)), ("ids", torch.arange(4)), ("time", torch.ones(5, 8, 4))],
)
def test_a_part_that_may_point_to_samples_is_refused_by_its_path(name: str, part: Tensor) -> None:
    train = batches(lambda x, y: {"x": x, "y": y, name: part})
    refused(Keyed, rf"batch\['{name}'\], a tensor", [lt.HardExampleFilter()], train=train)


def test_weights_of_classes_are_the_same_for_all_samples() -> None:
    train = batches(lambda x, y: {"x": x, "y": y, "class_weights": torch.ones(2), "prior": torch.ones(1, 8)})
    fit(build(Keyed), train=train, callbacks=[lt.HardExampleFilter()], limit_val_batches=0)


class Box(MutableMapping[str, Any]):
    """A mapping whose copies share what it holds."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class KeepsItsBatch(Keyed):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_a_mapping_whose_copies_share_their_contents_is_refused_by_mixup() -> None:
    boxes = [Box(x=x, y=y) for x, y in DataLoader(data(24), 8)]
    train = DataLoader(boxes, batch_size=None, collate_fn=lambda box: box)  # type: ignore[arg-type]
    refused(KeepsItsBatch, "cannot be changed in a copy of the batch, a Box", [lt.Mixup(1.0)], train=train)


# -- optimizers -------------------------------------------------------------------------------------------------------


class OwnOptimizer(PlainNet):
    """Steps an optimizer that Lightning does not know."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.mine = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine.step()


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_guard_refuses_the_steps_of_an_optimizer_that_lightning_does_not_know() -> None:
    refused(OwnOptimizer, "OwnOptimizer.training_step steps SGD past Lightning", [lt.SkipNonFinite()])


class ByHand(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.1)
    automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.sam_step(lambda: self.loss(batch))


class Adversarial(ByHand):
    """An optimizer of its own finds the input."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        moved = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([moved], lr=0.1)
        (moved.grad,) = torch.autograd.grad(-F.cross_entropy(self(x + moved), y), [moved])
        inner.step()
        return F.cross_entropy(self(x + moved.detach()), y)


class Chained(ByHand):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        chained = ChainedScheduler([StepLR(optimizer, 1), ExponentialLR(optimizer, 0.9)], optimizer=optimizer)
        return [optimizer], [{"scheduler": chained, "interval": "step"}]


def helped(module: Any, batch: Any) -> None:
    module.sam_step(lambda: module.loss(batch))


def decorated(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def around(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return around


class PlainAtFirst(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            return helped(self, batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()


class Decorated(PlainAtFirst):
    @decorated
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            self.sam_step(lambda: self.loss(batch))
        else:
            PlainAtFirst.training_step(self, batch, batch_idx)


class Helper:
    def __call__(self, module: Any, batch: Any) -> None:
        module.sam_step(lambda: module.loss(batch))


class HoldsAHelper(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.1)
    automatic_optimization = False

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.helper = Helper()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            return self.helper(self, batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)


@pytest.mark.parametrize("kind", [Adversarial, Chained, PlainAtFirst, Decorated, HoldsAHelper])
def test_right_steps_by_hand_are_not_refused(kind: type[PlainNet]) -> None:
    run = fit(build(kind))
    assert run.global_step == 12


class Outside(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.sam_step(lambda: loss)


def test_a_loss_from_outside_of_the_closure_is_refused_with_the_right_lines() -> None:
    message = "the closure of sam_step uses tensors of a forward pass outside of it. Write it so"
    module = build(Outside)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module)
    assert module.trainer.global_step == 0


class Copies(Callback):
    """Pickles and copies the module in a fit, as callbacks of other projects do."""

    def on_train_batch_end(self, trainer: Any, pl_module: pl.LightningModule, *_: Any) -> None:
        torch.save(pl_module.layers, io.BytesIO())
        pickle.dumps({name: value for name, value in vars(pl_module).items() if name in ("backward", "log")})
        copied = copy.deepcopy(pl_module)
        assert copied.backward.wrapper is None
        self.copied = copied.layers


def test_a_module_can_be_pickled_and_copied_in_a_fit_with_sam() -> None:
    copies = Copies()
    fit(build(PlainNet), callbacks=[lt.SAMCallback(), copies])
    assert isinstance(copies.copied, nn.Sequential)


class DrawsNumbers(PlainNet):
    """Draws from generators of its own in every step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.python, self.numpy, self.system = random.Random(0), numpy.random.default_rng(0), random.SystemRandom()
        self.nested = {"torch": torch.Generator().manual_seed(0), "numpy": numpy.random.RandomState(0)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = self.python.random() + self.numpy.random() + self.nested["numpy"].rand()
        return super().training_step(batch, batch_idx) * (drawn + torch.rand((), generator=self.nested["torch"]))


@pytest.mark.parametrize("name", ["SAMCallback", "find_lr"])
def test_random_generators_of_a_module_are_restored(name: str) -> None:
    plain, tricked = build(DrawsNumbers), build(DrawsNumbers)
    if name == "find_lr":
        lt.find_lr(trainer(), tricked, loader(), steps=10)
    pl.seed_everything(1, verbose=False)
    fit(plain)
    pl.seed_everything(1, verbose=False)
    fit(tricked, callbacks=[lt.SAMCallback(rho=0.0)] if name == "SAMCallback" else [])
    assert_equal(weights(tricked), weights(plain))


class OwnOptimizerMade(PlainNet):
    """Steps an optimizer that Lightning does not know, as ``made`` says."""

    automatic_optimization = False
    made = "in __init__"

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.mine = [super().configure_optimizers()]

    def configure_optimizers(self) -> Any:
        if self.made == "in configure_optimizers":
            self.mine = [super().configure_optimizers()]
        if self.made == "beside another":
            return torch.optim.SGD([self.layers[0].bias], lr=0.0)
        return self.mine if self.made == "and returned" else None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.made == "in training_step" and self.current_epoch == batch_idx == 0:
            self.mine = [super().configure_optimizers()]
        self.mine[0].zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine[0].step()


MADE = ["in __init__", "in configure_optimizers", "in training_step", "beside another", "and returned"]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("made", MADE)
def test_averages_count_the_steps_of_an_optimizer_that_lightning_does_not_know(made: str) -> None:
    ema, known = lt.EMA(0.9), lt.EMA(0.9)
    module = build(OwnOptimizerMade)
    module.made = made
    fit(module, callbacks=[ema])
    fit(build(PlainNet), callbacks=[known])
    assert ema._running.updates == 12
    assert_equal(ema.averaged_state_dict(), known.averaged_state_dict())
    swa, module = lt.SWA(start=0), build(OwnOptimizerMade)
    module.made = made
    fit(module, callbacks=[swa])
    assert swa._running.updates > 0


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("made", MADE)
def test_averages_that_start_after_steps_that_lightning_does_not_count_are_refused(made: str) -> None:
    module = build(OwnOptimizerMade)
    module.made = made
    with pytest.raises(MisconfigurationException, match=r"EMA\(start=3\) waits .* OwnOptimizerMade steps an optimizer"):
        fit(module, callbacks=[lt.EMA(0.9, start=3)], max_epochs=1)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_averages_do_not_count_steps_on_other_tensors() -> None:
    class Attack(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moved = torch.zeros(8, requires_grad=True)
            moved.grad = torch.ones(8)
            torch.optim.SGD([moved], lr=0.1).step()
            return super().training_step(batch, batch_idx)

    ema = lt.EMA(0.9)
    fit(build(Attack), callbacks=[ema], accumulate_grad_batches=3)
    assert ema._running.updates == 4
