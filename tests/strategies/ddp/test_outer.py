"""DiLoCo: ``ddp_diloco_bf16`` in real processes beside a plain loop over the workers."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from lightning_tricks.strategies.ddp.outer import OuterOptimizer, fragments
from tests.nets import NormNet, PlainNet, SaveAt, assert_close, assert_equal, build, data, fit, weights
from tests.ranks import run_ranks
from tests.strategies.ddp.test_compression import written

STEPS = 11


class Deep(PlainNet):
    """Four blocks of equal size and a smaller head, AdamW and a schedule."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__(lr)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
        self.layers = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 2))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# Those of the blocks in turn; the head comes last, when both have two blocks.
FRAGMENTS = (("layers.0.0", "layers.0.2", "layers.1"), ("layers.0.1", "layers.0.3"))


class SharpDeep(lt.SAMMixin, Deep):
    sam = lt.SAM(rho=0.1)


def samples(rank: int, world: int, epochs: bool = False) -> Any:
    """A rank's batches of 8 samples: 12 in an epoch, or 3."""
    count = 3 if epochs else 12
    mine = [8 * world * step + 8 * rank + n for step in range(count) for n in range(8)]
    return DataLoader(Subset(data(8 * world * count), mine), batch_size=8)


def run(kind: type[PlainNet] = Deep, *, epochs: bool = False, **settings: Any) -> tuple[L.Trainer, Any]:
    """A fit of this rank; what DDPPreset takes goes there."""
    names = ("outer_lr", "outer_momentum", "fragments", "local_sgd_period", "compression_start", "precision")
    given = {name: settings.pop(name) for name in names if name in settings}
    strategy = lt.preset("ddp_diloco_bf16", **{"precision": "32-true", "local_sgd_period": 4, **given})
    world = int(os.environ["WORLD_SIZE"])
    train = samples(int(os.environ["RANK"]), world, epochs)
    defaults = {"devices": world, "use_distributed_sampler": False, "max_steps": STEPS, "max_epochs": -1}
    module = build(kind)
    return fit(module, train=train, **{**defaults, "limit_val_batches": 0, **strategy, **settings}), module


class Workers:
    """The plain loop: workers with optimizers of their own, and the outer step written out for each parameter."""

    def __init__(self, kind: type[PlainNet] = Deep, world: int = 2) -> None:
        self.step, self.modules = 0, [build(kind) for _ in range(world)]
        self.configured = [module.configure_optimizers() for module in self.modules]
        self.last = {name: p.detach().clone() for name, p in self.modules[0].named_parameters()}
        self.momentum = {name: torch.zeros_like(p) for name, p in self.last.items()}

    def train(
        self,
        until: int = STEPS,
        *,
        period: int = 4,
        parts: Iterable[tuple[int, tuple[str, ...]]] = ((0, ("",)),),  # steps of a period, and how names begin
        lr: float = 0.7,
        momentum: float = 0.9,
        mean_at: Collection[int] = (STEPS,),
        epochs: bool = False,
        clip: float = 1e9,
        accumulate: int = 1,
        rho: float = 0.0,
        precision: Any = nullcontext,
    ) -> dict[str, Tensor]:
        batches = [list(samples(rank, len(self.modules), epochs)) for rank in range(len(self.modules))]
        for self.step in range(self.step + 1, until + 1):
            for module, configured, own in zip(self.modules, self.configured, batches, strict=True):
                begin = accumulate * (self.step - 1)
                chosen = [own[number % len(own)] for number in range(begin, begin + accumulate)]
                self._inner(module, configured, chosen, clip, rho, precision)
            for at, names in parts:
                if self.step % period == at:
                    self._outer(names, lr, momentum)
            if self.step in mean_at:
                self._put(self._means())
        return weights(self.modules[0])

    def _inner(
        self, module: Any, configured: Any, chosen: list[list[Tensor]], clip: float, rho: float, precision: Any
    ) -> None:
        """A step of one worker."""
        optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
        optimizer.zero_grad()
        for x, y in chosen:
            moved = [torch.zeros_like(p) for p in module.parameters()]
            if rho:
                loss = F.cross_entropy(module(x), y) / len(chosen)
                gradients = torch.autograd.grad(loss, list(module.parameters()))
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                moved = [rho * gradient / norm for gradient in gradients]
            torch._foreach_add_([p.data for p in module.parameters()], moved)
            with precision():
                loss = F.cross_entropy(module(x), y) / len(chosen)
            loss.backward()
            torch._foreach_sub_([p.data for p in module.parameters()], moved)
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if isinstance(configured, dict):
            configured["lr_scheduler"]["scheduler"].step()

    def _means(self) -> dict[str, Tensor]:
        every = [dict(module.named_parameters()) for module in self.modules]
        return {name: sum(named[name].detach() / len(every) for named in every) for name in self.last}

    def _put(self, values: Mapping[str, Tensor]) -> None:
        for module in self.modules:
            for name, parameter in module.named_parameters():
                if name in values:
                    parameter.data.copy_(values[name])

    def _outer(self, names: tuple[str, ...], lr: float, momentum: float) -> None:
        for name, mean in self._means().items():
            if name.startswith(names):
                gradient = self.last[name] - mean
                self.momentum[name] = momentum * self.momentum[name] + gradient
                self.last[name] = self.last[name] - lr * (gradient + momentum * self.momentum[name])
                self._put({name: self.last[name]})


class Weights(Callback):
    """A weight of this rank after each step, and as its validation sees it."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.validated: list[Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append(next(pl_module.parameters()).detach().clone())

    def on_validation_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.validated.append(next(pl_module.parameters()).detach().clone())


def trained(*args: Any, **settings: Any) -> dict[str, Tensor]:
    return weights(run(*args, **settings)[1])


IN_TURN = tuple(zip((2, 0), FRAGMENTS, strict=True))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the Trainer is given, and what the loop
    "plain": ({}, {}),
    "momentum 0": ({"outer_momentum": 0.0}, {"momentum": 0.0}),
    "period 1": ({"local_sgd_period": 1}, {"period": 1}),
    "norms": ({"kind": NormNet}, {"kind": NormNet}),
    "fragments": ({"fragments": 2}, {"parts": IN_TURN}),
    "epochs": ({"epochs": True}, {"epochs": True, "mean_at": (3, 6, 9, 11)}),
    "fragments, epochs": (
        {"fragments": 2, "epochs": True},
        {"parts": IN_TURN, "epochs": True, "mean_at": (3, 6, 9, 11)},
    ),
    "clipped": (
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_steps": 6},
        {"clip": 0.1, "accumulate": 2, "until": 6, "mean_at": (6,)},
    ),
    "SAM": ({"kind": SharpDeep}, {"rho": 0.1}),
    "bf16": ({"precision": "bf16-mixed"}, {"precision": lambda: torch.autocast("cpu", torch.bfloat16)}),
}


def case(name: str) -> dict[str, Tensor]:
    return trained(**{key: value for key, value in CASES[name][0].items()})


def all_cases(names: list[str]) -> dict[str, dict[str, Tensor]]:
    return {name: case(name) for name in names}


def test_it_trains_as_the_plain_loop() -> None:
    ranks = run_ranks(all_cases, list(CASES))
    wrong = {}
    for name, (_, given) in CASES.items():
        settings = dict(given)
        expected = Workers(settings.pop("kind", Deep)).train(**settings)
        wrong[name] = max(float((ranks[0][name][key] - value).abs().max()) for key, value in expected.items())
    print(wrong)
    assert max(wrong.values()) < 1e-6
