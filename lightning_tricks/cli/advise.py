"""The model, batch and sizes that ``memory`` and ``suggest`` take from a command line."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

from lightning_tricks.advisor.models import Target, target

UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_target(command: argparse.ArgumentParser) -> None:
    """Add what both commands take."""
    command.add_argument(
        "target",
        metavar="TARGET",
        help="a configuration of LightningCLI (.yaml) or of transformers (.json), timm:NAME, or a count such as 7B",
    )
    command.add_argument("--optimizer", default="adamw", metavar="NAME", help="sgd, adamw, adamw_8bit, ... (adamw)")
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (default: 1)")
    command.add_argument(
        "--sequence-length",
        type=at_least_one,
        metavar="N",
        help="tokens of a text (default: what the model takes, at most 512)",
    )
    command.add_argument("--json", action="store_true", help="print the numbers")


def read_target(options: argparse.Namespace) -> Target:
    """The model that a command line names, and an example batch."""
    path = Path(options.target)
    if path.suffix not in (".yaml", ".yml"):
        return target(options.target, sequence_length=options.sequence_length)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    if os.getcwd() not in sys.path:  # a configuration may name classes of the files here, as beside a script
        sys.path.insert(0, os.getcwd())
    from lightning_tricks.cli.find_lr import read_config

    # its Trainer may be for other machines than this one
    places = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "precision=null", "plugins=null")
    cli = read_config([path], *(f"--trainer.{place}" for place in places), "--trainer.logger=false")
    return Target(cli.model, _first_batch(cli))


def _first_batch(cli: Any) -> Any:
    source = cli.model if cli.datamodule is None else cli.datamodule
    source.prepare_data()
    source.setup("fit")
    loader = source.train_dataloader()
    return next(iter(loader))


def size(text: str) -> float:
    """Bytes: "24GB", "80GiB", "1.5T"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write for example 24GB")
    return float(match[1]) * UNITS[match[2]]


def at_least_one(text: str) -> int:
    """A count."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)
