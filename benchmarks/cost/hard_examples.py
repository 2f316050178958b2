"""The hard-example filter in a step of a ResNet-18: beside plain training and the same by hand.

By hand, OHEM is ``reduction="none"`` and the mean of the largest losses, selective backpropagation a forward pass
without gradients and a step on its hardest half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fitted import PLAIN, Batch, Callbacks, Net, architecture, drawn, empty, fit
from rows import Row, figure, rows_of, target
from settings import SEED, Settings
from timing import fits, in_turns
from torch import Tensor, nn

import lightning_tricks as lt

NAME = "hard_examples"
PEERS = ("timm",)
KEEP = 0.5
SCALED = "HardExampleFilter(0.5, score_scale=0.5)"


class OHEMNet(Net):
    """The largest losses of the forward pass."""

    def training_step(self, batch: Batch) -> Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.topk(int(KEEP * len(losses))).values.mean()


class SelectiveNet(Net):
    """The hardest half of the batch alone."""

    def training_step(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        kept = losses.topk(int(KEEP * len(losses))).indices
        return F.cross_entropy(self.net(batch[0][kept]), batch[1][kept])


FILTERS: dict[str, tuple[type[Net], Callbacks]] = {
    PLAIN: (Net, empty),
    SCALED: (Net, lambda: [lt.HardExampleFilter(KEEP, score_scale=0.5)]),
    "HardExampleFilter(0.5)": (Net, lambda: [lt.HardExampleFilter(KEEP)]),
    "selective backpropagation by hand": (SelectiveNet, empty),
    'HardExampleFilter(0.5, mode="loss")': (Net, lambda: [lt.HardExampleFilter(KEEP, mode="loss")]),
    "OHEM by hand": (OHEMNet, empty),
}


def tiny() -> nn.Module:
    """Of images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def run(settings: Settings) -> list[Row]:
    """Step times over plain ones; every step is a lap, so that the fits are short and change often."""
    name = settings.pick("network", "resnet18", "resnet18", "tiny")
    shape: tuple[int, ...] = settings.pick("batch", (32, 3, 64, 64), (8, 3, 64, 64), (4, 3, 8, 8))
    steps = settings.pick("steps", 7, 4, 4)
    batch = drawn(shape, 4, settings.device)
    network: Callable[[], nn.Module] = tiny if name == "tiny" else partial(architecture, name, num_classes=10)

    def step(kind: type[Net], callbacks: Callbacks) -> float:
        torch.manual_seed(SEED)
        return fit(kind(network()), batch, steps, callbacks(), every=1)

    contenders = {what: partial(step, *each) for what, each in FILTERS.items()}
    measured = in_turns(fits(contenders), settings.pick("fits", 5, 1, 1), warm_up=0)
    return rows_of(f"step, {name}", measured, PLAIN, "ms")


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What scoring small images saves."""
    over = figure(rows, rows[0].case, SCALED, "over_floor")
    return [target("score_scale=0.5: step over a plain one", over, "<=", 0.8)]
