"""A naive stochastic weight average: every step's weights are kept in fp64, the mean is taken at the end."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class NaiveSWA(Callback):
    """Notes the weights after every optimizer step, and which steps ended an epoch; changes nothing."""

    def __init__(self, start: int = 0, every: int | None = None) -> None:
        self.start, self.every = start, every
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.epoch_ends: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step not in self.weights:
            named = pl_module.named_parameters()
            self.weights[trainer.global_step] = {name: p.detach().double().clone() for name, p in named}
        if trainer.is_last_batch:
            self.epoch_ends.append(trainer.global_step)

    def snapshots(self, last: int | None = None) -> list[int]:
        """The steps whose weights are in the average after step ``last``, by default that of the end."""
        steps = [step for step in self.weights if step >= max(self.start, 1) and (last is None or step <= last)]
        if self.every is None:
            regular = [step for step in steps if step in self.epoch_ends]
        else:
            regular = [step for step in steps if (step - self.start) % self.every == 0]
        first = [self.start] if self.start in steps else []
        end = steps[-1:] if last is None else []  # the last weights are always in
        return sorted({*first, *regular, *end})

    def mean(self, last: int | None = None) -> dict[str, Tensor]:
        chosen = [self.weights[step] for step in self.snapshots(last)]
        return {name: torch.stack([weights[name] for weights in chosen]).mean(0) for name in chosen[0]}

    def assert_equals(self, state_dict: dict[str, Tensor], last: int | None = None, tolerance: float = 1e-6) -> None:
        for name, average in self.mean(last).items():
            torch.testing.assert_close(state_dict[name].double(), average, atol=tolerance, rtol=tolerance)


def naive_statistics(layers: torch.nn.Sequential, at: int, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean over batches, in fp64, of the mean and the unbiased variance of what ``layers[at]`` is given."""
    with torch.no_grad():
        given = [layers[:at](x).double() for x in inputs]
    return torch.stack([x.mean(0) for x in given]).mean(0), torch.stack([x.var(0) for x in given]).mean(0)
