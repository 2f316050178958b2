"""Cross-validate a LightningCLI configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.target import at_least_one


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
    cross.set_defaults(run=run)
    cross.add_argument(
        *("-c", "--config"),
        type=Path,
        action="append",
        required=True,
        metavar="YAML",
        help="the configuration; later ones override earlier ones",
    )
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
    from lightning_tricks_cli.runs.cross_validate import cross_validate_config

    cross_validate_config(
        options.config,
        folds=options.folds,
        seed=options.seed,
        folder=options.output,
        predictions=options.predictions,
        workers=options.workers,
        as_json=options.json,
    )
