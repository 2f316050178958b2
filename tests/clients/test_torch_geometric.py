"""PyG: graph networks in a module of one's own, in batches that are one large graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, global_mean_pool

from tests.clients import page
from tests.clients.base import FLOAT8
from tests.clients.oracles import Client


class GraphNet(pl.LightningModule):
    """As PyG's users write it: convolutions, a mean over the nodes of each graph, a head."""

    def __init__(self, convolutions: list[nn.Module], classes: int) -> None:
        super().__init__()
        self.convolutions, self.head = nn.ModuleList(convolutions), nn.Linear(16, classes)

    def forward(self, data: Any) -> Tensor:
        x = data.x
        for convolution in self.convolutions:
            x = convolution(x, data.edge_index).relu()
        return self.head(F.dropout(global_mean_pool(x, data.batch), 0.2, self.training))

    def losses(self, data: Any, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(self(data), data.y, reduction=reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.losses(batch), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Regressor(GraphNet):
    def losses(self, data: Any, reduction: str = "mean") -> Tensor:
        return F.mse_loss(self(data)[:, 0], data.y.float(), reduction=reduction)


def graphs() -> list[Data]:
    """Rings of different sizes."""
    numbers = torch.Generator().manual_seed(0)
    made = []
    for number in range(20):
        n = 3 + number % 4
        ring = torch.arange(n)
        edges = torch.stack([torch.cat([ring, ring.roll(1)]), torch.cat([ring.roll(1), ring])])
        made.append(Data(x=torch.randn(n, 5, generator=numbers), edge_index=edges, y=torch.tensor([number % 3])))
    return made


class Graphs(Client):
    inputs = "x"
    target = "y"
    layer = logits = "head"
    folds = True
    blocks = "convolutions"
    refused = {
        "Mixup": "needs an input and a target for each sample",
        "HardExampleFilter": 'use mode="loss"',
        "FitsMemory": "got a batch with an object: DataBatch",
    }

    def loaders(self) -> tuple[Any, Any]:
        return DataLoader(graphs(), batch_size=4), DataLoader(graphs(), batch_size=4)

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        return module.losses(batch, "none")

    def with_partners(self, batch: Any, index: Tensor) -> Any:
        other = batch.clone()
        other.y = batch.y[index]
        return other


class TestGCN(Graphs):
    model = "GCN, classification"
    refused = {**Graphs.refused, **FLOAT8, 'optimizer("muon")': "is for hidden weights of two or more dimensions"}

    def module(self) -> Any:
        return GraphNet([GCNConv(5, 16), GCNConv(16, 16)], 3)


class TestGIN(Graphs):
    model = "GIN, regression"
    refused = {**Graphs.refused, "LeanLoss": "they are needed for __getitem__"}

    def module(self) -> Any:
        def layers(width: int) -> nn.Module:
            return GINConv(nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)))

        return Regressor([layers(5), layers(16)], 1)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert page.run("PyG", train_loader=TestGCN().loaders()[0])["trainer"].global_step == 10
