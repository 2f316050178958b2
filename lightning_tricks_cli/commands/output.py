"""The arguments for the file that a command writes."""

from __future__ import annotations

import argparse
from pathlib import Path


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
