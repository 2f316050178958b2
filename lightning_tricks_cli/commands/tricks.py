"""List the tricks, or print the card of one."""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import sys
from itertools import groupby
from typing import NamedTuple

from lightning_tricks_cli.cards import card, cards, every_name, evidence, matrix, row_of
from lightning_tricks_cli.catalogue import CATALOGUE, Row


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    tricks = commands.add_parser(
        "tricks",
        help="list the tricks, or print the card of one",
        description="List the tricks, one line each. With a name, print its card: what it does, when to take it and"
        " when not, code, starting values, cost, evidence, where it works, pitfalls. With other words, list the"
        " tricks whose name or description has them, or else those whose card has them.",
        epilog="examples: lightning-tricks tricks; lightning-tricks tricks EMA; lightning-tricks tricks memory;"
        " lightning-tricks tricks --json",
    )
    tricks.add_argument("words", nargs="*", metavar="word", help="a name, or words to look for")
    tricks.add_argument("--json", action="store_true", help="print JSON, a row for every public name")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    names, words = {name.lower(): name for name in every_name()}, " ".join(options.words)
    if options.json:
        print(json.dumps([row._asdict() for row in tricks(words)], indent=1))
    elif name := names.get(words.lower()):
        print_markdown(in_text(card(name)))
    else:
        for group, members in groupby(rows(words), key=lambda row: row.group):
            print(f"{group}:")
            for row in members:
                print(f"  {row.names[0]:<23} {row.what}")
        print("lightning-tricks tricks NAME prints the card of one.")


class Trick(NamedTuple):
    """A public name and its description.

    Args:
        name: The public name.
        kind: The sub-package that exports it.
        what: The first line of its docstring.
        line: The line of code to add to a training script.
        cost: Its cost in time and memory.
        works: The regimes in which the tests show that it is correct.
    """

    name: str
    kind: str
    what: str
    line: str
    cost: str
    works: str


def tricks(words: str = "") -> list[Trick]:
    """List the public names that have words in their name or description; by default all of them.

    Raises:
        ValueError: If there is none.
    """
    found = [
        Trick(name, said["kind"], said["what"], *_line_and_cost(name), works_with(name))
        for name, said in evidence()["names"].items()
        if _has(f"{name} {said['what']}", words)
    ]
    if not found:
        raise ValueError(f"no trick has {words!r} in its name or description: see lightning-tricks tricks.")
    return found


def rows(words: str = "") -> list[Row]:
    """The cards that have words in their group, names or descriptions, or else in their text; by default all of them.

    Raises:
        ValueError: If there is none; the message has similar names.
    """
    said = evidence()["names"]
    found = []
    for row in CATALOGUE:
        names = [f"{name} {said[name]['what']}" for name in (*row.names, *row.beside)]
        if _has(" ".join([row.group, row.what, *names]), words):
            found.append(row)
    return found or [row for row in CATALOGUE if _has(card(row.names[0]), words)] or [row_of(words)]


def _has(text: str, words: str) -> bool:
    """Whether a text has all of the words, in small or in capital letters."""
    return all(word in text.lower() for word in words.lower().split())


def _line_and_cost(name: str) -> tuple[str, str]:
    """The catalogue's line of code with the name, and the cost."""
    row = next((row for row in CATALOGUE if name in (*row.names, *row.beside)), Row((name,), "", "", ""))
    line = row.line if re.search(rf"\b{name}\b", row.line.replace("-", "_")) else ""
    return line, row.cost if name in row.names else ""


def works_with(name: str) -> str:
    """The regimes in which the conformance suite shows that a trick is correct; empty if it has no row."""
    return ", ".join(regime for regime, cell in matrix().get(name, {}).items() if cell["cell"] == "right")


def in_text(card: str) -> str:
    r"""A card without pictures and relative links: they name the file of the repository, or the card to print.

    >>> in_text("![a curve](ema.svg)\n\nAs [`SWA`](SWA.md), [measured](../compare.md) by [its card](EMA.md).")
    'As `SWA`, measured (docs/compare.md) by its card (lightning-tricks tricks EMA).'
    """

    def told(link: re.Match[str]) -> str:
        text, path = link.groups()
        if (name := path.removesuffix(".md")) in cards():
            return text if text.strip("`") == name else f"{text} (lightning-tricks tricks {name})"
        return f"{text} ({posixpath.normpath(f'docs/tricks/{path}')})" if path else text

    unseen = r"^(!\[.*\n\n|</?details>\n+|<summary>.*\n+)"  # no pictures in a terminal, and nothing is folded
    without_pictures = re.sub(unseen, "", card, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", told, without_pictures)


def print_markdown(text: str) -> None:
    """Print Markdown: drawn by rich on a terminal, as it is into a file or a pipe, and without rich."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markdown import Markdown
        except ImportError:
            pass
        else:
            console = Console()
            console.print(Markdown(text), width=min(100, console.width))
            return
    print(text, end="")
