"""A ViT-small for pictures of 32 x 32 (patches of 4 x 4, 21.4 million weights), from scratch on 50,000 glyphs.

``python benchmarks/run.py --device cuda vit_small``: AdamW with a cosine, 720 steps of 256 pictures, three seeds, ten
contenders, and a choice of learning rates in a quarter of the length: some 30,000 steps, estimated at 19 minutes of an
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

NAME = "vit_small"
PEERS = ("timm", "matplotlib")


def network(pixels: int, width: int, depth: int) -> nn.Module:
    """That of timm, with small patches."""
    import timm

    shape = {"img_size": pixels, "patch_size": 4, "embed_dim": width, "depth": depth, "num_heads": width // 64 or 1}
    return timm.create_model("vit_small_patch16_224", num_classes=len(CHARACTERS), **shape)


def run(settings: Settings) -> list[Row]:
    """Accuracy, gain, time, memory."""
    width, depth = settings.pick("shape", (384, 12), (64, 2), (32, 2))
    size = settings.pick("size", Size(32, 50_000, 5_000, 256), Size(16, 128, 32, 8), Size(16, 64, 16, 4))
    made = partial(network, size[0], width, depth)
    return trained(NAME, Plain(made, "adamw", 0.05, 1e-3), Size(*size), settings)


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """None: what comes out is not known."""
    return []
