"""Naive forms of the tricks for the plain loop: one tensor, one sample at a time, as their formulas are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import partial
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
    """In fp64; ``share(n)`` is that of the weights in the update after n others, None for no update."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.average: list[Tensor] = [p.detach().double().clone() for p in module.parameters()]
        self.updates = 0

    def update(self, module: Any, share: float) -> None:
        for average, p in zip(self.average, module.parameters(), strict=True):
            average += share * (p.detach().double() - average)
        self.updates += 1

    def end(self, module: Any) -> None:
        with torch.no_grad():
            for average, p in zip(self.average, module.parameters(), strict=True):
                p.copy_(average)


class EMA(Average):
    """Decay 0.9, with warm-up."""

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.update(module, 1 - min(0.9, (1 + self.updates) / (10 + self.updates)))


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
        optimizer.step = partial(self.step, list(module.parameters()))  # type: ignore[method-assign]

    @torch.no_grad()
    def step(self, weights: list[Any]) -> None:
        self.steps += 1
        for y, z, x in zip(weights, self.z, self.x, strict=True):
            z -= 0.05 * y.grad
            x += (z - x) / self.steps
            y.copy_(0.9 * x + 0.1 * z)

    def end(self, module: Any) -> None:
        for weight, x in zip(module.parameters(), self.x, strict=True):
            weight.data.copy_(x)
        with self.cast():
            mean, var = naive_statistics(module.layers, 1, [x for x, _ in self.batches])
        module.layers[1].running_mean, module.layers[1].running_var = mean.float(), var.float()


class SWA(Average):
    """From step 3 on: that step, and each epoch's last one. BatchNorm's statistics are those of the mean."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        if step >= 3 and (ends_epoch or not self.updates):
            self.update(module, 1 / (self.updates + 1))

    def end(self, module: Any) -> None:
        super().end(module)
        with self.cast():
            mean, var = naive_statistics(module.layers, 1, [x for x, _ in self.batches])
        module.layers[1].running_mean, module.layers[1].running_var = mean.float(), var.float()


class SAM(Naive):
    """Radius 0.1."""

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        loss = self.of(module, batch)
        gradients = torch.autograd.grad(loss * share, list(module.parameters()))
        old, buffers = _copied(module.parameters()), _copied(module.buffers())
        naive_perturb(dict(module.named_parameters()), [g / share for g in gradients], 0.1, None)
        (self.of(module, batch) * share).backward()
        _write(module.parameters(), old)
        _write(module.buffers(), buffers)  # as the first run left them


class Hardest(Naive):
    """The half with the largest losses, which a pass that leaves no traces finds."""

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        buffers = _copied(module.buffers())
        with torch.no_grad():
            losses = self.of(module, batch, "none").tolist()
        _write(module.buffers(), buffers)
        kept = sorted(sorted(range(len(losses)), key=losses.__getitem__)[-max(1, round(len(losses) / 2)) :])
        return self.of(module, (batch[0][kept], batch[1][kept]))


class HardestLosses(Naive):
    """The mean of the larger half of the losses."""

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        losses = self.of(module, batch, "none")
        return losses.sort(descending=True).values[: max(1, round(len(losses) / 2))].mean()


class Seen(Callback):
    """What a batch callback drew, and the batch that it made of it; such random numbers have no naive form."""

    def __init__(self, mixing: Any) -> None:
        self.mixing = mixing
        self.drawn: list[Any] = []
        self.inputs: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.drawn.append(getattr(self.mixing, "drawn", None))
        self.inputs.append(batch[0].clone())


class Mixed(Naive):
    """Each sample with its partner, one after the other."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        x, y = batch
        drawn = self.seen.drawn[number]
        lams, index = torch.as_tensor(drawn.lam).expand(len(y)), drawn.index
        assert sorted(index.tolist()) == list(range(len(y)))
        with self.cast():
            logits = self.logits(module, x, lams, index, number)
            each = [F.cross_entropy(logits, target, reduction="none") for target in (y, y[index])]
        return (lams * each[0] + (1 - lams) * each[1]).sum() / len(y)

    def logits(self, module: Any, x: Tensor, lams: Tensor, index: Tensor, number: int) -> Tensor:
        mixed = [lam * x[i] + (1 - lam) * x[j] for i, (lam, j) in enumerate(zip(lams, index, strict=True))]
        torch.testing.assert_close(torch.stack(mixed), self.seen.inputs[number], atol=1e-6, rtol=1e-6)
        return module(self.seen.inputs[number])


class Cut(Mixed):
    """A box of each image is its partner's, as large as the loss says."""

    def logits(self, module: Any, x: Tensor, lams: Tensor, index: Tensor, number: int) -> Tensor:
        own, given = x.unflatten(1, (2, 4)), self.seen.inputs[number]
        cut = (own != given).any(0)
        assert torch.equal(given, torch.where(cut, own[index], own))
        rows, columns = cut.any(1).sum(), cut.any(0).sum()
        assert cut.sum() == rows * columns  # a box
        assert lams.unique().item() == 1 - cut.sum() / 8
        return module(given)


class Transformed(Mixed):
    """A pixel of each image, as large as half of its shorter side, is zero."""

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        given, own = self.seen.inputs[number], batch[0].unflatten(1, (2, 4))
        for image, before in zip(given, own, strict=True):
            assert (image != before).sum() == 1 == (image == 0).sum()
        return Naive.loss(self, module, (given, batch[1]), number)


class GrowingSequences(Naive):
    """Half of a sequence at first, all of it from the fourth step on."""

    made = 0

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        return self.of(module, (self.begun(batch[0]), batch[1]))

    def begun(self, x: Tensor) -> Tensor:
        return x[:, : min(8, 4 + self.made)]

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.made += 1

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.made += 1


class GrowingImages(GrowingSequences):
    """Half of 2 x 4 pixels at first."""

    def begun(self, x: Tensor) -> Tensor:
        sides = [(1, 2), (1, 2), (2, 3), (2, 4)][min(3, self.made)]
        return resize(x.unflatten(1, (2, 4))[:, None], sides, antialias=True)[:, 0]


class Hidden(Mixed):
    """What the second layer is given is mixed."""

    def logits(self, module: Any, x: Tensor, lams: Tensor, index: Tensor, number: int) -> Tensor:
        hidden = module.layers[0](x)
        return module.layers[1:](torch.lerp(hidden[index], hidden, float(lams[0])))


class UnitClip(Naive):
    """A row's or a vector's gradient is at most 0.02 times its weights."""

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for p in module.parameters():
            for weight, gradient in zip(p.data, p.grad, strict=True) if p.ndim > 1 else [(p.data, p.grad)]:
                limit = 0.02 * max(weight.norm().item(), 1e-3)
                gradient *= min(1.0, limit / max(gradient.norm().item(), 1e-12))


class PercentileClip(Naive):
    """The gradient's norm is at most the tenth percentile of the norms so far."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.norms: list[float] = []

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.norms.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in module.parameters())))
        for p in module.parameters():
            p.grad *= min(1.0, np.percentile(self.norms, 10) / self.norms[-1])


class Unfrozen(Naive):
    """The first layer waits for step 3, and has half the learning rate."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        late = list(module.layers[0].parameters())
        (group,) = optimizer.param_groups
        group["params"] = [p for p in group["params"] if all(p is not other for other in late)]
        optimizer.add_param_group({"params": late, "lr": group["lr"] / 2})

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for p in module.layers[0].parameters() if step < 3 else []:
            p.grad = None


class Frozen(Naive):
    """The first layer stops at step 3; from then on its gradients neither count nor overflow."""

    step = 0

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        super().descend(module, batch, number, share)
        for p in module.layers[0].parameters() if self.step >= 3 else []:
            p.grad.zero_()

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.step = step

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.step += 1

    def clip(self, module: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for p in module.layers[0].parameters() if step >= 3 else []:
            p.grad = None


class Growing(Naive):
    """One batch makes a step in the first epoch, two in those after it."""

    def size(self, epoch: int, accumulate: int) -> int:
        return min(epoch + 1, 2)


def spoil(batch: Batch, sample: int = 16) -> Batch:
    """One sample of the tests' data, if not told otherwise the first of the third batch of eight, is not finite."""
    x, y = batch
    bad = (x == data()[sample][0]).all(1, keepdim=True)
    return x.masked_fill(bad, torch.nan), y


class Spoiled(Naive):
    """A batch of the second epoch is not finite."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def loss(self, module: Any, batch: Batch, number: int) -> Tensor:
        return self.of(module, spoil(batch) if number >= self.batches else batch)


class Skipping(Spoiled):
    """BatchNorm's statistics are those of the step before."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.buffers = _copied(module.buffers())

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.buffers = _copied(module.buffers())

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        _write(module.buffers(), self.buffers)


class Rewinding(Spoiled):
    """Everything is that of the last step whose number three divides."""

    made = 0

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.keep(module)

    def keep(self, module: Any) -> None:
        self.kept = deepcopy((self.made, self.scale, module.state_dict(), self.optimizer.state_dict()))

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        self.made += 1
        if self.made % 3 == 0:
            self.keep(module)

    def left_out(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if all(buffer.isfinite().all() for buffer in module.buffers()):  # too large a scale
            self.stepped(module, step=0, ends_epoch=False)
            return
        self.made, self.scale, weights, state = deepcopy(self.kept)
        module.load_state_dict(weights)
        optimizer.load_state_dict(state)


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


class Adapted(nn.Module):
    """A linear layer with frozen weights and a low-rank product beside it, under the names that peft gives them."""

    def __init__(self, layer: nn.Linear, r: int) -> None:
        super().__init__()
        self.base_layer = nn.Module()
        self.base_layer.register_buffer("weight", layer.weight.detach())
        self.base_layer.register_buffer("bias", layer.bias.detach())
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, layer.out_features, bias=False)})
        nn.init.kaiming_uniform_(self.lora_A["default"].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        low = self.lora_B["default"](self.lora_A["default"](x))
        return F.linear(x, self.base_layer.weight, self.base_layer.bias) + 2 * low


class LowRank(Naive):
    """The first layer has an adapter of rank 2 and scale 2; all others train."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(7)  # as a fit does
        module.layers[0] = Adapted(module.layers[0], 2).to(module.layers[0].weight.dtype)
        optimizer.param_groups[0]["params"] = list(module.parameters())
