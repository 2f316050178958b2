"""List the strategy presets and when to use which."""

from __future__ import annotations

import argparse
import json


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe it."""
    presets = commands.add_parser(
        "presets",
        help="list the strategy presets and when to use which",
        description='List the names for Trainer(strategy="NAME"): the precision that each brings, the class of the'
        " strategy in lightning_tricks, and when to use it.",
        epilog="example: lightning-tricks presets",
    )
    presets.set_defaults(run=run)
    presets.add_argument("--json", action="store_true", help="print JSON, with the arguments of the strategies")


def run(options: argparse.Namespace) -> None:
    """Do it."""
    from lightning_tricks.core.report import table
    from lightning_tricks.strategies import presets

    rows = presets()
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    columns = ("name", "precision", "strategy", "when")
    print(table(columns, [[row[column] for column in columns] for row in rows]))
