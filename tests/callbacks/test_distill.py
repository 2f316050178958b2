"""Distill: the gradient is that of the formula, the teacher is what it says, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.functional import distillation_loss, ema_decay
from tests.conformance.runs import ShardedNet
from tests.nets import Net, NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, weights
from tests.ranks import run_ranks
from tests.reference.loop import Naive, naive_fit


class NaiveDistill(Naive):
    """The teacher is a dictionary of tensors that are averaged one by one, or another module, called by torch.func."""

    def __init__(self, decay: float = 0.9, weight: float = 1.0, other: nn.Module | None = None) -> None:
        self.decay, self.weight, self.other = decay, weight, other
        self.teacher: dict[str, Tensor] = {}
        self.updates, self.runs = 0, False
        self.distance: Any = None

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        module.layers.register_forward_pre_hook(self.copied)
        module.layers.register_forward_hook(self.compared)

    def copied(self, layers: nn.Module, given: Any) -> None:
        if not self.teacher:
            self.teacher = {name: value.clone() for name, value in floats(layers).items()}

    def compared(self, layers: nn.Module, given: Any, mine: Tensor) -> None:
        if self.runs or not torch.is_grad_enabled():
            return
        self.runs = True
        with torch.no_grad(), in_eval(layers):
            theirs = torch.func.functional_call(layers, self.teacher, given) if not self.other else self.other(*given)
        self.runs = False
        p = torch.softmax(theirs.float() / 2, 1)
        self.distance = 4 * (p * (p.log() - torch.log_softmax(mine.float() / 2, 1))).sum(1).mean()

    def losses(self, module: Any, batch: Any, number: int) -> Tensor:
        losses = super().losses(module, batch, number)
        return losses + self.weight * self.distance

    def stepped(self, module: Any, step: int, ends_epoch: bool) -> None:
        d = self.decay if self.decay == 1 else min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, value in floats(module.layers).items():
            self.teacher[name] = d * self.teacher[name] + (1 - d) * value
        self.updates += 1


def floats(layers: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in layers.state_dict().items() if value.is_floating_point()}


@contextmanager
def in_eval(module: nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.eval()
    yield
    for part, mode in modes.items():
        part.training = mode


def other() -> nn.Module:
    """A teacher of the tests' data that was not trained, with BatchNorm and dropout."""
    return build(Net).layers
