"""Naive forms of the tricks for the plain loop: one tensor, one sample at a time, as their formulas are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize

from tests.nets import data
from tests.reference.loop import Batch, Naive
from tests.reference.sam import naive_perturb
from tests.reference.swa import naive_statistics


class Scheduled(Naive):
    def __init__(self, factor: Callable[[int, int], float]) -> None:
        self.factor = factor  # type: ignore[method-assign]


class WarmUp(Naive):
    """Over three steps of the optimizer, of which one that is left out is none."""

    made = 0

    def factor(self, step: int, total: int) -> float:
        return min(1.0, (self.made + 1) / 3)

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.made += 1


class Average(Naive):
    """In fp64; ``share`` is that of the weights after a step, 0 for none. What is unfrozen joins as an epoch begins."""

    def share(self, step: int, ends_epoch: bool) -> float:
        raise NotImplementedError

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.average: list[Tensor] = [p.detach().double().clone() for p in module.parameters()]
        self.joined = [p.requires_grad for p in module.parameters()]
        self.updates = 0

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        share = self.share(step, ends_epoch)
        self.updates += share > 0
        for number, (average, p) in enumerate(zip(self.average, module.parameters(), strict=True)):
            average += (share if self.joined[number] else 1) * (p.detach().double() - average)
            self.joined[number] |= ends_epoch and p.requires_grad

    def end(self, module: Any) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, module.parameters(), strict=True):
                p.copy_(average)


class EMA(Average):
    """Decay 0.9, with warm-up."""

    def share(self, step: int, ends_epoch: bool) -> float:
        return 1 - min(0.9, (1 + self.updates) / (10 + self.updates))


class ScheduleFree(Naive):
    """Schedule-free SGD as in its paper: z descends, x is its running mean, y between both is trained.

    BatchNorm's statistics are those of x.
    """

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.z = [weight.detach().clone() for weight in module.parameters()]
        self.x = [weight.detach().clone() for weight in module.parameters()]
        self.steps = 0
        for group in optimizer.param_groups:
            group["lr"] /= 2
        optimizer.step = partial(self.step, optimizer, list(module.parameters()))  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, weights: list[Any]) -> None:
        self.steps += 1
        rates = {weight: group["lr"] for group in optimizer.param_groups for weight in group["params"]}
        for y, z, x in zip(weights, self.z, self.x, strict=True):
            z -= 0 if y.grad is None else rates[y] * y.grad
            x += (z - x) / self.steps
            y.copy_(0.9 * x + 0.1 * z)

    def end(self, module: Any) -> None:
        for weight, x in zip(module.parameters(), self.x, strict=True):
            weight.data.copy_(x)
        with self.cast():
            recalibrate(module, self.batches)


class Lookahead(Naive):
    """At every second step of SGD slow weights go half of the way to it, and SGD goes on from them."""

    depth = 7  # a part of the optimizer's step

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.slow: dict[str, Tensor] = {}

    @torch.no_grad()
    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        for name, weight in with_gradients(module).items() if step % 2 == 0 else ():
            slow = self.slow.setdefault(name, weight.detach().clone())
            slow += 0.5 * (weight - slow)
            weight.copy_(slow)


class SWA(Average):
    """From step 3 on: that step, and each epoch's last one. BatchNorm's statistics are those of the mean."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def share(self, step: int, ends_epoch: bool) -> float:
        return (step >= 3 and (ends_epoch or not self.updates)) / (self.updates + 1)

    def end(self, module: Any) -> None:
        super().end(module)
        with self.cast():
            recalibrate(module, self.batches)


def recalibrate(module: Any, batches: list[Batch]) -> None:
    """BatchNorm's statistics of the present weights, of the batches that are finite."""
    inputs = [x.flatten(1) for x, _ in batches if x.isfinite().all()]
    mean, var = naive_statistics(module.layers, 1, inputs)
    module.layers[1].running_mean, module.layers[1].running_var = mean.float(), var.float()


class SAM(Naive):
    """Radius 0.1; with ``eta`` that of ASAM."""

    depth = 0

    def __init__(self, eta: float | None = None) -> None:
        self.eta = eta

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        old, accumulated = _copied(module.parameters()), [p.grad for p in module.parameters()]
        module.zero_grad()
        super().descend(module, batch, number, share)
        buffers, trained = _copied(module.buffers()), with_gradients(module)
        naive_perturb(trained, [p.grad / share for p in trained.values()], 0.1, self.eta)
        for p, gradient in zip(module.parameters(), accumulated, strict=True):
            p.grad = gradient
        super().descend(module, batch, number, share)
        _write(module.parameters(), old)
        _write(module.buffers(), buffers)  # as the first run left them


class Hardest(Naive):
    """The half with the largest losses, which a pass that leaves no traces finds once; all, if one is not finite."""

    depth = 4
    kept: tuple[int, list[int]] = -1, []  # of the batch with that number

    def losses(self, module: Any, batch: Batch, number: int) -> Tensor:
        if self.kept[0] != number:
            self.kept = number, self.chosen(module, batch)
        kept = self.kept[1]
        return super().losses(module, (batch[0][kept], batch[1][kept]), number)

    def chosen(self, module: Any, batch: Batch) -> list[int]:
        buffers = _copied(module.buffers())
        with torch.no_grad():
            losses = self.of(module, batch)
        _write(module.buffers(), buffers)
        return larger_half(losses) if losses.isfinite().all() else list(range(len(losses)))


class HardestLosses(Naive):
    """The larger half of the losses; that of the first run."""

    depth = 5
    kept: tuple[int, list[int]] = -1, []

    def losses(self, module: Any, batch: Batch, number: int) -> Tensor:
        losses = super().losses(module, batch, number)
        if self.kept[0] != number:
            self.kept = number, larger_half(losses)
        return losses[self.kept[1]]


def larger_half(losses: Tensor) -> list[int]:
    """The samples with the larger losses, in their order."""
    ordered = sorted(range(len(losses)), key=losses.tolist().__getitem__)
    return sorted(ordered[-max(1, round(len(losses) / 2)) :])


class Seen(Callback):
    """What batch callbacks drew, and the batch that they made of it; such random numbers have no naive form."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, Any]] = []  # by the name of the callback's class
        self.inputs: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.drawn.append({type(each).__name__: getattr(each, "drawn", None) for each in trainer.callbacks})
        self.inputs.append(batch[0].clone())


class Mixed(Naive):
    """Each sample with its partner, one after the other."""

    depth = 6
    trick = "Mixup"

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def losses(self, module: Any, batch: Batch, number: int) -> Tensor:
        if (drawn := self.seen.drawn[number][self.trick]) is None:  # it was another trick's turn
            return super().losses(module, batch, number)
        x, y = batch
        lams, index = torch.as_tensor(drawn.lam).expand(len(y)), drawn.index
        assert sorted(index.tolist()) == list(range(len(y)))
        with self.cast():
            logits = self.logits(module, x, lams, index, number)
            each = [F.cross_entropy(logits, target, reduction="none") for target in (y, y[index])]
        return lams * each[0] + (1 - lams) * each[1]

    def logits(self, module: Any, x: Tensor, lams: Tensor, index: Tensor, number: int) -> Tensor:
        mixed = [lam * x[i] + (1 - lam) * x[j] for i, (lam, j) in enumerate(zip(lams, index, strict=True))]
        given = self.seen.inputs[number]
        torch.testing.assert_close(torch.stack(mixed), given, atol=1e-6, rtol=1e-6, equal_nan=True)
        return module(given)


class Cut(Mixed):
    """A box of each image is its partner's, as large as the loss says."""

    trick = "CutMix"

    def logits(self, module: Any, x: Tensor, lams: Tensor, index: Tensor, number: int) -> Tensor:
        given = self.seen.inputs[number]
        share = 1 - box(x, given, index).double().mean()
        assert (index == torch.arange(len(x))).all() or ((lams - share).abs() < 1e-6).all()
        return module(given)


class CutMasks(Cut):
    """The masks of the images have the same box of their partners', and losses are not mixed."""

    def losses(self, module: Any, batch: Batch, number: int) -> Tensor:
        given, index = self.seen.inputs[number], self.seen.drawn[number][self.trick].index
        cut = box(batch[0], given, index)
        return self.of(module, (given, torch.where(cut, batch[1][index], batch[1])))


def box(own: Tensor, given: Tensor, index: Tensor) -> Tensor:
    """Where images are those of their partners; nowhere, if all are partners of their own."""
    cut = ((own - given).abs() > 1e-6).any(0)
    torch.testing.assert_close(given, torch.where(cut, own[index], own), atol=1e-6, rtol=0, equal_nan=True)
    assert cut.sum() == cut.any(1).sum() * cut.any(0).sum(), "this is no box"
    return cut


class Transformed(Naive):
    """A square of each image, half as large as its shorter side, is zero."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def given(self, batch: Batch, number: int) -> Batch:
        for image, before in zip(self.seen.inputs[number], batch[0], strict=True):
            changed = ~torch.isclose(image, before, rtol=0, atol=1e-6, equal_nan=True)
            assert changed.sum() == round(min(image.shape) / 2) ** 2 == (image == 0).sum()
        return self.seen.inputs[number], batch[1]


class Dropped(Transformed):
    """An image keeps half of its rows and of its columns, in their order."""

    def given(self, batch: Batch, number: int) -> Batch:
        given = self.seen.inputs[number]
        for image, before in zip(given, batch[0], strict=True):
            height, width = before.shape
            kept = product(
                combinations(range(height), height - height // 2), combinations(range(width), width - width // 2)
            )
            assert any(torch.equal(image, before[list(rows)][:, list(columns)]) for rows, columns in kept)
        return given, batch[1]


class GrowingSequences(Naive):
    """Half of a sequence at first, all of it from the fourth step on."""

    depth = 2
    made = 0

    def given(self, batch: Batch, number: int) -> Batch:
        return self.begun(batch[0]), batch[1]

    def side(self, full: int) -> int:
        return max(1, round(full * min(1.0, 0.5 + self.made / 8)))

    def begun(self, x: Tensor) -> Tensor:
        return x[:, : self.side(x.shape[1])]

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.made = step

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
        self.made = step
        return step


class GrowingImages(GrowingSequences):
    """Half of the rows and columns at first."""

    def begun(self, x: Tensor) -> Tensor:
        sides = [self.side(full) for full in x.shape[1:]]
        return x if sides == [*x.shape[1:]] else resize(x[:, None], sides, antialias=True)[:, 0]


class Hidden(Mixed):
    """What the second layer is given is mixed."""

    trick = "HiddenMixup"

    def logits(self, module: Any, x: Tensor, lams: Tensor, index: Tensor, number: int) -> Tensor:
        def mixed(layer: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
            return (torch.lerp(given[0][index], given[0], float(lams[0])),)

        hook = module.layers[1].register_forward_pre_hook(mixed)
        logits = module(x)
        hook.remove()
        return logits


class Noisy(Naive):
    """Noise on every number of the embeddings of tokens."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Embedding):
                layer.register_forward_hook(self.noisy)

    def given(self, batch: Batch, number: int) -> Batch:
        self.number = number
        return batch

    def noisy(self, layer: nn.Module, ids: Any, embedded: Tensor) -> Tensor:
        if not layer.training:  # of a teacher
            return embedded
        _, length, width = embedded.shape
        with torch.random.fork_rng():
            torch.manual_seed(self.seen.drawn[self.number]["NEFTune"])
            noise = 2 * torch.rand(embedded.shape, dtype=embedded.dtype) - 1
        return embedded + noise * 5 / (length * width) ** 0.5


class Adjusted(Naive):
    """Logits are raised by the logarithm of the share of their class among the labels."""

    def __init__(self, batches: list[Batch]) -> None:
        labels = torch.cat([y.flatten() for _, y in batches])
        self.prior = torch.tensor([(labels == each).double().mean() for each in range(2)])

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        module.forward = partial(self.raised, module.forward)

    def raised(self, forward: Any, x: Tensor) -> Tensor:
        logits = forward(x)
        return logits + self.prior.log().view(-1, *[1] * (logits.ndim - 2)).to(logits.dtype)

    def end(self, module: Any) -> None:
        del module.forward


class UnitClip(Naive):
    """A row's or a vector's gradient is at most 0.02 times its weights."""

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for p in with_gradients(module).values():
            for weight, gradient in zip(p.data, p.grad, strict=True) if p.ndim > 1 else [(p.data, p.grad)]:
                limit = 0.02 * max(weight.norm().item(), 1e-3)
                gradient *= min(1.0, limit / max(gradient.norm().item(), 1e-12))


class PercentileClip(Naive):
    """The gradient's norm is at most the tenth percentile of the norms so far."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.norms: list[float] = []

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        gradients = [p.grad for p in with_gradients(module).values()]
        self.norms.append(math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients)))
        for gradient in gradients:
            gradient *= min(1.0, np.percentile(self.norms, 10) / self.norms[-1])


class AllTargets(Naive):
    """Each batch counts as its targets, in units of the window's first batch, which begins without gradients."""

    depth = -3

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        if not any(gradient.any() for gradient in (p.grad for p in with_gradients(module).values())):
            self.targets, self.first = 0, batch[1].numel()
        self.targets += batch[1].numel()
        super().descend(module, batch, number, share * batch[1].numel() / self.first)

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for p in with_gradients(module).values():
            p.grad *= self.window * self.first / self.targets


class Frozen(Naive):
    """The first layer stops at step 3."""

    depth = 1
    trains = (True, False)  # before and after it

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        module.layers[0].requires_grad_(self.trains[0])

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        module.layers[0].requires_grad_(self.trains[step >= 3])

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
        self.stepped(module, step, ends_epoch=False)
        return step


class Unfrozen(Frozen):
    """The first layer waits for step 3, and has half the learning rate."""

    trains = (False, True)

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        super().begin(module, optimizer)
        late = list(module.layers[0].parameters())
        (group,) = optimizer.param_groups
        group["params"] = [p for p in group["params"] if all(p is not other for other in late)]
        optimizer.add_param_group({"params": late, "lr": group["lr"] / 2})


class Growing(Naive):
    """One batch makes a step in the first epoch, two in those after it."""

    def size(self, epoch: int, accumulate: int) -> int:
        return min(epoch + 1, 2)


def spoil(batch: Batch, sample: int = 16) -> Batch:
    """One sample of the tests' data, if not told otherwise the first of the third batch of eight, is not finite."""
    x, y = batch[0].clone(), batch[1]
    x[(x.flatten(1) == data()[sample][0]).all(1)] = torch.nan
    return x, y


class Skipping(Naive):
    """A batch of the second epoch is not finite; BatchNorm's statistics are those of the step before."""

    depth = -1

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def given(self, batch: Batch, number: int) -> Batch:
        return spoil(batch) if number >= self.batches else batch

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.buffers = _copied(module.buffers())

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.buffers = _copied(module.buffers())

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
        _write(module.buffers(), self.buffers)
        return step - 1


class Rewinding(Skipping):
    """Everything is that of the last step whose number three divides."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.stepped(module, step=0, ends_epoch=False)

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        if step % 3 == 0:
            weights = _copied(module.parameters()), _copied(module.buffers())
            inner = dict(vars(self.inner)) if self.inner else {}
            for name in ("outer", "norms"):  # the history of AutoClip stays
                inner.pop(name, None)
            self.kept = step, weights, deepcopy((self.scale, self.optimizer.state_dict(), inner))

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> int:
        if all(buffer.isfinite().all() for buffer in module.buffers()):  # too large a scale
            self.stepped(module, step, ends_epoch=False)
            return step
        step, (parameters, buffers), others = self.kept
        _write(module.parameters(), parameters)
        _write(module.buffers(), buffers)
        self.scale, state, inner = deepcopy(others)
        optimizer.load_state_dict(state)
        if self.inner:
            vars(self.inner).update(inner)
        return step


def with_gradients(module: Any) -> dict[str, Any]:
    """The weights that have gradients, by name."""
    return {name: p for name, p in module.named_parameters() if p.grad is not None}


def _copied(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def _write(targets: Any, sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _one_cycle(t: int, total: int) -> float:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=total, cycle_momentum=False)
    for _ in range(t):
        optimizer.step()
        schedule.step()
    return optimizer.param_groups[0]["lr"]


def _cosine(p: float) -> float:
    return (1 + math.cos(math.pi * p)) / 2


CURVES: dict[str, Callable[[int, int], float]] = {
    "LRSchedule": lambda t, total: (t + 1) / 2 if t < 2 else _cosine((t - 2) / (total - 2)),
    "constant": lambda t, total: min(1.0, (t + 1) / 3),
    "cosine": lambda t, total: _cosine(t / total),
    "cosine_restarts": lambda t, total: _cosine(3 * t / total % 1),
    "flat_cos": lambda t, total: _cosine(max(0.0, 4 * t / total - 3)),
    "inverse_sqrt": lambda t, total: (t + 1) ** -0.5,
    "linear": lambda t, total: 1 - t / total,
    "one_cycle": _one_cycle,
    "polynomial": lambda t, total: (1 - t / total) ** 0.9,
    "step_decay": lambda t, total: 0.1 ** ((2 * t >= total) + (4 * t >= 3 * total)),
    "swa_tail": lambda t, total: _cosine(t / total) if 2 * t < total else 0.5,
    "wsd": lambda t, total: 1 - math.sqrt(max(0.0, 1 - (total - t) / (0.2 * total))),
}
