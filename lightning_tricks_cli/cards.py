"""The card of a trick: what it does, when to take it, code, cost, evidence, limits, paper. In Markdown.

``lightning-tricks tricks EMA`` prints a card, and ``make tables`` writes ``docs/tricks/EMA.md``. Its row in lists and
the prose are in ``cards/EMA.md``; everything else comes from the matrix of tests that passed, and from
``evidence.json``, which ``make tables`` makes of docstrings, declared conflicts and committed figures. Nothing is
imported for it, so a card is there at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning_tricks_cli.catalogue import CATALOGUE, FOLDER, Row
from lightning_tricks_cli.logged import LOGGED
from lightning_tricks_cli.nearest import did_you_mean

HERE = Path(__file__).parent
# What the keys of the matrix mean, where they do not say it.
REGIMES = {
    "accumulate": "gradient accumulation",
    "clip": "gradient clipping",
    "manual": "manual optimization",
    "DeepSpeed": "ZeRO-3",
    "compile": "`torch.compile`",
    "resume": "resuming",
    "ranks": "resuming on another number of processes",
    "exception": "a retry after an error",
    "second": "a second Trainer",
    "again": "a second fit of one Trainer",
    "yaml": "YAML",
    "several": "two optimizers",
    "iterable": "loaders without a length",
    "compiled DDP": "`torch.compile` under DDP",
    "LoRA": "`LoRA`",
    "namespace": "`pytorch_lightning`",
}
IMPORTS = "With `import lightning as L` and `import lightning_tricks as lt`; [the other names](README.md)."
MEANT_TO_HELP = ("Samples", "Losses", "Optimizers", "Fine-tuning")  # groups whose tricks should make results better


def card(name: str) -> str:
    """The card of a trick.

    Args:
        name: A public name of the catalogue. Names that belong together share a card.

    Raises:
        ValueError: If the catalogue has no such name.
    """
    row = row_of(name)
    intro, after = _split((FOLDER / f"{row.names[0]}.md").read_text())
    sections = [
        f"# {', '.join(row.names)}",
        row.what,
        f"`{row.line}`",
        _names(row),
        intro,
        *(section.replace("## Code", f"## Code\n\n{IMPORTS}", 1) for section in after),
        _section("What it logs", _logs(row)),
        _section("Cost", "\n".join(_costs(row))),
        _section("Evidence", _gains(row)),
        _section("Works with", "\n".join(_regimes(row))),
        _section("Conflicts", "\n".join(_conflicts(row))),
        _section("Papers", "\n".join(_papers(row))),
    ]
    return "\n\n".join(section.strip() for section in sections if section.strip()) + "\n"


def row_of(name: str) -> Row:
    """The row of the catalogue that has a name.

    Raises:
        ValueError: If there is none; the message has the most similar name.
    """
    rows = {each: row for row in CATALOGUE for each in (*row.names, *row.beside)}
    if name not in rows:
        near = did_you_mean(name, reversed(rows))  # of Mixup and mixup the class, which comes first
        raise ValueError(f"there is no trick {name!r}.{near} See lightning-tricks tricks.")
    return rows[name]


@cache
def evidence() -> dict[str, Any]:
    """Docstrings, figures and conflicts, as ``make tables`` wrote them."""
    found: dict[str, Any] = json.loads((HERE / "evidence.json").read_text())
    return found


@cache
def found_by_tests() -> dict[str, Any]:
    """What the tests of all tricks found, as ``make matrix`` wrote it."""
    found: dict[str, Any] = json.loads((HERE / "matrix.json").read_text())
    return found


def matrix() -> dict[str, dict[str, dict[str, str]]]:
    """What the conformance tests found, by trick and regime."""
    found: dict[str, dict[str, dict[str, str]]] = found_by_tests()["tricks"]
    return found


def _split(text: str) -> tuple[str, list[str]]:
    """The text before the first heading of the second level, without the front matter, and the sections."""
    intro, *sections = text.split("\n---\n", 1)[1].split("\n## ")
    return intro, [f"## {section}" for section in sections]


def _section(heading: str, text: str) -> str:
    return f"## {heading}\n\n{text}" if text else ""


def _names(row: Row) -> str:
    """What the docstring of each name says."""
    names = evidence()["names"]
    return "\n".join(_bullet(f"`{name}`: {names[name]['what']}") for name in (*row.names, *row.beside))


def _logs(row: Row) -> str:
    """The metrics; with the names that log them, if others of the card do not."""
    of: dict[tuple[str, str], list[str]] = {}
    for name in row.names:
        for metric in LOGGED.get(name, {}).items():
            of.setdefault(metric, []).append(f"`{name}`")
    if not of:
        return ""
    told = []
    for (key, what), names in of.items():
        by = f" ({', '.join(names)})" if len(names) < len(row.names) else ""
        told.append(_bullet(f"`{key}`{by}: {what}."))
    hint = "[Every logger](../integrations/tensorboard.md) gets them, and the settings of the trick."
    return "\n".join([*told, "", hint])


def _costs(row: Row) -> list[str]:
    measured = evidence()["measured"].get(row.names[0], [])
    told = [f"{row.cost[0].upper()}{row.cost[1:]}."] if row.cost else []
    return [_bullet(text) for text in (*told, *measured, *_memory(row), *_waits(row))]


def _memory(row: Row) -> list[str]:
    """What it keeps at the peak, beyond a plain fit."""
    entries: dict[str, list[str]] = {}
    for entry, of in found_by_tests()["memory"].items():
        if entry.split("(")[0] in row.names:
            places = ((of["device"], "on the device"), (of["host"], "in host memory"))
            told = ", ".join(f"{number:g} times the trained weights {where}" for number, where in places if number)
            text = f"{told} ({of['why']})" if told else "nothing of the size of the weights"
            entries.setdefault(text, []).append(f"`{entry}`")
    several = len(entries) > 1
    return [
        f"Memory at the peak beyond a plain fit{', with ' + ', '.join(of) if several else ''}: {text}."
        for text, of in entries.items()
    ]


def _waits(row: Row) -> list[str]:
    """How often a training step waits for a GPU."""
    entries: dict[str, list[str]] = {}
    for entry, of in found_by_tests()["waits"].items():
        if entry.split("(")[0] in row.names:
            logged = f", {of['logged']} in a step that logs" if of["logged"] > of["step"] else ""
            reason = f" ({of['why']})" if of["step"] else ""
            entries.setdefault(f"{of['step']}{reason}{logged}", []).append(f"`{entry}`")
    several = len(entries) > 1
    return [
        f"Waits per step for a GPU{', with ' + ', '.join(of) if several else ''}: {text}."
        for text, of in entries.items()
    ]


def _bullet(text: str) -> str:
    return fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _gains(row: Row) -> str:
    """What was found, and a table of the differences from plain training with their intervals."""
    told = [fill(text, 120, break_long_words=False) for text in evidence()["told"].get(row.names[0], [])]
    if not (gains := gains_of(row)):
        unknown = row.group in MEANT_TO_HELP and row.names[0] not in evidence()["measured"]
        return "\n\n".join(told) or ("Its gain was not measured on our tasks." if unknown else "")
    lines = [f"| task | {' | '.join(f'`{trick}`' for trick in gains)} |", f"|---|{'---|' * len(gains)}"]
    for setting in settings_of(gains):
        found = ([gain(each) for each in rows if each["setting"] == setting] for rows in gains.values())
        lines.append(f"| {setting} | {' | '.join(''.join(cell) for cell in found)} |")
    place = "../../benchmarks/README.md#"
    note = (
        "Points of test accuracy over plain training, of language models 0.01 nats: the mean of five seeds (digits: 15)"
        " or of as many as are named, and its 95% interval, bold where that leaves out 0. How it was measured: [small"
        f" tasks]({place}how-it-was-measured), [fine-tuned MiniLM and EfficientNet, a GPT from"
        f" scratch]({place}at-the-size-at-which-people-train)."
    )
    summary = "\n".join(map(_bullet, _summaries(gains)))
    shown = f"![Points over plain training with 95% intervals, in all settings: {', '.join(gains)}]({forest(row)})"
    table = "\n".join(["<details>", "<summary>The figures</summary>", "", *lines, "", "</details>"])
    return "\n\n".join([summary, shown, table, *told, fill(note, 120, break_long_words=False, break_on_hyphens=False)])


def gains_of(row: Row) -> dict[str, list[dict[str, Any]]]:
    """By variant of what is on a card its gains in all settings."""
    return {trick: of for name in (*row.names, *row.beside) for trick, of in evidence()["gains"].get(name, {}).items()}


def settings_of(gains: dict[str, list[dict[str, Any]]]) -> list[str]:
    """All settings, those of larger networks last."""
    larger = {each["setting"]: each["larger"] for rows in gains.values() for each in rows}
    return sorted(larger, key=larger.__getitem__)


def forest(row: Row) -> str:
    """The name of the picture that a card has of its gains; empty if there are none."""
    return f"gains_{row.names[0]}.svg" if gains_of(row) else ""


def _summaries(gains: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """In how many settings the intervals tell a trick from plain training; larger networks in one sentence."""
    larger = []
    for trick, rows in gains.items():
        if small := [row for row in rows if not row["larger"]]:
            text = f"`{trick}` is better than plain training {_counted(small)}"
            told = [row["calibration"] for row in small]
            if any(told):
                text += f"; its calibration error is lower in {told.count(1)} and higher in {told.count(-1)}"
            yield f"{text}."
        if large := [row for row in rows if row["larger"]]:
            larger.append(f"`{trick}` is better {_counted(large)}")
    if larger:
        yield f"In larger networks {'; '.join(larger)}."


def _counted(rows: list[dict[str, Any]]) -> str:
    better, worse = sum(row["low"] > 0 for row in rows), sum(row["high"] < 0 for row in rows)
    return f"in {better} of {len(rows)} settings, and worse in {worse}"


def gain(difference: dict[str, float]) -> str:
    """A difference in points with its interval, in bold where that leaves out 0."""
    points, low, high = (f"{difference[key]:+.1f}" for key in ("points", "low", "high"))
    return f"{f'**{points}**' if difference['low'] > 0 or difference['high'] < 0 else points} ({low} to {high})"


def _regimes(row: Row) -> list[str]:
    """Where tests show that the names are right, and where they are refused."""
    right: dict[str, list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for entry, cells in matrix().items():
        if entry.split("(")[0] not in row.names and not ("*" in entry and "preset" in row.names):
            continue
        cell = {REGIMES.get(regime, regime): found for regime, found in cells.items()}
        right.setdefault(", ".join(name for name in cell if cell[name]["cell"] == "right"), []).append(f"`{entry}`")
        for name, found in cell.items():
            if found["cell"] == "refused":
                refused.setdefault((entry, _rule(found["why"], entry)), []).append(name)
    lines = [_bullet(f"{', '.join(names)}: tested on CPUs with {regimes}.") for regimes, names in right.items()]
    again: dict[str, list[str]] = {}
    for entry in (entry for names in right.values() for entry in names):
        if why := matrix()[entry.strip("`")].get("again", {}).get("why"):
            again.setdefault(why, []).append(entry)
    lines += [
        _bullet(f"Fitted again after Ctrl-C, an error or with more epochs, {', '.join(of)}: {why}.")
        for why, of in again.items()
    ]
    lines += [_bullet(f"`{entry}` is refused with {', '.join(of)}: {rule}.") for (entry, rule), of in refused.items()]
    return [*lines, *(["", "[The whole matrix](../compatibility.md), with the error messages."] if lines else [])]


def _rule(why: str, entry: str) -> str:
    """The first clause of an error message: neither the value received nor the remedy."""
    why = re.sub(r"^\w+\(.*?\) and \w+\(.*?\): ", "", why)  # of two tricks with their settings
    return re.split(r", got |: |\. |\.$", why)[0].replace(f"{entry.split('(')[0]} ", "it ", 1)


def _conflicts(row: Row) -> list[str]:
    """What is refused or warned of when a fit begins, from either side."""
    lines = []
    for each in evidence()["conflicts"]:
        for mine, theirs in ((each["names"], each["others"]), (each["others"], each["names"])):
            if named := [name for name in mine if name in row.names]:
                others = ", ".join(f"`{name}`" for name in theirs)
                verb = "warns" if each["warns"] else "raises"
                ours = ", ".join(f"`{name}`" for name in named)
                fix = each["remedy"][0].lower() + each["remedy"][1:]
                lines.append(_bullet(f"{ours} with {others} {verb}: {each['rule']}. Fix: {fix}."))
                break
    return [*dict.fromkeys(lines)]


def _papers(row: Row) -> list[str]:
    names = evidence()["names"]
    return [*dict.fromkeys(_bullet(names[name]["papers"]) for name in row.names if names[name]["papers"])]


def cards() -> list[str]:
    """The names of all cards, in the order of the catalogue."""
    return [row.names[0] for row in CATALOGUE]


def every_name() -> list[str]:
    """All names that have a card."""
    return [*chain.from_iterable((*row.names, *row.beside) for row in CATALOGUE)]
