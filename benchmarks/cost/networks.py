"""Changes of a network, and looks at it: a step when half of the layers have stopped, blurred strides, inspection.

All callbacks look as they do in the middle of a long training: the first laps, in which layers stop and the picture is
taken, are not counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fitted import PLAIN, AdamNet, Callbacks, architecture, drawn, empty, fit, tiny_fits
from lightning.pytorch.callbacks import Callback
from rows import Row, figure, rows_of, target
from settings import SEED, Settings
from timing import fits, in_turns, works
from torch import nn

import lightning_tricks as lt

NAME = "networks"
PEERS = ("timm",)
HALF, LOOKS, IDLE, BLUR = "LayerFreezing: half stopped", "InspectTraining: looks", "InspectTraining: idle", "blurred"


def freezing(pattern: str) -> list[Callback]:
    """Half of the layers below the head have stopped from the first step on."""
    return [lt.LayerFreezing(0.5, start=0, stop=0, parameters=pattern)]


def inspecting(steps: int) -> list[Callback]:
    """Looks at the first steps of a million."""
    return [lt.InspectTraining(tempfile.mkdtemp(), every_n_steps=10**6, steps=steps)]


def callbacks(pattern: str) -> dict[str, Callbacks]:
    """The contenders of a network whose layers the pattern numbers."""
    return {PLAIN: empty, HALF: partial(freezing, pattern), LOOKS: partial(inspecting, 10**6)}


def strided() -> nn.Module:
    """Small, with a stride."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def run(settings: Settings) -> list[Row]:
    """Step times over plain ones, and a forward pass with blurred strides over one without."""
    name = settings.pick("network", "vit_tiny_patch16_224", "vit_tiny_patch16_224", "tiny")
    size = settings.pick("batch", 4, 2, 2)
    steps, rounds = settings.pick("steps", 6, 5, 5), settings.pick("fits", 9, 1, 1)
    if name == "tiny":
        network: Callable[[], nn.Module] = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))  # noqa: E731
        pattern, shape = r"^net\.(\d+)", (size, 8)
    else:
        network, pattern, shape = partial(architecture, name), r"blocks\.(\d+)", (size, 3, 224, 224)
    batch = drawn(shape, 4, settings.device)

    def step(made: Callbacks) -> float:
        torch.manual_seed(SEED)
        return fit(AdamNet(network()), batch, steps, made(), every=1)

    measured = in_turns(fits({what: partial(step, made) for what, made in callbacks(pattern).items()}), rounds, 0)
    found = rows_of(f"step, {name}", measured, PLAIN, "ms")
    return [*found, *idle(settings), *blurred(settings)]


def idle(settings: Settings) -> list[Row]:
    """What a callback that does not look adds to a step of a tiny network."""
    contenders: dict[str, Callbacks] = {PLAIN: empty, IDLE: partial(inspecting, 1)}
    timed = tiny_fits(contenders, settings.pick("idle_steps", 400, 120, 60), settings.device)
    measured = in_turns(fits(timed), settings.pick("idle_fits", 7, 3, 1), 0)
    return rows_of("step, tiny", measured, PLAIN)


def blurred(settings: Settings) -> list[Row]:
    """A forward pass of a ResNet with and without blurred strides."""
    name = settings.pick("blurred", "resnet50", "resnet18", "small")
    images = drawn(settings.pick("images", (4, 3, 160, 160), (2, 3, 96, 96), (2, 3, 16, 16)), 4, settings.device)[0]

    def forward(blurs: bool) -> Callable[[], object]:
        model = (strided() if name == "small" else architecture(name)).to(settings.device).eval()
        if blurs:
            lt.add_blur_pool(model)
        return lambda: torch.no_grad()(model)(images)

    contenders = {PLAIN: partial(forward, False), BLUR: partial(forward, True)}
    measured = in_turns(works(contenders, settings.device), settings.pick("rounds", 20, 3, 2))
    return rows_of(f"forward, {name}", measured, PLAIN, "ms")


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Half a backward pass saved is a third of a step; an idle callback costs nothing."""
    case, forward = rows[0].case, rows[-1].case
    over_idle = figure(rows, "step, tiny", IDLE, "over_floor")
    return [
        target("half of the layers stopped: step over a plain one", figure(rows, case, HALF, "over_floor"), "<=", 0.75),
        target("InspectTraining, idle: tiny step over a plain one", over_idle, "<=", 1.05),
        target("blurred strides: forward pass over a plain one", figure(rows, forward, BLUR, "over_floor"), "<=", 1.3),
    ]
