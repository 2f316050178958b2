"""Which tricks ran, and with which settings, is among the hyperparameters of every logger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

import lightning_tricks as lt
from tests.nets import PlainNet, build, fit


class Module(PlainNet):
    """Hyperparameters of its own, and a schedule."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        return lt.cosine(super().configure_optimizers(), self, warmup=0.25)


class Bare(PlainNet):
    """Neither."""


TRICKS = {
    "single_bf16": {"precision": "bf16-mixed"},
    "EMA": {"decay": 0.9, "start": 0.5},
    "EMA-2": {"decay": 0.5, "start": 0, "validate": "raw", "at_end": "raw"},
    "Mixup": {"alpha": 0.2, "start": 0, "stop": 0.9},
    "cosine": {"warmup": 0.25, "floor": 0.0},
}


def train(kind: type[L.LightningModule], *loggers: Logger, **settings: Any) -> L.Trainer:
    callbacks = [lt.EMA(0.9, start=0.5), lt.EMA(0.5, validate="raw", at_end="raw"), lt.Mixup(stop=0.9)]
    given = {"callbacks": callbacks, "strategy": "single_bf16", **settings}
    return fit(build(kind), logger=[*loggers], log_every_n_steps=1, **given)


def flat(values: dict[str, Any], joint: str = "/") -> dict[str, Any]:
    pairs = [
        (f"{name}{joint}{inner}", found)
        for name, value in values.items()
        if isinstance(value, dict)
        for inner, found in flat(value, joint).items()
    ]
    return {**{name: value for name, value in values.items() if not isinstance(value, dict)}, **dict(pairs)}


def test_csv_and_tensorboard_have_those_of_the_module_and_the_tricks(tmp_path: Path) -> None:
    csv, board = CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")
    train(Module, csv, board)
    saved = yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())
    assert saved == {"width": 16, "tricks": TRICKS}
    assert shown_by_tensorboard(Path(board.log_dir)) == flat({"width": 16, "tricks": TRICKS})
    assert dict(board.hparams) == {"width": 16, "tricks": TRICKS}


def shown_by_tensorboard(folder: Path) -> dict[str, Any]:
    """What the dashboard reads: the first of each kind of metadata."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(folder))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def test_a_module_without_its_own_has_those_of_the_tricks(tmp_path: Path) -> None:
    csv, board = CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")
    train(Bare, csv, board, callbacks=[lt.LRSchedule("linear", warmup=3)], strategy="auto")
    expected = {"LRSchedule": {"curve": "linear"}, "linear": {"warmup": 3, "floor": 0.0}}
    assert yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text()) == {"tricks": expected}
    assert shown_by_tensorboard(Path(board.log_dir)) == flat({"tricks": expected})


def test_a_module_that_has_tricks_of_its_own_keeps_them(tmp_path: Path) -> None:
    class Own(PlainNet):
        def __init__(self, tricks: str = "mine") -> None:
            super().__init__()
            self.save_hyperparameters()

    csv = CSVLogger(tmp_path)
    train(Own, csv)
    saved = yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())
    assert saved["tricks"] == "mine"
    assert saved["lightning_tricks"]["EMA"] == TRICKS["EMA"]


def test_a_logger_reads_attributes_of_hyperparameters(tmp_path: Path) -> None:
    class Reads(CSVLogger):
        def log_hyperparams(self, params: Any) -> None:
            found.append(getattr(params, "width", None))

    found: list[Any] = []
    train(Module, Reads(tmp_path))
    assert found[0] == 16


def test_without_tricks_nothing_is_added(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path)
    fit(build(Bare), logger=csv, log_every_n_steps=1)
    assert not csv.experiment.hparams


@pytest.mark.slow
def test_wandb_has_them_in_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    train(Module, logger)
    config = dict(logger.experiment.config)
    logger.experiment.finish()
    assert config == {"width": 16, "tricks": TRICKS}


@pytest.mark.filterwarnings("ignore")  # of mlflow and sqlalchemy
def test_mlflow_has_them_as_parameters_and_a_run_goes_on_with_more_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "mlruns").as_uri()
    logger = MLFlowLogger("tricks", tracking_uri=store)
    run = train(Module, logger)
    run.save_checkpoint(tmp_path / "x.ckpt")
    again = MLFlowLogger("tricks", tracking_uri=store, run_id=logger.run_id)  # a parameter cannot be changed there
    train(Module, again, max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    found = logger.experiment.get_run(logger.run_id).data
    assert found.params == {name: str(value) for name, value in flat({"width": 16, "tricks": TRICKS}).items()}
    assert "tricks/ema_distance/0.9" in found.metrics


def test_settings_of_other_types_become_plain_data(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path)

    class Own(lt.SAMMixin, PlainNet):
        sam = lt.SAM(0.1, parameters=["weight"])

    fit(build(Own), logger=csv, log_every_n_steps=1, callbacks=[lt.LabelErrors(tmp_path / "errors")])
    saved = yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())["tricks"]
    assert saved["SAM"] == {"rho": 0.1, "parameters": ["weight"]}
    assert isinstance(saved["LabelErrors"]["folder"], str)
    assert json.dumps(saved)


def test_loggers_are_themselves_after_the_fit(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path)
    train(Module, csv)
    csv.log_hyperparams({"mine": 1})
    assert "log_hyperparams" not in vars(csv)
    csv.save()
    assert yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())["mine"] == 1
