"""List the strategy presets and when to use them."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.names import known_names, print_table


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    presets = commands.add_parser(
        "presets",
        help="list the strategy presets and when to use them",
        description='List the names for Trainer(strategy="NAME"): the precision that each sets, its strategy class in'
        " lightning_tricks, and when to use it.",
        epilog="example: lightning-tricks presets",
    )
    presets.add_argument("--json", action="store_true", help="print JSON, with the arguments of the strategies")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    rows = known_names()["presets"]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    columns = ("name", "precision", "strategy", "when")
    print_table(columns, [[row[column] for column in columns] for row in rows])
