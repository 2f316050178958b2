"""A ResNet-18 for pictures of 32 x 32 (a stem of 3 x 3 without pooling, 11.2 million weights), on 50,000 glyphs.

``python benchmarks/run.py --device cuda resnet18``: SGD with a cosine, 720 steps of 256 pictures, three seeds, ten
contenders, and a choice of learning rates in a quarter of the length: some 30,000 steps, estimated at 11 minutes of an
H100. Interrupted, it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from glyphs import CHARACTERS
from image_training import Plain, Size
from image_training import run as trained
from rows import Row
from settings import Settings
from torch import nn

NAME = "resnet18"
PEERS = ("timm", "matplotlib")


def network(width: float) -> nn.Module:
    """That of timm, with the stem for small pictures."""
    from timm.models.resnet import BasicBlock, ResNet

    channels = tuple(round(width * each) for each in (64, 128, 256, 512))
    net = ResNet(BasicBlock, (2, 2, 2, 2), num_classes=len(CHARACTERS), channels=channels)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def run(settings: Settings) -> list[Row]:
    """Accuracy, gain, time, memory."""
    width = settings.pick("width", 1.0, 1 / 8, 1 / 16)
    size = settings.pick("size", Size(32, 50_000, 5_000, 256), Size(16, 128, 32, 8), Size(16, 64, 16, 4))
    return trained(NAME, Plain(partial(network, width), "sgd", 5e-4, 0.1), Size(*size), settings)


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """None: what comes out is not known."""
    return []
