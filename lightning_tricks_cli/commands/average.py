"""Average the weights of checkpoint files."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_tricks_cli.commands.output import add_output


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    average = commands.add_parser(
        "average",
        help="average the weights of checkpoint files",
        description="Average the weights of checkpoints of one model: Lightning checkpoints, files with a state_dict,"
        " .safetensors. The average of Lightning checkpoints is for testing and deployment, not for resuming.",
        epilog="example: lightning-tricks average epoch=8.ckpt epoch=9.ckpt -o mean.ckpt --weights 0.3 0.7",
    )
    average.set_defaults(run=run)
    average.add_argument("checkpoints", type=Path, nargs="+", metavar="CKPT", help="the files to average")
    average.add_argument(
        "--weights", type=float, nargs="+", metavar="W", help="relative weights, one per file (default: equal)"
    )
    add_output(average)


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.checkpoints import average_checkpoints

    average_checkpoints(options.checkpoints, options.output, options.weights, force=options.force)
    print(f"wrote {options.output}")
