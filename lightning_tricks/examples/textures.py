"""Classifying patches of three grey photographs from scikit-image, 512x512: brick, grass and gravel."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from lightning_tricks.core.install import required
from lightning_tricks.examples.tasks import Split, TaskData, mislabel

PATCH = 32
COLUMNS = {"train": slice(0, 4), "val": slice(4, 8), "test": slice(8, 16)}  # Columns of patches, 16 in a photograph.


def network() -> nn.Sequential:
    """Three convolutions with BatchNorm and average pooling, from a patch to 3 logits."""
    return nn.Sequential(
        *(*_convolution(1, 8), nn.MaxPool2d(2)),
        *(*_convolution(8, 16), nn.MaxPool2d(2)),
        *(*_convolution(16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)),
    )


def _convolution(channels: int, out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()


class TexturesData(TaskData):
    """The patches as a data module."""

    @override
    def load(self) -> Split:
        return load_textures(self.noise)


def load_textures(noise: float) -> Split:
    """Split disjoint 32x32 patches into train, val and test; a fraction ``noise`` of the training labels is wrong.

    The left quarter of every photograph is for training, the second quarter for validation and the right half for the
    test, so that no test patch touches a training patch. Patches are standardized with the training patches' mean and
    standard deviation.
    """
    with required("the textures need scikit-image", "vision"):
        from skimage import data
    photographs = torch.stack([torch.tensor(image()) for image in (data.brick, data.grass, data.gravel)]).float()
    # The dimensions are class, row, column, height and width.
    patches = photographs.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    train = patches[:, :, COLUMNS["train"]]
    patches = (patches - train.mean()) / train.std()
    parts = {part: patches[:, :, columns].flatten(1, 2) for part, columns in COLUMNS.items()}
    split = {
        part: (images.reshape(-1, 1, PATCH, PATCH), torch.arange(3).repeat_interleave(images.shape[1]))
        for part, images in parts.items()
    }
    images, labels = split["train"]
    generator = torch.Generator().manual_seed(0)
    return {**split, "train": (images, mislabel(labels, noise, classes=3, generator=generator))}
