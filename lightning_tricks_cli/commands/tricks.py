"""List what is in the package."""

from __future__ import annotations

import argparse
import json


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe it."""
    tricks = commands.add_parser(
        "tricks",
        help="list the tricks: what each does, costs, and where it works",
        description="List all of lightning_tricks: the name and kind of each, what it does, your line of code, what it"
        " costs, and the regimes (precisions, strategies, ...) in which the tests show that it is right.",
        epilog="examples: lightning-tricks tricks; lightning-tricks tricks mixup; lightning-tricks tricks --json",
    )
    tricks.set_defaults(run=run)
    tricks.add_argument("word", nargs="?", default="", help="only those whose name or description has it")
    tricks.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Do it."""
    from lightning_tricks.core.report import table
    from lightning_tricks_cli.runs.tricks import tricks

    rows = tricks(options.word)
    if options.json:
        print(json.dumps([row._asdict() for row in rows], indent=1))
        return
    print(table(("name", "kind", "what it does"), [(row.name, row.kind, row.told()) for row in rows]))
