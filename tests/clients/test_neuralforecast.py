"""neuralforecast: its models are modules of ``pytorch_lightning`` that are given the Trainer's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import pytorch_lightning
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NHITS

from tests.clients import page
from tests.clients.base import FLOAT8, QUIET
from tests.clients.oracles import Client

BATCHES = 3  # of an epoch


def frame() -> pd.DataFrame:
    numbers = np.random.default_rng(0)
    rows = [
        {"unique_id": name, "ds": t, "y": float(np.sin(t / 3 + phase) + 0.1 * numbers.normal())}
        for phase, name in enumerate("abc")
        for t in range(40)
    ]
    return pd.DataFrame(rows)


class Forecaster(Client):
    """A batch is a table of whole series, in which the model cuts windows itself."""

    pl = pytorch_lightning
    inputs = "temporal"
    monitor = "ptl/val_loss"
    schedule = "StepLR"
    refused = {
        **FLOAT8,
        "Mixup": "finds no such tensor in the batch",
        "HardExampleFilter": "finds no such tensor in the batch",
        'HardExampleFilter(mode="loss")': "finds no such tensor in the batch",
    }
    none = {
        "FitsMemory": "a batch is one table of series, of which no part is smaller",
        "find_lr": "fit() makes the Trainer",
        "resume": "fit() has no resume",
    }

    def train(self, module: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        settings = {**QUIET, **settings}
        steps = BATCHES * settings.pop("max_epochs")
        module.trainer_kwargs.update({"max_steps": steps, "callbacks": list(callbacks), **settings})
        module.max_steps = module.trainer_kwargs["max_steps"]
        for each in callbacks:
            each.__dict__["__deepcopy__"] = lambda memo, each=each: each  # it trains a copy of the model
        NeuralForecast(models=[module], freq=1).fit(frame(), val_size=6)
        return callbacks[-1].trainer

    settings = {"h": 3, "input_size": 8, "batch_size": 1, "windows_batch_size": 8, "val_check_steps": BATCHES}


class TestNHITS(Forecaster):
    model = "NHITS"
    blocks = "NHITSBlock"

    def module(self) -> Any:
        return NHITS(**self.settings, mlp_units=3 * [[8, 8]])


class TestLSTM(Forecaster):
    model = "LSTM"
    blocks = "hist_encoder"

    def module(self) -> Any:
        return LSTM(**self.settings, encoder_hidden_size=8, decoder_hidden_size=8)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(page.run("neuralforecast", frame=frame())["forecasts"].predict()) == 9
