"""The tricks, a row for each card: what the front matter of ``cards/*.md`` says, in the order of lists."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "cards"
GROUPS = (  # the headings of lists, in their order
    *("Better weights", "Samples", "Losses", "Schedules", "Optimizers", "Stability", "Fine-tuning"),
    *("Memory and speed", "Data", "Scale", "Checks", "Networks", "Evaluation", "Checkpoints"),
)


class Row(NamedTuple):
    """Names that share a card.

    Args:
        names: Public names that belong together; the first one is the name of the card.
        group: The heading under which lists have the card.
        line: The line of code to add to a training script.
        what: What they do, in one sentence of at most 74 characters, so that a list fits 100 columns.
        cost: Their cost in time and memory; empty where there is none to speak of.
        beside: Further public names of the card, which cost nothing.
        place: The place of the card in its group, from 1; a card that says none comes last.
    """

    names: tuple[str, ...]
    group: str
    line: str
    what: str
    cost: str = ""
    beside: tuple[str, ...] = ()
    place: int = 1000


def row_in(card: Path) -> Row:
    """The front matter of a card: lines ``field: value`` between two lines ``---``.

    They are valid YAML, and read without a parser of YAML, which completion in a shell would wait for.

    Raises:
        ValueError: If a field is missing or unknown, or the group is; the message names the card.
    """
    front = card.read_text().removeprefix("---\n").partition("\n---\n")[0]
    said = {field: value.strip("'") for field, _, value in (line.partition(": ") for line in front.splitlines())}
    if not {"names", "group", "line", "what"} <= said.keys() <= {*Row._fields} or said["group"] not in GROUPS:
        raise ValueError(
            "a card begins with names:, group:, line: and what: between two lines ---, and perhaps cost:, beside: and"
            f" place:, as cards/EMA.md does, got {', '.join(said) or 'none'} in {card}. Groups: {', '.join(GROUPS)}."
        )
    names, beside = tuple(said["names"].split(", ")), tuple(filter(None, said.get("beside", "").split(", ")))
    place = int(said.get("place", 1000))
    return Row(names, said["group"], said["line"], said["what"], said.get("cost", ""), beside, place)


CATALOGUE = tuple(
    sorted(map(row_in, FOLDER.glob("*.md")), key=lambda row: (GROUPS.index(row.group), row.place, row.names))
)
