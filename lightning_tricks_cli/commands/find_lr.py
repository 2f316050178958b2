"""Suggest a learning rate for a LightningCLI configuration."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lightning_tricks_cli.commands.target import add_config

METHODS = ("valley", "steepest", "minimum/10")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    find = commands.add_parser(
        "find-lr",
        help="suggest a learning rate for a LightningCLI configuration",
        description="Train the model of a LightningCLI configuration for some steps with a rising learning rate, and"
        " print a learning rate for its optimizer. The configuration names model and data by class_path; modules in"
        " the current folder are found. Nothing is saved.",
        epilog="example: lightning-tricks find-lr -c config.yaml --plot lr.png",
    )
    add_config(find)
    find.add_argument(
        "--min-lr", type=float, default=1e-8, metavar="LR", help="the first learning rate (default: 1e-8)"
    )
    find.add_argument("--max-lr", type=float, default=1.0, metavar="LR", help="the last learning rate (default: 1)")
    find.add_argument("--steps", type=int, default=100, metavar="N", help="number of optimizer steps (default: 100)")
    find.add_argument("--plot", type=Path, metavar="OUT", help="write a picture of losses and suggestions")
    printed = find.add_mutually_exclusive_group()
    printed.add_argument(
        "--method", choices=METHODS, default="valley", help="how to choose the suggestion (default: valley)"
    )
    printed.add_argument("--json", action="store_true", help="print learning rates and losses instead")


def run(options: argparse.Namespace) -> None:
    """Run the command; the picture is drawn even if there is no suggestion."""
    from lightning_tricks.schedules import find_lr
    from lightning_tricks_cli.runs.config import read_config
    from lightning_tricks_cli.runs.picture import check_picture, picture

    if options.plot is not None:
        check_picture(options.plot)
    cli = read_config(options.config)
    sweep = {"min_lr": options.min_lr, "max_lr": options.max_lr, "steps": options.steps}
    result = find_lr(cli.trainer, cli.model, datamodule=cli.datamodule, **sweep)
    if not cli.trainer.is_global_zero:
        return
    if options.plot is not None:
        with picture(options.plot) as axes:
            result.plot(axes)
    print(json.dumps(result.to_dict()) if options.json else f"{result.suggestion(options.method):.3g}")
