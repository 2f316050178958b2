"""Find the number of loader workers for a LightningCLI configuration."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.target import add_config


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    find = commands.add_parser(
        "find-workers",
        help="find the number of loader workers for a LightningCLI configuration",
        description="Time the training loader of a LightningCLI configuration with several numbers of workers, and"
        " print the arguments of the DataLoader that keeps up with training. The configuration names model and data by"
        " class_path; modules in the current folder are found. Nothing is trained, and nothing is saved.",
        epilog="example: lightning-tricks find-workers -c config.yaml --step-seconds 0.05",
    )
    add_config(find)
    find.add_argument(
        "--step-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds of a training step on the device (default: 0, load as fast as possible)",
    )
    find.add_argument("--most", type=int, metavar="N", help="largest number of workers to try (default: the cores)")
    find.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="how long each number is timed in a round (default: 1)"
    )
    find.add_argument("--rounds", type=int, default=5, metavar="N", help="largest number of rounds (default: 5)")
    find.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.data import find_num_workers
    from lightning_tricks_cli.runs.config import read_model
    from lightning_tricks_cli.runs.target import train_loader_of

    result = find_num_workers(
        train_loader_of(read_model(options.config)),
        step_seconds=options.step_seconds,
        most=options.most,
        seconds=options.seconds,
        rounds=options.rounds,
    )
    print(json.dumps(result.to_dict()) if options.json else result)
