"""Train on handwritten digits with wrong labels, without and with tricks, and compare."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    demo = commands.add_parser(
        "demo",
        help="train on noisy handwritten digits, without and with tricks, and compare",
        description="Train a small network on scikit-learn's handwritten digits with wrong training labels: without"
        " tricks, with each trick, and with all of them. Prints a table of what each gains and costs; writes a picture"
        " and a checkpoint.",
        epilog="example: lightning-tricks demo --seeds 2 --output demo",
    )
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for the results (default: demo)")
    demo.add_argument("--seeds", type=int, default=5, help="runs of each variant (default: 5)")
    demo.add_argument("--epochs", type=int, default=15, help="epochs of each run (default: 15)")
    demo.add_argument("--noise", type=float, default=0.4, help="fraction of wrong training labels (default: 0.4)")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks_cli.runs.demo import demo

    demo(options.output, seeds=options.seeds, epochs=options.epochs, noise=options.noise)
