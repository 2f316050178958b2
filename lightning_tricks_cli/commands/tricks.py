"""List the tricks, or print the card of one."""

from __future__ import annotations

import argparse
import json
import re


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    tricks = commands.add_parser(
        "tricks",
        help="list the tricks, or print the card of one",
        description="List the tricks, one line each. With a name, print its card: what it does, when to take it and"
        " when not, code, starting values, cost, evidence, where it works, pitfalls. With another word, list the"
        " tricks whose name or description has it.",
        epilog="examples: lightning-tricks tricks; lightning-tricks tricks EMA; lightning-tricks tricks memory;"
        " lightning-tricks tricks --json",
    )
    tricks.set_defaults(run=run)
    tricks.add_argument("word", nargs="?", default="", help="a name, or a word to look for")
    tricks.add_argument("--json", action="store_true", help="print JSON, a row for every public name")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from itertools import groupby

    from lightning_tricks_cli.cards import card, every_name
    from lightning_tricks_cli.runs.tricks import rows, tricks

    names = {name.lower(): name for name in every_name()}
    if options.json:
        print(json.dumps([row._asdict() for row in tricks(options.word)], indent=1))
    elif name := names.get(options.word.lower()):
        unseen = r"^(!\[.*\n\n|</?details>\n+|<summary>.*\n+)"  # no pictures in a terminal, and nothing is folded
        print(re.sub(unseen, "", card(name), flags=re.MULTILINE), end="")
    else:
        for group, members in groupby(rows(options.word), key=lambda row: row.group):
            print(f"{group}:")
            for row in members:
                print(f"  {row.names[0]:<23} {row.what}")
        print("lightning-tricks tricks NAME prints the card of one.")
