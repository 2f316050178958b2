"""Entry point of the ``lightning-tricks`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.cli.commands import (
    average,
    consolidate,
    demo,
    doctor,
    export,
    find_lr,
    memory,
    presets,
    suggest,
)

COMMANDS = (demo, average, export, consolidate, find_lr, presets, doctor, memory, suggest)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 an error that is printed on one line, 2 wrong usage."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, ImportError, OSError, MisconfigurationException) as error:
        if options.debug:
            raise
        print(f"lightning-tricks: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-tricks", description="Training tricks for a stock Lightning Trainer."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
