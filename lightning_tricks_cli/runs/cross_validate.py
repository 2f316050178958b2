"""Cross-validation of a LightningCLI configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.lightning.trainer import callbacks_of
from lightning_tricks.core.safe_load.atomic_file import atomic_write, require_file
from lightning_tricks.evaluation import CrossValidation, cross_validate
from lightning_tricks.evaluation.fold_runs import RESULTS
from lightning_tricks.evaluation.plan import require_lock, require_plan, this_rank
from lightning_tricks_cli.runs.find_lr import read_config, settings_of


def cross_validate_config(
    configs: Sequence[Path],
    *,
    folds: int = 5,
    seed: int = 0,
    folder: Path,
    predictions: Path | None = None,
    workers: int = 1,
    as_json: bool = False,
) -> CrossValidation:
    """Run ``cross_validate`` on the model, data and Trainer of configuration files, and print its table.

    Args:
        configs: LightningCLI configurations with a ``class_path`` for model and data; later ones override earlier ones.
        folds: Number of folds.
        seed: Seed of the folds, and of the first training; that of the configurations is left out.
        folder: Folder for checkpoints, logs and results, also of a ModelCheckpoint with another ``dirpath``.
        predictions: The file to write the predictions to; None to predict nothing.
        workers: Number of folds at a time.
        as_json: Whether to print JSON.

    Returns:
        Metrics and predictions.

    Raises:
        ImportError: If jsonargparse or scikit-learn is missing.
        OSError: If a configuration, or the folder for the predictions, does not exist.
        ArgumentError: If a configuration is wrong.
        ValueError: If a configuration has a checkpoint or no data; also as ``cross_validate``.
    """
    if predictions is not None:
        if not predictions.absolute().parent.is_dir():
            raise FileNotFoundError(f"There is no folder {predictions.parent}: create it first.")
        require_file(predictions)
    cli = read_config(configs)
    if cli.datamodule is None:
        raise ValueError("cross-validate needs a LightningDataModule, got a configuration without data: add its class.")
    require_lock(folder_of("output", folder))
    require_plan(folder / "config.json", settings_of(cli), rf"{RESULTS}|folds\.json")
    fit = _Fits(configs, seed, folder)
    result = cross_validate(
        fit.module,
        cli.datamodule,
        fit.trainer,
        splitter=folds,
        folder=folder,
        seed=seed,
        predict=predictions is not None,
        workers=workers,
    )
    if this_rank() == 0:
        if predictions is not None:
            with atomic_write(predictions) as temporary, temporary.open("xb") as file:
                torch.save(result.predictions, file)
        print(json.dumps(result.to_dict()) if as_json else result.table())
    return result


class _Fits:
    """What a configuration makes for each fold: model, callbacks and Trainer are new ones.

    Args:
        configs: The configuration files.
        seed: Seed of the first fold.
        folder: Folder of the results.
    """

    def __init__(self, configs: Sequence[Path], seed: int, folder: Path) -> None:
        self.configs, self.seed, self.folder = configs, seed, folder
        self._made: Any = None

    def module(self, fold: int) -> LightningModule:
        """The model of a fold."""
        seed, root = (
            f"--seed_everything={self.seed + fold}",
            f"--trainer.default_root_dir={self.folder / f'fold{fold}'}",
        )
        self._made = read_config(self.configs, seed, root)
        return self._made.model

    def trainer(self, fold: int, folder: Path) -> Trainer:
        """The Trainer of a fold, whose files are in its folder."""
        trainer: Trainer = self._made.trainer
        for checkpoint in callbacks_of(trainer, ModelCheckpoint):
            if checkpoint.dirpath is not None:
                checkpoint.dirpath = str(folder / "checkpoints")
        return trainer
