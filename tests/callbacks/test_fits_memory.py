"""FitsMemory: a step that runs out of memory trains what it would have trained with more, whatever has failed."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.fits_memory.callback import FitsMemory
from tests.conformance.runs import fp16
from tests.device.devices import CUDA, device
from tests.few import slow
from tests.nets import Net, PlainNet, SaveAt, SteppedByHand, assert_close, assert_equal, build, fit, loader, weights
from tests.ranks import run_cases

IGNORED, WORDS = -100, 11
CUT = pytest.mark.filterwarnings("ignore:FitsMemory. a (batch|part) of:UserWarning")
pytestmark = CUT


class Fails(torch.autograd.Function):
    """Hands on its input, and runs out of memory in the backward pass of more rows than fit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: float) -> Tensor:
        ctx.rows = rows
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if len(gradient) > ctx.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return gradient, None


class Memory(nn.Module):
    """A layer in which at most so many rows fit, in the forward pass or in the backward pass."""

    def __init__(self, rows: float = float("inf"), where: str = "forward") -> None:
        super().__init__()
        self.rows, self.where = rows, where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "backward":
            return Fails.apply(x, self.rows)
        if len(x) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return x


class Small(PlainNet):
    """With little memory between its layers, so that gradients of the last layer are there when the first fails."""

    rows: float = float("inf")
    where = "forward"
    keeps: tuple[nn.Module, ...] = ()

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        first, act, last = self.layers
        self.layers = nn.Sequential(first, act, *self.keeps, Memory(self.rows, self.where), last)


def small(rows: float, where: str = "forward", base: type[Small] = Small, **others: Any) -> type[Small]:
    return type("Small", (base,), {"rows": rows, "where": where, **others})


class Drops(Small):
    keeps = (nn.Dropout(0.5),)


def trained(kind: type[L.LightningModule], *callbacks: Any, **settings: Any) -> Any:
    module = build(kind)
    settings = {"limit_val_batches": 0, "max_epochs": 1, **settings}
    module.run = fit(module, callbacks=[*callbacks, *settings.pop("callbacks", [])], **settings)
    return module


# -- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_does_not_fit_trains_as_it_would_with_more_memory(where: str, rows: int, accumulate: int) -> None:
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    plain = trained(Small, **settings)
    trick = FitsMemory()
    parts = trained(small(rows, where), trick, **settings)
    assert trick.size == {1: 1, 3: 2, 4: 4, 7: 4}[rows]
    assert_close(weights(plain), weights(parts))


@pytest.mark.few(2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", [Net, PlainNet])
def test_what_fits_trains_bit_for_bit_as_without(kind: type[Net], accumulate: int) -> None:
    plain = trained(kind, accumulate_grad_batches=accumulate)
    same = trained(kind, FitsMemory(), accumulate_grad_batches=accumulate)
    assert_equal(weights(plain), weights(same))
    assert plain.run.callback_metrics["train_loss_epoch"] == same.run.callback_metrics["train_loss_epoch"]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_the_run_is_that_of_one_cut_from_the_beginning(where: str) -> None:
    """Also its random numbers: the masks of dropout are those of the parts."""
    failed = trained(small(4, where, Drops), FitsMemory())
    cut = FitsMemory()
    cut_at_once = Sized(cut, 4)
    same = trained(small(float("inf"), where, Drops), cut_at_once, cut)
    assert_equal(weights(failed), weights(same))


class Sized(Callback):
    """Has a trick begin with parts of this size, as a checkpoint would."""

    def __init__(self, trick: FitsMemory, size: int) -> None:
        self.trick, self.size = trick, size

    def on_train_start(self, *_: Any) -> None:
        self.trick.size = self.size


def by_hand(kind: type[Small], size: int) -> Any:
    """An epoch of micro-batches in a plain loop, whose gradients add up to those of a batch."""
    module = build(kind)
    L.seed_everything(7, verbose=False)
    optimizer = module.configure_optimizers()
    for x, y in loader():
        optimizer.zero_grad()
        for part, label in zip(x.split(size), y.split(size), strict=True):
            (F.cross_entropy(module(part), label) * len(part) / len(x)).backward()
        optimizer.step()
    return module


def test_the_parts_are_those_of_a_plain_loop() -> None:
    cut = FitsMemory()
    assert_close(weights(trained(Drops, Sized(cut, 3), cut)), weights(by_hand(Drops, 3)))


def test_fp16_ema_and_mixup_are_those_of_the_whole_batch() -> None:
    def others() -> dict[str, Any]:
        return {"callbacks": [lt.Mixup(0.4), lt.EMA(0.5), lt.SkipNonFinite()]}

    assert_close(weights(trained(Small, **others())), weights(trained(small(3), FitsMemory(), **others())))
    one, other = trained(Small, **fp16()), trained(small(3), FitsMemory(), **fp16())
    assert_close(weights(one), weights(other), 1e-3)


@pytest.mark.parametrize("trick", [lambda: lt.Mixup(0.4, per_sample=True), lt.CutMix, lt.LogitAdjustment])
def test_what_changes_losses_changes_those_of_the_parts(trick: Callable[[], Any]) -> None:
    body = {"on_after_batch_transfer": lambda self, batch, _: (batch[0].unflatten(1, (2, 4)), batch[1])}
    body["forward"] = lambda self, x: self.layers(x.flatten(1))
    plain, cut = (type("Seeing", (kind,), body) for kind in (Small, small(3)))
    assert_close(weights(trained(plain, trick())), weights(trained(cut, trick(), FitsMemory())))


# -- losses that are means over something else than samples -----------------------------------------------------------


class Language(L.LightningModule):
    """A small language model, whose padded targets are ignored."""

    rows: float = float("inf")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), Memory(self.rows), nn.Linear(8, WORDS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class ShortLanguage(Language):
    rows = 3


def sentences() -> DataLoader[Any]:
    """Sentences of other lengths; of the first ones nothing is a target."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (44, 9), generator=generator)
    lengths = torch.randint(1, 10, (44,), generator=generator)
    lengths[:3] = 0
    labels = ids.masked_fill(torch.arange(9) >= lengths[:, None], IGNORED)
    rows = [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]
    return DataLoader(rows, batch_size=8)


@pytest.mark.parametrize("count", [None, lambda batch: (batch["labels"] != IGNORED).sum()])
def test_parts_count_by_their_targets(count: Any) -> None:
    plain = trained(Language, train=sentences())
    cut = trained(ShortLanguage, FitsMemory(count=count), train=sentences())
    assert_close(weights(plain), weights(cut))
    for name in ("loss_step", "loss_epoch"):
        torch.testing.assert_close(plain.run.callback_metrics[name], cut.run.callback_metrics[name])


def contrast(self: Any, batch: Any, batch_idx: int) -> Tensor:
    embedded = self(batch[0])
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


def rebuilt(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return (self(batch[0]) - 1).square().mean()


def summed(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")


def rooted(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.mse_loss(self(batch[0])[:, 0], batch[1].float()).sqrt()


def focal(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = F.cross_entropy(self(batch[0]), batch[1])
    return loss * (1 - torch.exp(-loss)) ** 2


def squared(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = F.cross_entropy(self(batch[0]), batch[1])
    return loss * loss


def rescaled(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(self(batch[0]), batch[1]) * (batch[1] >= 0).sum()


def hardest(self: Any, batch: Any, batch_idx: int) -> Tensor:
    losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
    return losses[losses.detach().topk(2).indices].mean()


def relative(self: Any, batch: Any, batch_idx: int) -> Tensor:
    losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
    return (losses / losses.detach().max()).mean()


@pytest.mark.parametrize("step", [contrast, rebuilt, summed, rooted, focal, squared, rescaled, hardest, relative])
def test_a_loss_of_which_a_part_is_no_part_is_refused_before_it_trains(step: Any) -> None:
    module = build(type("Other", (small(3),), {"training_step": step}))
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=r"FitsMemory.*count=.*GradCacheMixin"):
        fit(module, callbacks=[FitsMemory()], limit_val_batches=0)
    assert_equal(before, weights(module))


def several(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A sum of means with factors, a learned one among them, and values that are only logged."""
    logits = self(batch[0])
    first, second = F.cross_entropy(logits, batch[1]), F.mse_loss(logits[:, 0], batch[1].float())
    self.log("root", second.sqrt())
    bias = self.layers[0].bias[0]
    return torch.nan_to_num(0.5 * first - (-2 * second.float()) / 3) * torch.exp(-bias) + bias


def test_a_sum_of_means_is_the_mean_of_its_parts() -> None:
    kinds = [type("Other", (kind,), {"training_step": several}) for kind in (Small, small(3))]
    plain, cut = trained(kinds[0]), trained(kinds[1], FitsMemory())
    assert_close(weights(plain), weights(cut))


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_is_skipped_is_skipped_in_parts(where: str) -> None:
    def skips(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else Small.training_step(self, batch, batch_idx)

    kinds = [type("Skips", (kind,), {"training_step": skips}) for kind in (Small, small(3, where))]
    plain, cut = trained(kinds[0]), trained(kinds[1], FitsMemory())
    assert_close(weights(plain), weights(cut))
    fifth = loader().dataset[4][0]

    def skips_some(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if torch.equal(batch[0][0], fifth) else Small.training_step(self, batch, batch_idx)

    with pytest.raises(MisconfigurationException, match="of every part of a batch or of none"):
        trained(type("Some", (small(3, where),), {"training_step": skips_some}), FitsMemory())


def test_a_loss_without_targets_is_counted_by_hand() -> None:
    kinds = [type("Other", (kind,), {"training_step": rebuilt}) for kind in (Small, small(3))]
    plain, cut = trained(kinds[0]), trained(kinds[1], FitsMemory(count=lambda batch: len(batch[0])))
    assert_close(weights(plain), weights(cut))


# -- what a failed attempt leaves -------------------------------------------------------------------------------------


class Measures(Small):
    """Counts its steps, and sees its samples before it fails and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        self.log("seen", self.seen.clone(), reduce_fx="max")
        self.log("count", float(len(batch[0])), reduce_fx="sum", batch_size=len(batch[0]))
        logits = self(batch[0])
        self.steps += 1
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach(), "half": loss.detach() / 2, "text": "a"}


class Outputs(Callback):
    def __init__(self) -> None:
        self.of: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of.append(outputs)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_metrics_logs_and_outputs_are_those_of_the_batch(where: str) -> None:
    plain, cut = Outputs(), Outputs()
    whole = trained(Measures, plain)
    parts = trained(small(3, where, Measures), cut, FitsMemory(), log_every_n_steps=1)
    assert parts.run.callback_metrics["tricks/micro_batch_size"] == 2
    assert float(parts.seen) == 44
    assert (whole.steps, parts.steps) == (6, 5 * 4 + 2)
    names = {"seen", "count", "train_loss_step", "train_loss_epoch"}
    assert names <= whole.run.callback_metrics.keys()
    for name in names:
        torch.testing.assert_close(whole.run.callback_metrics[name], parts.run.callback_metrics[name])
    for one, other in zip(plain.of, cut.of, strict=True):
        assert one.pop("text") == other.pop("text")
        torch.testing.assert_close(one, other)


@pytest.mark.few(2)
@pytest.mark.parametrize("zeroes", ["on_before_zero_grad", "optimizer_zero_grad", None])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_hooks_run_once_a_batch_and_see_the_gradients_that_they_would_see(where: str, zeroes: str | None) -> None:
    def watched(base: type[Small]) -> Any:
        seen: list[tuple[str, float]] = []

        def norm(module: Any) -> float:
            return sum(float(weight.grad.norm()) for weight in module.parameters() if weight.grad is not None)

        def zero(self: Any, *args: Any) -> None:
            seen.append(("zero", norm(self)))
            getattr(super(kind, self), zeroes)(*args)

        def before(self: Any, loss: Tensor) -> None:
            seen.append(("before", float(loss.detach())))

        def after(self: Any) -> None:
            seen.append(("after", norm(self)))

        body: dict[str, Any] = {"on_before_backward": before, "on_after_backward": after}
        kind = type("Watched", (base,), {**body, zeroes: zero} if zeroes else body)
        trained(kind, *([FitsMemory()] if base.rows < 9 else []), accumulate_grad_batches=2)
        return seen

    plain, cut = watched(Small), watched(small(3, where))
    assert [name for name, _ in plain] == [name for name, _ in cut]
    torch.testing.assert_close([x for _, x in plain], [x for _, x in cut], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_of_a_failed_attempt_is_in_memory_when_it_runs_again(where: str) -> None:
    alive: list[int] = []

    class Big(small(4, where)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            gc.collect()
            alive.append(sum(1 for held in gc.get_objects() if type(held) is Activation))
            self.held = None
            return super().training_step(batch, batch_idx)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(Activation.apply(x))

    trained(Big, FitsMemory(), limit_train_batches=1, max_epochs=1)
    assert alive == [0, 0, 0]


class Activation:
    """What a backward pass keeps."""

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        return Holds.apply(x.requires_grad_(), Activation())


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Activation) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


# -- checkpoints, messages and errors ---------------------------------------------------------------------------------


def test_a_run_that_is_resumed_begins_with_the_size(tmp_path: Any) -> None:
    whole = trained(small(3), FitsMemory(), SaveAt(tmp_path / "half.ckpt", epoch=0), max_epochs=2)
    trick = FitsMemory()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FitsMemory")
        resumed = trained(small(3), trick, ckpt_path=tmp_path / "half.ckpt", max_epochs=2)
    assert trick.size == 2
    assert_equal(weights(whole), weights(resumed))


def test_it_says_once_what_it_does() -> None:
    with pytest.warns(UserWarning, match="did not fit") as told:
        trained(small(3), FitsMemory())
    texts = [str(each.message) for each in told if "FitsMemory" in str(each.message)]
    assert texts == [
        "FitsMemory: a batch of 8 samples did not fit into memory: training goes on in parts of 4.",
        "FitsMemory: a part of 4 samples did not fit into memory: training goes on in parts of 2.",
    ]


def test_it_says_that_batchnorm_sees_parts() -> None:
    class Normed(small(4)):  # type: ignore[misc]
        keeps = (nn.BatchNorm1d(16),)

    with pytest.warns(UserWarning, match="1 BatchNorm layers normalize each part by itself"):
        trained(Normed, FitsMemory())


def test_what_does_not_fit_in_the_smallest_part_is_an_error_with_a_remedy() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"this rank ran out of memory with 4 of the 8 samples"):
        trained(small(3), FitsMemory(minimum=4))


def test_other_errors_are_as_they_are() -> None:
    def broken(self: Any, batch: Any, batch_idx: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trained(type("Broken", (Small,), {"training_step": broken}), FitsMemory())


def test_the_step_of_the_optimizer_cannot_be_cut() -> None:
    class Heavy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    body = {"configure_optimizers": lambda self: Heavy(self.parameters(), 0.1)}
    with pytest.raises(torch.OutOfMemoryError, match=r"step of Heavy.*8-bit optimizer"):
        trained(type("Heavy", (Small,), body), FitsMemory())


def test_a_step_that_writes_into_its_batch_is_refused_when_it_has_to_run_again() -> None:
    def writes(self: Any, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(2)
        return Small.training_step(self, batch, batch_idx)

    body = {"training_step": writes}
    trained(type("Writes", (Small,), body), FitsMemory())  # which runs once
    with pytest.raises(MisconfigurationException, match="writes into its batch"):
        trained(type("Writes", (small(3),), body), FitsMemory())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_that_the_failed_attempt_has_drawn_are_refused() -> None:
    class Lazy(small(3)):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            norm = nn.LazyBatchNorm1d()
            self.layers = nn.Sequential(nn.LazyLinear(16), norm, Memory(self.rows), nn.LazyLinear(16), nn.Linear(16, 2))

    trained(type("Fits", (Lazy,), {"rows": 100}), FitsMemory())  # which runs once
    with pytest.raises(MisconfigurationException, match=r"makes the lazy tensor layers\.0\.weight"):
        trained(Lazy, FitsMemory())  # else layer 2 would have the random numbers of layer 0


def test_a_hook_whose_change_would_be_undone_is_refused() -> None:
    def count(self: Any, optimizer: Any) -> None:
        self.zeroed = getattr(self, "zeroed", 0) + 1

    assert trained(type("Hooked", (small(3),), {"on_before_zero_grad": count}), FitsMemory()).zeroed == 6
    with pytest.raises(MisconfigurationException, match=r"zeroed is changed by a hook before it"):
        trained(type("Hooked", (small(3, "backward"),), {"on_before_zero_grad": count}), FitsMemory())

    class Sums(small(3, "backward")):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.seen = {"sum": torch.zeros(1)}

        def on_before_backward(self, loss: Tensor) -> None:
            self.seen["sum"].data += loss.detach()

    with pytest.raises(MisconfigurationException, match=r"seen\['sum'\] is changed by a hook before it"):
        trained(Sums, FitsMemory())


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, random.sample], ids=["torch", "numpy", "python"])
def test_a_hook_whose_random_numbers_would_be_drawn_again_is_refused(draw: Any, request: Any) -> None:
    def noise(self: Any, loss: Tensor) -> None:
        draw(range(3), 1) if draw == random.sample else draw(1)

    def hooked(where: str) -> Any:
        return type("Hooked", (small(3, where),), {"on_before_backward": noise})

    trained(hooked("forward"), FitsMemory())  # before any hook
    name = request.node.callspec.id
    with pytest.raises(MisconfigurationException, match=rf"the random generator of {name} is changed by a hook"):
        trained(hooked("backward"), FitsMemory())


def test_what_cannot_be_cut_is_refused() -> None:
    class ByHand(SteppedByHand, Small):
        pass

    with pytest.raises(MisconfigurationException, match="automatic_optimization=False"):
        trained(ByHand, FitsMemory())
    rows = [{"x": x, "y": y} for x, y in loader().dataset]
    listed = DataLoader(rows, batch_size=8, collate_fn=list)
    body = {"training_step": lambda self, batch, _: self(torch.stack([row["x"] for row in batch])).mean()}
    with pytest.raises(MisconfigurationException, match="one entry per sample") as refused:
        trained(type("Lists", (small(3),), body), FitsMemory(), train=listed)
    assert isinstance(refused.value.__cause__, torch.OutOfMemoryError)  # why the batch was to be cut
    with pytest.raises(ValueError, match="minimum"):
        FitsMemory(minimum=0)
    with pytest.raises(TypeError, match="count must be a function"):
        FitsMemory(count=3)  # type: ignore[arg-type]


# -- several ranks ----------------------------------------------------------------------------------------------------


def on_two_ranks(number: int, cases: list[tuple[str, dict[str, Any]]]) -> Any:
    """Train where one rank has less memory than the other."""
    warnings.filterwarnings("ignore", "FitsMemory")
    settings = cases[number][1]
    rank = int(os.environ["RANK"])
    rows = settings.pop("rows")[rank]
    kind = small(rows, settings.pop("where"), base=Buffered if settings.pop("buffers", False) else Small)
    trick = FitsMemory(minimum=settings.pop("minimum", 1))
    strategy = DDPStrategy(**settings.pop("ddp", {}))
    module = build(kind)
    settings = {"devices": 2, "strategy": strategy, "limit_val_batches": 0, **settings}
    try:
        callbacks = [] if settings.pop("without", False) else [trick]
        fit(module, train=loader(48, 8), callbacks=callbacks, **settings)
    except torch.OutOfMemoryError as error:
        return str(error), trick.size
    return weights(module), trick.size


class Buffered(Small):
    """With a buffer, which DDP sends to all ranks, and a layer that no loss comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += len(batch[0])
        loss = super().training_step(batch, batch_idx)
        self.log("synced", loss.detach(), sync_dist=True, on_step=True)
        return loss

    def on_train_epoch_end(self) -> None:
        assert len(self.all_gather(self.seen)) == 2  # which is refused in a step alone


INF = float("inf")
UNUSED = {"buffers": True, "ddp": {"find_unused_parameters": True}}
VIEWS = {"ddp": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"rows": (INF, INF), "where": "forward", "without": True},
    "fits": {"rows": (INF, INF), "where": "forward"},
    "forward": {"rows": (INF, 3), "where": "forward"},
    "backward": {"rows": (3, INF), "where": "backward", "ddp": {"bucket_cap_mb": 1e-4}},
    "views": {"rows": (3, INF), "where": "backward", **VIEWS},
    "both": {"rows": (2, 5), "where": "backward"},
    "unused plain": {"rows": (INF, INF), "where": "forward", "without": True, **UNUSED},
    "unused": {"rows": (INF, 3), "where": "backward", **UNUSED},
    "window plain": {"rows": (INF, INF), "where": "forward", "without": True, "accumulate_grad_batches": 2},
    "window": {"rows": (INF, 3), "where": "backward", "accumulate_grad_batches": 2, **VIEWS},
    "window forward": {"rows": (3, INF), "where": "forward", "accumulate_grad_batches": 2},
    "too small": {"rows": (INF, 3), "where": "backward", "minimum": 4},
}
COMPARED = [name for name in CASES if "plain" not in name and name != "too small"]
QUICK = ("plain", "backward")


@cache
def on_ranks(quick: bool) -> dict[str, list[Any]]:
    """What each rank has trained, in the cases that are quick or in all others."""
    cases = [(name, dict(case)) for name, case in CASES.items() if (name in QUICK) == quick or name == "plain"]
    found = run_cases(on_two_ranks, [*range(len(cases))], cases)
    return {name: found[number] for number, (name, _) in enumerate(cases)}


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in COMPARED])
def test_ranks_cut_together_and_train_what_they_would(name: str) -> None:
    found, first = on_ranks(name in QUICK), name.split()[0]
    (here, size), (there, other) = found[name]
    (reference, _), _ = found[f"{first} plain" if first in ("unused", "window") else "plain"]
    assert size == other == (None if name == "fits" else 2)
    assert_equal(here, there)
    (assert_equal if name == "fits" else assert_close)(reference, here)


@pytest.mark.slow
def test_the_ranks_fail_together() -> None:
    (here, _), (there, _) = on_ranks(False)["too small"]
    assert "another rank ran out of memory with 4 of the 8" in here
    assert "this rank ran out of memory with 4 of the 8" in there


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", CUDA)
def test_parts_on_a_device_stay_there(on: str) -> None:
    trained_there: list[Any] = []
    with device(on) as there:
        for callbacks in ([], [Sized(cut := FitsMemory(), 3), cut]):
            module, noted = build(Small), len(there.simulation.waits) if there.simulation else 0
            settings = {"accelerator": there.accelerator, "callbacks": callbacks, "limit_val_batches": 0}
            fit(module, train=loader(44, 11), max_epochs=1, **settings)
            waits = len(there.simulation.waits) - noted if there.simulation else 0
            trained_there.append(({name: value.cpu() for name, value in weights(module).items()}, waits))
    (plain, usual), (parts, waits) = trained_there
    assert_close(plain, parts, 1e-5)
    assert waits <= usual + 1  # the logged size comes at the end of the epoch


class Wide(PlainNet):
    """Whose activations take half a gigabyte for 4096 samples."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 4096), *(nn.Tanh() for _ in range(6)), nn.Linear(4096, 2))


@pytest.mark.gpu
def test_a_full_gpu_trains_what_a_larger_one_would() -> None:
    trick, wide = FitsMemory(), loader(8192, 4096)
    settings = {"accelerator": "gpu", "train": wide, "limit_val_batches": 0, "max_epochs": 1}
    torch.cuda.reset_peak_memory_stats()
    plain, full = build(Wide), build(Wide)
    fit(plain, **settings)
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.7 * peak / torch.cuda.get_device_properties(0).total_memory)
    try:
        fit(full, callbacks=[trick], **settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trick.size in (1024, 2048)
    assert_close(weights(plain), weights(full), 1e-4)
