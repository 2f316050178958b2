"""What training at a larger size shows, for the README: sentences, tables and a picture of a benchmark's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quality_report import PLAIN, interval, sign
from tables import README, grid, placed
from tuned import best_rows, measured_on, own, table

KINDS = {1: "Better", -1: "Worse", 0: "Inconclusive"}
ACCURACY = "Points of balanced test accuracy"
REGIMES = {"clean": "Clean labels"}
STYLES = ("-", "--", ":")  # a colour for each of ten lines, then again in the next style


def told(rows: Sequence[dict[str, Any]]) -> str:
    """The contenders that are better than plain training, worse, and neither by their intervals, the best first."""
    (plain,) = (row for row in rows if own(row["trick"]) == PLAIN)
    others = sorted((row for row in rows if own(row["trick"]) != PLAIN), key=lambda row: -row["gain"]["points"])
    parts = [f"Plain training has {plain['mean']:.1f} ± {plain['std']:.1f}."]
    for kind, words in KINDS.items():
        names = [f"{row['trick']} {interval(row['gain'])}" for row in others if sign(row["gain"]) == kind]
        parts.append(f"{words}: {'; '.join(names) or 'none'}.")
    return " ".join(parts)


def most(rows: Sequence[dict[str, Any]], unit: str) -> str:
    """The largest gain in no more steps than plain training's, if the interval of one is above 0."""
    (steps,) = (row["steps"] for row in rows if own(row["trick"]) == PLAIN)
    others = [row for row in rows if own(row["trick"]) != PLAIN]
    as_long = [row for row in others if row["steps"] <= steps]
    longer = (row["gain"] for row in others if own(row["trick"]) == "plain, twice the steps")
    twice = "".join(f" (plain training, twice the steps: {interval(gain)})" for gain in longer)
    better = [row for row in as_long if sign(row["gain"]) > 0]
    if not better:
        return f"no contender is better than plain training in as many steps{twice}"
    best = max(better, key=lambda row: row["gain"]["points"])
    head = f"the best of {len(as_long)} with no more steps is *{best['trick']}*, {interval(best['gain'])} {unit}"
    return f"{head} over plain training, in {best['over_plain']:.1f} times its time{twice}"


def fine_tuned(settings: dict[str, Any]) -> str:
    """How much of fine-tuning was run."""
    groups: dict[str, list[str]] = {}
    for regime, of in settings["regimes"].items():
        words = f"{of['steps']} steps ({of['sweep_steps']} to choose learning rates) with {of['seeds']} seeds"
        groups.setdefault(words, []).append(regime)
    told = [words if len(groups) == 1 else f"{words} ({', '.join(of)})" for words, of in groups.items()]
    validation, test = settings["validation and test samples"]
    return (
        f"{', '.join(told)}; batches of {settings['batch']} samples; {settings['weights'] / 1e6:.1f} million weights;"
        f" {test:,} samples for the test, learning rates chosen on {validation:,} others"
    )


class Words(NamedTuple):
    """What a benchmark says beside its figures."""

    title: str
    scale: str  # how much was run
    why: Mapping[str, str]  # of each contender that is worse, what its paper says of that
    points: str = ACCURACY  # what a point is one of
    unit: str = "points"
    further: str = ""  # what else came out
    picture: str = "Curves of training, and gains over plain training with 95% intervals"


def section(made: dict[str, Any], words: Words) -> str:
    """One number and the picture, then what came out in each regime, and folded the tables."""
    groups, told_of = (by_regime(rows) for rows in (made["rows"], best_rows(made)))
    name, missing = made["benchmark"], made["settings"]["not measured"]
    hours = sum(run["seconds"] for run in made["runs"]) / 3600
    worse = dict.fromkeys(own(row["trick"]) for row in best_rows(made) if sign(row["gain"]) < 0)
    return "\n\n".join(
        [
            f"#### {words.title}",
            " ".join(f"{regime}: {most(rows, words.unit)}." for regime, rows in told_of.items()),
            f"![{words.picture}](results/{name}.svg)",
            f"`python benchmarks/{name}.py`: {words.scale}; {hours:.1f} hours in one thread. {words.points}: the mean"
            " and standard deviation of plain training, and differences from it with 95% intervals, bold where the"
            " interval leaves out 0.",
            "\n".join(
                [*(f"- **{regime}.** {told(rows)}" for regime, rows in told_of.items()), *words.further.splitlines()]
            ),
            *([f"Not measured yet: {'; '.join(missing)}."] if missing else []),
            f"<details>\n<summary>All figures</summary>\n\n{measured_on(made['machines'])}",
            *(f"{regime}:\n\n{table(rows)}" for regime, rows in groups.items()),
            *([grid(["worse", "why"], [(each, words.why.get(each, "")) for each in worse])] if worse else []),
            "</details>",
        ]
    )


def by_regime(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each regime, by its heading."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(named(row.get("regime", "All of the text")), []).append(row)
    return found


def named(regime: str) -> str:
    """A regime as a heading."""
    return REGIMES.get(regime, regime)


def renew(name: str, text: str) -> None:
    """Write the part of the README between the marks of a benchmark."""
    begin, end = marks(name)
    README.write_text(placed(README.read_text(), begin, text, end))


def marks(name: str) -> tuple[str, str]:
    """What encloses the part of a benchmark."""
    return f"<!-- {name}: written by benchmarks/{name}.py -->", f"<!-- end of {name} -->"


def draw(path: Path, made: dict[str, Any]) -> None:
    """Curves of what is better where the surest gain is, of the first seed, and the gains of all contenders."""
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for row in best_rows(made):
        groups.setdefault(row["regime"], {})[own(row["trick"])] = row
    regime, rows = max(groups.items(), key=lambda each: max(row["gain"]["low"] for row in each[1].values()))
    points = {trick: row["gain"]["points"] for mine in (*groups.values(), rows) for trick, row in mine.items()}
    order = sorted(points.keys() - {PLAIN}, key=lambda trick: (points[trick], trick))
    figure = Figure(figsize=(9.5, 1.2 + 0.26 * len(order)), layout="constrained")
    left, right = figure.subplots(1, 2)
    better = [trick for trick, row in rows.items() if trick == PLAIN or sign(row["gain"]) > 0]
    looks = {trick: look(place) for place, trick in enumerate(better)}
    for line in made["curves"]:
        places, _, values = zip(*line["points"], strict=True)
        name = own(line["trick"])
        if (line["regime"], line["seed"]) != (regime, 0) or name not in better or line["trick"] != rows[name]["trick"]:
            continue
        if places[-1] == rows[PLAIN]["steps"]:  # not those of other lengths
            left.plot(places, [100 * value for value in values], label=name, **looks[name])
    left.set(xlabel="steps", ylabel="balanced validation accuracy, first seed", title=named(regime))
    left.legend(frameon=False, fontsize=7)
    for place, (name, mine) in enumerate(groups.items()):
        shift = 0.3 * ((len(groups) - 1) / 2 - place)
        heights = [height + shift for height, trick in enumerate(order) if trick in mine]
        gains = [mine[trick]["gain"] for trick in order if trick in mine]
        spread = [[gain["points"] - gain["low"] for gain in gains], [gain["high"] - gain["points"] for gain in gains]]
        right.errorbar([gain["points"] for gain in gains], heights, xerr=spread, fmt="o", ms=4, label=named(name))
    right.axvline(0, color="#999999", linewidth=1)
    right.set_xlabel("points over plain training, with 95% intervals")
    right.set_yticks(range(len(order)), order, fontsize=8)
    right.legend(frameon=False, fontsize=8, loc="upper left")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def look(place: int) -> dict[str, str]:
    """The colour and the style of a line among many."""
    return {"color": f"C{place % 10}", "linestyle": STYLES[place // 10]}


def save(figure: Any, path: Path) -> None:
    """Write a picture whose bytes depend on what it shows alone."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
