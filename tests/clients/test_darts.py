"""darts: its models make their module and Trainer of ``pytorch_lightning`` themselves, in ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning
import torch.nn.functional as F
from darts import TimeSeries
from darts.models import BlockRNNModel, NBEATSModel
from darts.utils.likelihood_models.torch import GaussianLikelihood
from torch import Tensor

from tests.clients import page
from tests.clients.base import FLOAT8, QUIET, Kind
from tests.clients.oracles import Client


def wave() -> TimeSeries:
    numbers = np.random.default_rng(0)
    return TimeSeries.from_values((np.sin(np.arange(40) / 3) + 0.1 * numbers.normal(size=40)).astype(np.float32))


class Forecaster(Client):
    pl = pytorch_lightning
    refused = {**FLOAT8, "BatchTransform": "or transform samples in the data set"}
    inputs = "past_target"
    target = "future_target"
    count = staticmethod(lambda batch: batch.future_target.numel())
    none = {
        "find_lr": "fit() makes the Trainer and the module",
        "resume": "fit() goes on without a checkpoint of Lightning",
    }
    preset = {"precision": "bf16-mixed"}  # darts passes that of the series

    settings = {"input_chunk_length": 8, "output_chunk_length": 3, "batch_size": 6, "random_state": 0}

    def train(self, module: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        settings = {**QUIET, **settings}
        module.trainer_params |= {**settings, "callbacks": list(callbacks)}  # what pl_trainer_kwargs become
        module.fit(wave(), val_series=wave()[-20:], epochs=settings["max_epochs"], verbose=False)
        return module.trainer

    def subset(self, batch: Any, kept: Tensor) -> Any:
        return replace(batch, past_target=batch.past_target[kept], future_target=batch.future_target[kept])

    def recast(self, module: Any, kind: Callable[[Kind], Kind]) -> None:
        create = module._create_model

        def recreate(sample: Any) -> Any:
            made = create(sample)
            made.__class__ = kind(type(made))
            return made

        module._create_model = recreate


class TestNBEATS(Forecaster):
    model = "NBEATSModel"
    blocks = "_Block"

    def module(self) -> Any:
        return NBEATSModel(**self.settings, num_stacks=2, num_blocks=1, num_layers=1, layer_widths=8)

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        found = module(batch.to_module_input()).prediction.squeeze(-1)
        return F.mse_loss(found, batch.future_target, reduction="none").flatten(1).mean(1)


class TestGaussianRNN(Forecaster):
    model = "BlockRNNModel, Gaussian"
    blocks = "rnn"

    def module(self) -> Any:
        return BlockRNNModel(**self.settings, model="LSTM", hidden_dim=8, likelihood=GaussianLikelihood())

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        found = module(batch.to_module_input()).prediction
        mean, deviation = module.likelihood._params_from_output(found)
        return F.gaussian_nll_loss(mean, batch.future_target, deviation**2, reduction="none").flatten(1).mean(1)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(page.run("darts", series=wave())["forecast"]) == 3
