"""Suggest a learning rate for a LightningCLI configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

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
    find.set_defaults(run=run)
    find.add_argument(
        *("-c", "--config"),
        type=Path,
        action="append",
        required=True,
        metavar="YAML",
        help="the configuration; later ones override earlier ones",
    )
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
    """Run the command."""
    from lightning_tricks_cli.runs.find_lr import find_lr_of

    find_lr_of(
        options.config,
        method=options.method,
        plot=options.plot,
        as_json=options.json,
        min_lr=options.min_lr,
        max_lr=options.max_lr,
        steps=options.steps,
    )
