"""List the optimizers by name and when to use them."""

from __future__ import annotations

import argparse
import json

from lightning_tricks_cli.commands.names import known_names, print_table


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    optimizers = commands.add_parser(
        "optimizers",
        help="list the optimizers by name and when to use them",
        description='List the names for lightning_tricks.optimizer("NAME", module, lr): the library of each, the bytes'
        " of its states for an fp32 weight (with ~ they depend on the weights' shapes, and are those of a ViT-small),"
        " where it is refused, and when to use it.",
        epilog="example: lightning-tricks optimizers",
    )
    optimizers.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    rows = known_names()["optimizers"]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    cells = []
    for row in rows:
        refused = " ".join(engine for engine in ("fsdp2", "zero") if not row[engine])
        size = f"{'~' if row['by_shape'] else ''}{row['bytes']:g}"
        cells.append([row["name"], row["library"], size, refused, row["use"]])
    print_table(("name", "library", "bytes", "refused", "when"), cells)
