"""Cross-validate a LightningCLI configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks_cli.commands.target import add_config, at_least_one

if TYPE_CHECKING:
    import lightning as L


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    cross = commands.add_parser(
        "cross-validate",
        help="train and validate a LightningCLI configuration on folds of its data",
        description="Train the model of a LightningCLI configuration once for every fold of its data, validate it on"
        " the fold, and print the metrics with means and 95% intervals. The data module says what its samples are by"
        " fold_dataset(train), or has Subsets of one data set, as random_split makes them. Started again with the same"
        " output folder, it goes on with the fold in which it was stopped.",
        epilog="example: lightning-tricks cross-validate -c config.yaml --folds 5",
    )
    add_config(cross)
    cross.add_argument("--folds", type=int, default=5, metavar="N", help="number of folds (default: 5)")
    cross.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the folds and of the first training (default: 0)"
    )
    cross.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("cross_validation"),
        metavar="DIR",
        help="folder for checkpoints, logs and results (default: cross_validation)",
    )
    cross.add_argument(
        "--predictions", type=Path, metavar="OUT", help="write predict_step's output for all samples to OUT, a .pt file"
    )
    cross.add_argument(
        "--workers", type=at_least_one, default=1, metavar="N", help="number of folds at a time (default: 1)"
    )
    cross.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    import torch

    from lightning_tricks.checkpoints.files import folder_of
    from lightning_tricks.core.safe_load.atomic_file import atomic_write, require_file
    from lightning_tricks.evaluation import cross_validate
    from lightning_tricks.evaluation.fold_runs import RESULTS
    from lightning_tricks.evaluation.plan import require_lock, require_plan, this_rank
    from lightning_tricks_cli.runs.config import read_config, settings_of

    predictions, folder = options.predictions, options.output
    if predictions is not None:
        if not predictions.absolute().parent.is_dir():
            raise FileNotFoundError(f"There is no folder {predictions.parent}: create it first.")
        require_file(predictions)
    cli = read_config(options.config, f"--seed_everything={options.seed}")
    if cli.datamodule is None:
        raise ValueError("cross-validate needs a LightningDataModule, got a configuration without data: add its class.")
    require_lock(folder_of("output", folder))
    require_plan(folder / "config.json", settings_of(cli), rf"{RESULTS}|folds\.json")
    fit = _Fits(options.config, options.seed, folder)
    result = cross_validate(
        fit.module,
        cli.datamodule,
        fit.trainer,
        splitter=options.folds,
        folder=folder,
        seed=options.seed,
        predict=predictions is not None,
        workers=options.workers,
    )
    if this_rank() == 0:
        if predictions is not None:
            with atomic_write(predictions) as temporary, temporary.open("xb") as file:
                torch.save(result.predictions, file)
        print(json.dumps(result.to_dict()) if options.json else result.table())


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

    def module(self, fold: int) -> L.LightningModule:
        """The model of a fold."""
        from lightning_tricks_cli.runs.config import read_config

        root = f"--trainer.default_root_dir={self.folder / f'fold{fold}'}"
        self._made = read_config(self.configs, f"--seed_everything={self.seed + fold}", root)
        return self._made.model

    def trainer(self, fold: int, folder: Path) -> L.Trainer:
        """The Trainer of a fold, whose files are in its folder."""
        from lightning.pytorch.callbacks import ModelCheckpoint

        for checkpoint in self._made.trainer.callbacks:
            if isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath is not None:
                checkpoint.dirpath = str(folder / "checkpoints")
        return self._made.trainer
