"""pytorch-forecasting: its own modules, datasets and metrics as losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pytorch_forecasting import DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import TorchNormalizer
from pytorch_forecasting.metrics import QuantileLoss
from torch import Tensor

from tests.clients import page
from tests.clients.base import FLOAT8
from tests.clients.oracles import Client


def frame() -> pd.DataFrame:
    """Three noisy waves."""
    numbers = np.random.default_rng(0)
    rows = [
        {"time": t, "series": name, "value": float(np.sin(t / 3 + phase) + 0.1 * numbers.normal())}
        for phase, name in enumerate("abc")
        for t in range(24)
    ]
    return pd.DataFrame(rows)


def waves(**settings: Any) -> TimeSeriesDataSet:
    return TimeSeriesDataSet(
        frame(),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
        target_normalizer=TorchNormalizer(),
        **settings,
    )


class Forecaster(Client):
    """A model made of the dataset. The loss is a metric of the project."""

    kind: Any
    refused = {
        "HardExampleFilter": "computed no loss of torch.nn.functional from the target",
        'HardExampleFilter(mode="loss")': "a part of the loss is ambiguous",
        "FitsMemory": "needs targets with one entry per sample",
        "StepInBackward": "on_after_backward would find no gradient",
    }
    columns: dict[str, Any] = {}
    schedule = "ReduceLROnPlateau"
    inputs = "0.encoder_cont"
    target = "1.0"
    blocks = r"lstm|net_blocks|rnn"

    def module(self) -> Any:
        return self.kind.from_dataset(waves(**self.columns), learning_rate=1e-2, **self.settings())

    def settings(self) -> dict[str, Any]:
        raise NotImplementedError

    def loaders(self) -> tuple[Any, Any]:
        data = waves(**self.columns)
        return [
            data.to_dataloader(train=train, batch_size=12, shuffle=False, drop_last=True) for train in (True, False)
        ]


class TestTFT(Forecaster):
    model = "TemporalFusionTransformer"
    refused = {**Forecaster.refused, **FLOAT8}
    adapted = "fc1"
    kind = TemporalFusionTransformer

    def settings(self) -> dict[str, Any]:
        return {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "loss": QuantileLoss()}

    columns = {"time_varying_known_reals": ["time"], "add_relative_time_idx": True}

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        x, y = batch
        found = module.loss.loss(module(x)["prediction"], y[0])
        return found.flatten(1).mean(1)


class TestNBeats(Forecaster):
    """Its loss, MASE, divides by the changes of the history, which is a part of the batch by itself."""

    model = "NBeats"
    kind = NBeats
    refused = {**Forecaster.refused, "Mixup": r"a loss is computed from batch\[0\]\['encoder_target'\]"}
    adapted = r"\.fc\."  # the other layers have two names

    def settings(self) -> dict[str, Any]:
        return {"widths": [8, 16], "num_blocks": [1, 1], "backcast_loss_ratio": 0.0}


class TestDeepAR(Forecaster):
    model = "DeepAR"
    refused = {**Forecaster.refused, **FLOAT8}
    kind = DeepAR

    def settings(self) -> dict[str, Any]:
        return {"hidden_size": 8, "rnn_layers": 2, "dropout": 0.1}


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_loader, _ = TestTFT().loaders()
    names = page.run("pytorch-forecasting", dataset=waves(**TestTFT.columns), train_loader=train_loader)
    assert names["trainer"].global_step == 2 * len(train_loader)
