"""torchgeo: its tasks, which are modules, with dictionaries as batches and augmentations on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchgeo.trainers import ClassificationTask, SemanticSegmentationTask

from tests.clients import page
from tests.clients.base import FLOAT8, NO_LINEAR
from tests.clients.oracles import Client


class Scenes(Client):
    images = True
    folds = True
    double = {"precision": "64-true"}
    inputs = "image"
    schedule = "ReduceLROnPlateau"

    def label(self, number: int, numbers: torch.Generator) -> dict[str, Tensor]:
        raise NotImplementedError

    def loaders(self) -> tuple[Any, Any]:
        numbers = torch.Generator().manual_seed(0)
        data = [
            {"image": torch.randn(4, 32, 32, generator=numbers), **self.label(number, numbers)} for number in range(12)
        ]
        return DataLoader(data, 4), DataLoader(data, 4)


class TestClassification(Scenes):
    model = "ClassificationTask"
    target = "label"
    layer = logits = "model.fc"
    refused = {**FLOAT8, "LeanLoss": "they are needed for squeeze"}
    blocks = r"model\.layer\d$"

    def module(self) -> Any:
        return ClassificationTask("test_resnet", in_channels=4, num_classes=3)

    def label(self, number: int, numbers: torch.Generator) -> dict[str, Tensor]:
        return {"label": torch.tensor(number % 3)}

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch["image"]), batch["label"], reduction="none")


class TestMultiLabel(TestClassification):
    model = "ClassificationTask, multi-label"

    def module(self) -> Any:
        return ClassificationTask("test_resnet", in_channels=4, task="multilabel", num_labels=3, loss="bce")

    def label(self, number: int, numbers: torch.Generator) -> dict[str, Tensor]:
        return {"label": torch.randint(0, 2, (3,), generator=numbers)}

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        y = batch["label"].float()
        return F.binary_cross_entropy_with_logits(module(batch["image"]), y, reduction="none").mean(1)


class TestSegmentation(Scenes):
    model = "SemanticSegmentationTask"
    target = "mask"
    count = staticmethod(lambda batch: batch["mask"].numel())
    blocks = adapted = "Conv2d"
    refused = {
        **NO_LINEAR,
        "CutOut": r"cannot know whether batch\['mask'\], a mask, must follow",
        "add_blur_pool": "with a stride above 1, found none",
        "add_squeeze_excite": "needs residual blocks of a ResNet, found none",
    }

    def module(self) -> Any:
        return SemanticSegmentationTask("fcn", in_channels=4, num_classes=3, num_filters=8)

    def label(self, number: int, numbers: torch.Generator) -> dict[str, Tensor]:
        return {"mask": torch.randint(0, 3, (32, 32), generator=numbers)}

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch["image"]), batch["mask"], reduction="none").mean((1, 2))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_loader, val_loader = TestSegmentation().loaders()
    names = page.run("torchgeo", train_loader=train_loader, val_loader=val_loader)
    assert names["trainer"].global_step == 6
