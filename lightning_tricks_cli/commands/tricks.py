"""List all tricks of the package."""

from __future__ import annotations

import argparse
import json


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    tricks = commands.add_parser(
        "tricks",
        help="list the tricks: what each does and costs, and where it works",
        description="List all public names of lightning_tricks with their kind, what they do, the line of code to add,"
        " what they cost, and the regimes (precisions, strategies, ...) in which the tests show that they are correct.",
        epilog="examples: lightning-tricks tricks; lightning-tricks tricks mixup; lightning-tricks tricks --json",
    )
    tricks.set_defaults(run=run)
    tricks.add_argument("word", nargs="?", default="", help="list only names and descriptions with this word")
    tricks.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.core.report import table
    from lightning_tricks_cli.runs.tricks import tricks

    rows = tricks(options.word)
    if options.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    print(table(("name", "kind", "what it does"), [(row.name, row.kind, row.description()) for row in rows]))
