"""timm: image models in a module of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.clients import page
from tests.clients.base import FLOAT8
from tests.clients.oracles import Client


class Classifier(pl.LightningModule):
    """As timm's users write it."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        self.net = timm.create_model(name, num_classes=4, **settings)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)


class Images(Client):
    """Random images of four classes."""

    name_in_timm: str
    images = True
    folds = True
    double = {"precision": "64-true"}

    def module(self) -> Any:
        return Classifier(self.name_in_timm)

    def loaders(self) -> tuple[Any, Any]:
        numbers = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(20, 3, 64, 64, generator=numbers), torch.arange(20) % 4)
        return DataLoader(data, 4), DataLoader(data, 4)

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(module.net(x), y, reduction="none")


class TestResNet(Images):
    model = "ResNet"
    name_in_timm = "test_resnet"
    layer = logits = "net.fc"
    blocks = r"net\.layer\d$"
    refused = FLOAT8


class TestViT(Images):
    model = "ViT"
    name_in_timm = "test_vit"
    layer = logits = "net.head"
    refused = {
        "add_blur_pool": r"needs an nn\.Conv2d or nn\.MaxPool2d with a stride above 1, found none",
        "add_squeeze_excite": "needs residual blocks of a ResNet, found none",
    }
    exempt = "cls_token|pos_embed|reg_token"

    def module(self) -> Any:
        return Classifier(self.name_in_timm, img_size=64, drop_rate=0.1, dynamic_img_size=True)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = page.run("timm", train_loader=TestViT().loaders()[0])
    assert names["trainer"].global_step == 10
    names["Classifier"]().load_state_dict(names["weights"])
