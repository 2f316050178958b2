"""chemprop: its message passing networks; the loss is a metric of torchmetrics that the project wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chemprop import data, models, nn

from tests.clients import page
from tests.clients.oracles import Client

SMILES = ["C", "CC", "CCO", "c1ccccc1", "CC(=O)O", "CCN", "C1CCCCC1", "CO", "CCCC", "CC(C)O", "c1ccncc1", "CCCl"]


class Molecules(Client):
    """Twelve molecules in a NamedTuple whose first entry is an object of the project."""

    schedule = "LambdaLR"
    inputs = "2"
    target = "3"
    blocks = "message_passing"
    layer = "predictor.ffn"
    refused = {
        "HardExampleFilter": "cannot know how samples are stored in batch.'bmg'.",
        "FitsMemory": "cannot know how samples are stored in batch.'bmg'.",
        'HardExampleFilter(mode="loss")': r"sum\(\) of the target",
    }
    y = np.random.default_rng(0).normal(size=(12, 1))

    def loaders(self) -> tuple[Any, Any]:
        extra = np.random.default_rng(1).normal(size=(12, 3))
        points = [
            data.MoleculeDatapoint.from_smi(smiles, y, x_d=x)
            for smiles, y, x in zip(SMILES, self.y, extra, strict=True)
        ]
        return [data.build_dataloader(data.MoleculeDataset(points), batch_size=4, shuffle=False) for _ in range(2)]

    def predictor(self, width: int) -> Any:
        raise NotImplementedError

    def module(self) -> Any:
        encoder = nn.BondMessagePassing(d_h=16, depth=2)
        return models.MPNN(encoder, nn.MeanAggregation(), self.predictor(16 + 3), batch_norm=True, warmup_epochs=1)


class TestRegression(Molecules):
    model = "MPNN, regression"

    def predictor(self, width: int) -> Any:
        return nn.RegressionFFN(input_dim=width, hidden_dim=16)


class TestRootMeanSquare(TestRegression):
    """A loss that is not linear in the sum over the samples."""

    model = "MPNN, RMSE"

    def predictor(self, width: int) -> Any:
        return nn.RegressionFFN(input_dim=width, hidden_dim=16, criterion=nn.metrics.RMSE())


class TestMissing(TestRegression):
    """Two tasks, of which some molecules have no value: the project leaves what is NaN out of its mean."""

    model = "MPNN, missing values"
    y = np.where(np.random.default_rng(2).random((12, 2)) < 0.3, np.nan, np.random.default_rng(3).normal(size=(12, 2)))

    def predictor(self, width: int) -> Any:
        return nn.RegressionFFN(input_dim=width, hidden_dim=16, n_tasks=2)


class TestClassification(Molecules):
    model = "MPNN, classification"
    y = np.arange(12).reshape(12, 1) % 2

    def predictor(self, width: int) -> Any:
        return nn.BinaryClassificationFFN(input_dim=width, hidden_dim=16)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    points = [data.MoleculeDatapoint.from_smi(smiles, y) for smiles, y in zip(SMILES, Molecules.y, strict=True)]
    train_loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=4)
    names = page.run("chemprop", train_loader=train_loader)
    assert names["trainer"].global_step == 6
    before = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), nn.RegressionFFN())
    before.load_state_dict(names["weights"])
