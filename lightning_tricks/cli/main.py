"""Entry point of the ``lightning-tricks`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 an error that is printed on one line, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "demo":
            from lightning_tricks.cli.demo import demo

            demo(options.output, seeds=options.seeds, epochs=options.epochs, noise=options.noise)
    except (ValueError, TypeError, ImportError, OSError) as error:
        if options.debug:
            raise
        print(f"lightning-tricks: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-tricks", description="Training tricks for a stock Lightning Trainer."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train on noisy handwritten digits, plain and with tricks, and compare",
        description="Train one small network on scikit-learn's handwritten digits with wrong training labels:"
        " plain, with each trick, with all. Prints a table, writes a picture and a checkpoint.",
        epilog="example: lightning-tricks demo --seeds 2 --output demo",
    )
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for the results (default: demo)")
    demo.add_argument("--seeds", type=int, default=5, help="runs of each variant (default: 5)")
    demo.add_argument("--epochs", type=int, default=55, help="epochs of each run (default: 55)")
    demo.add_argument("--noise", type=float, default=0.4, help="share of wrong training labels (default: 0.4)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
