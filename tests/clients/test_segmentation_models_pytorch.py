"""segmentation-models-pytorch: its networks and losses, in the module that its examples show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from segmentation_models_pytorch.losses._functional import focal_loss_with_logits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients import page
from tests.clients.base import NO_LINEAR
from tests.clients.oracles import Client


class Segmenter(pl.LightningModule):
    def __init__(self, network: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        image, mask = batch
        loss = self.loss(self.network(image), mask)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        image, mask = batch
        self.log("val_loss", self.loss(self.network(image), mask))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Masks(Client):
    images = True
    folds = True
    adapted = "Conv2d"
    refused = {**NO_LINEAR, "CutOut": r"cannot know whether batch\[1\], a mask, must follow"}
    double = {"precision": "64-true"}
    blocks = r"decoder\.blocks"

    def network(self) -> nn.Module:
        return smp.Unet("tu-test_resnet", encoder_weights=None, encoder_depth=3, decoder_channels=(8, 8, 8), classes=3)

    def loss(self) -> nn.Module:
        raise NotImplementedError

    def module(self) -> Any:
        return Segmenter(self.network(), self.loss())

    def loaders(self) -> tuple[Any, Any]:
        numbers = torch.Generator().manual_seed(0)
        masks = torch.randint(0, 3, (12, 32, 32), generator=numbers)
        data = TensorDataset(torch.randn(12, 3, 32, 32, generator=numbers), masks)
        return DataLoader(data, 4), DataLoader(data, 4)


class TestCrossEntropy(Masks):
    model = "Unet, cross-entropy"

    def loss(self) -> nn.Module:
        return nn.CrossEntropyLoss()

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        image, mask = batch
        return F.cross_entropy(module.network(image), mask, reduction="none").mean((1, 2))


class TestDice(Masks):
    """A loss of all pixels of the batch together."""

    model = "Unet, Dice"
    refused = {
        **Masks.refused,
        "HardExampleFilter": "computed no loss of torch.nn.functional from the target",
        'HardExampleFilter(mode="loss")': "a part of the loss is ambiguous",
        "FitsMemory": "a part of the loss is ambiguous",
    }

    def loss(self) -> nn.Module:
        return smp.losses.DiceLoss("multiclass")


class TestFocal(Masks):
    model = "Unet, focal"
    count = staticmethod(lambda batch: batch[1].numel())

    def loss(self) -> nn.Module:
        return smp.losses.FocalLoss("multiclass")

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        """The losses of torch in it, by which samples are compared."""
        return self.by_class(module, batch, lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"))

    def hard_loss(self, module: Any, batch: Any, plain: Any) -> Tensor:
        """The mean of one loss for each class, of which each has its own hardest samples."""
        focal = self.by_class(module, batch, lambda x, y: focal_loss_with_logits(x, y, alpha=None, reduction="none"), 0)
        return focal.topk(2, dim=1).values.mean()  # of samples and of classes

    def by_class(self, module: Any, batch: Any, loss: Any, *classes: int) -> Tensor:
        image, mask = batch
        x = module.network(image)
        losses = torch.stack([loss(x[:, c], (mask == c).to(x)).mean((1, 2)) for c in range(3)])
        return losses if classes else losses.sum(0)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_loader, _ = TestDice().loaders()
    assert page.run("segmentation-models-pytorch", train_loader=train_loader)["trainer"].global_step == 6
