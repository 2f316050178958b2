"""cross-validate: the folds are those of the function, each from the configuration; errors are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from lightning_tricks.examples.digits import Digits, DigitsData
from lightning_tricks_cli.main import main
from tests.cli.test_main import assert_one_line
from tests.evaluation.recipes import Scored
from tests.nets import quiet

CONFIGS = Path(__file__).parent.parent.parent / "configs"
QUIET = {**quiet, "max_epochs": 1}
MODEL = {"class_path": "lightning_tricks.examples.digits.Digits"}
DATA = {"class_path": "lightning_tricks.examples.digits.DigitsData"}
BEST = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "same", "monitor": "val_accuracy", "mode": "max"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


def write(name: str, **config: Any) -> str:
    Path(name).write_text(json.dumps({"trainer": QUIET, "model": MODEL, "data": DATA, **config}))
    return name


def run(*arguments: str) -> int:
    return main(["cross-validate", *arguments])


def test_it_prints_the_folds_made_by_hand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a seed in the configuration, which would train all folds alike, and with one folder for all checkpoints."""
    trainer = {**QUIET, "enable_checkpointing": True, "callbacks": [BEST, {"class_path": "EMA"}]}
    config = write("config.yaml", trainer=trainer, seed_everything=9)
    assert run("-c", config, "--folds", "2", "--seed", "3", "--output", "cv", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    data = DigitsData()
    data.setup("fit")
    samples, rows = data.fold_dataset(True), []
    assert len(samples) == 1200
    for k, (train, validation) in enumerate(KFold(2, shuffle=True, random_state=3).split(range(1200))):
        L.seed_everything(3 + k, workers=True, verbose=False)
        module, alone = Digits(), L.Trainer(**QUIET, callbacks=[lt.EMA()])
        outside = DataLoader(Subset(samples, validation), 300)
        alone.fit(module, DataLoader(Subset(samples, train), 64, shuffle=True), outside)
        rows.append(alone.validate(module, outside, verbose=False)[0])
    assert found["metrics"] == [pytest.approx(row) for row in rows]
    assert [Path(path).parent for path in found["checkpoints"]] == [Path(f"cv/fold{k}/checkpoints") for k in range(2)]
    assert not (folder / "same").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "cv"]
    assert run("-c", config, "--folds", "2", "--seed", "3", "--output", "cv") == 0
    assert "mean" in capsys.readouterr().out
    assert run("-c", config, "--folds", "3", "--seed", "3", "--output", "cv") == 1
    assert "folds was '2, " in capsys.readouterr().err
    model = {"class_path": "lightning_tricks.examples.digits.Digits", "init_args": {"schedule": True}}
    config = write("config.yaml", trainer=trainer, seed_everything=9, model=model)
    assert run("-c", config, "--folds", "2", "--seed", "3", "--output", "cv") == 1
    assert "model.init_args.schedule was 'False', now 'True'" in capsys.readouterr().err


def test_predictions_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"class_path": "tests.evaluation.recipes.Scored"}
    data = {"class_path": "tests.cli.test_cross_validate.HalfData"}
    config = write("config.yaml", model=model, data=data)
    assert run("-c", config, "--folds", "2", "--output", "cv", "--predictions", "out.pt") == 0
    predictions = torch.load("out.pt")
    assert predictions.shape == (44, 2)
    module = Scored()
    module.load_state_dict(torch.load("cv/fold0/last.ckpt", weights_only=True)["state_dict"])
    _, validation = next(iter(KFold(2, shuffle=True, random_state=0).split(range(44))))
    data = HalfData()
    with torch.no_grad():
        torch.testing.assert_close(predictions[validation], module.eval()(data.data.tensors[0][validation]))


class HalfData(L.LightningDataModule):
    """Two halves of one data set, as random_split makes them."""

    def __init__(self) -> None:
        super().__init__()
        from tests.nets import data

        self.data = data(44)

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(self.data, range(0, 44, 2)), 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Subset(self.data, range(1, 44, 2)), 8)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("config", "arguments", "status", "message"),
    [
        ({}, ["--folds", "1"], 1, "splitter must be at least 2, got 1"),
        ({}, ["--predictions", "none/out.pt"], 1, "There is no folder none"),
        ({"data": None}, [], 1, "cross-validate needs a LightningDataModule"),
        ({"model": {"class_path": "Digitz"}}, [], 2, 'config.yaml: Parser key "model"'),
        ({"ckpt_path": "last.ckpt"}, [], 1, "this command starts from the model's initial weights"),
        ({"trainer": {**QUIET, "limit_val_batches": 0}}, [], 1, "cross_validate needs a module with validation_step"),
    ],
)
def test_what_is_wrong_is_one_line_on_stderr(
    config: dict[str, Any], arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-c", write("config.yaml", **config), "--output", "cv", *arguments) == status
    assert_one_line(capsys, message)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["digits_schedule", "digits"])
def test_the_configurations_of_the_repository(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("short.yaml").write_text(json.dumps({"trainer": QUIET}))
    assert run("-c", str(CONFIGS / f"{config}.yaml"), "-c", "short.yaml", "--folds", "2", "--output", "cv") == 0
    assert "val_accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_folds_at_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    config = write("config.yaml")
    assert run("-c", config, "--folds", "2", "--output", "two", "--workers", "2", "--json") == 0
    two = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert run("-c", config, "--folds", "2", "--output", "one", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"] == two["metrics"]
