"""The arguments that several commands share: configurations, a model, an optimizer, machines, a file to write."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_config(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add ``--config``, which may be given several times."""
    command.add_argument(
        *("-c", "--config"),
        type=Path,
        action="append",
        required=required,
        metavar="YAML",
        help="the configuration; later ones override earlier ones",
    )


def add_target(command: argparse.ArgumentParser) -> None:
    """Add the arguments that ``memory`` and ``suggest`` share."""
    command.add_argument(
        "target",
        metavar="TARGET",
        help="a LightningCLI configuration (.yaml), a transformers configuration (.json), timm:NAME, or a number of"
        " parameters such as 7B",
    )
    command.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="sgd, adamw, adamw8bit, ... (default: adamw)"
    )
    command.add_argument("--nodes", type=at_least_one, default=1, metavar="N", help="number of machines (default: 1)")
    command.add_argument(
        "--sequence-length",
        type=at_least_one,
        metavar="N",
        help="tokens per text (default: the model's maximum, at most 512)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def add_output(command: argparse.ArgumentParser) -> None:
    """Add ``--output`` and ``--force``."""
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help="file to write: .safetensors, .ckpt, .pt, .pth, .bin",
    )
    command.add_argument("--force", action="store_true", help="overwrite OUT if it exists")


def size(text: str) -> float:
    """Parse a number of bytes: "24GB", "80GiB", "1.5T"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write for example 24GB")
    return float(match[1]) * UNITS[match[2]]


def at_least_one(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def with_flags(text: str, options: argparse.Namespace) -> str:
    """A text about Python arguments in the words of the command: ``batch_size=64`` becomes ``--batch-size 64``.

    A text that begins with what an argument must be begins with its flag. Calls such as ``Trainer(devices=8)`` stay as
    they are.
    """

    def in_words_of_the_command(found: re.Match[str]) -> str:
        if not found[1]:
            return found[0]
        value = "" if found[3] == "True" else found[3]
        return f"--{found[1].replace('_', '-')} {value}".rstrip()

    names = "|".join(re.findall(r"--([\w-]+)", options.parser.format_usage())).replace("-", "_")
    text = re.sub(rf"^({names})(?= must )", lambda found: f"--{found[1].replace('_', '-')}", text)
    return re.sub(rf"\w\([^()]*\)|\b({names})=(['\"]?)([\w.-]*)\2", in_words_of_the_command, text)
