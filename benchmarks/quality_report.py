"""The figures of ``quality.py``: gains with their intervals, the heat map, and a part of the README."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from tables import README, RESULTS, grid, placed

from lightning_tricks.evaluation.statistics import paired_difference

PLAIN = "plain"
SHIFTS = ("noise", "blur", "rotation")  # of the test data, for the models of the clean regime
LOSS_TASKS = ("text",)  # judged by their loss, of which a hundredth of a nat is called a point
SWEEP = "learning rates"  # the part of the runs that choose one, and count for nothing else
BEGIN, END = "<!-- quality: written by benchmarks/quality.py -->", "<!-- end of quality -->"
GROUPS = {
    "With wrong labels": ("20% wrong labels", "40% wrong labels"),
    "With clean, few or long-tailed training data": ("clean", "10% of the samples", "long tail"),
    "On shifted test data": SHIFTS,
}
KINDS = (("points over plain", "gain", "mean"), ("calibration error, points below plain", "ece_gain", "ece"))
NAMED = 5  # tricks that a sentence names, those of the most columns
PANELS = (("digits", "textures"), ("glosses", "text"))  # the tasks in each half of the picture
PICTURE = RESULTS / "quality.svg"
STRONGEST = 10.0  # points from which on a cell of the picture has the full colour

Run = dict[str, Any]
Row = dict[str, Any]
Column = tuple[str, str]  # task and regime, or task and shift


def rows(runs: Sequence[Run], controls: Sequence[Run] = ()) -> list[Row]:
    """A row for every trick in every column, compared with its controls, plain runs of its machine, if it has any."""
    beside: dict[tuple[str, str, str], dict[int, Run]] = {}
    for control in controls:
        for trick in control["tricks"]:
            beside.setdefault((control["task"], control["regime"], trick), {})[control["seed"]] = control
    cells: dict[Column, dict[str, dict[int, Run]]] = {}
    for run in runs:
        if run["part"] != SWEEP:
            cells.setdefault((run["task"], run["regime"]), {}).setdefault(run["trick"], {})[run["seed"]] = run
    return [
        row(
            task,
            regime if part == "test" else part,
            part,
            trick,
            mine,
            beside.get((task, regime, trick), tricks[PLAIN]),
        )
        for (task, regime), tricks in cells.items()
        for part in ("test", *SHIFTS)
        for trick, mine in tricks.items()
        if f"{part}_ece" in next(iter(mine.values()))
    ]


def row(task: str, regime: str, part: str, trick: str, mine: dict[int, Run], plain: dict[int, Run]) -> Row:
    """Mean score and calibration error of a trick, and its gains over plain training with the same seeds."""
    first = next(iter(mine.values()))
    score, sign = (f"{part}_loss", -100) if task in LOSS_TASKS else (f"{part}_accuracy", 100)
    scores = [abs(sign) * run[score] for run in mine.values()]
    return {
        "task": task,
        "regime": regime,
        "trick": trick,
        **{rate: first[rate] for rate in ("lr", "adamw_lr") if rate in first},
        "seeds": len(mine),
        "mean": round(fmean(scores), 2),
        "std": round(stdev(scores), 2),
        "gain": paired(mine, plain, score, sign),
        "ece": round(100 * fmean(run[f"{part}_ece"] for run in mine.values()), 2),
        "ece_gain": paired(mine, plain, f"{part}_ece", -100),
    }


def paired(mine: dict[int, Run], plain: dict[int, Run], metric: str, factor: int) -> dict[str, float]:
    """The mean difference of runs with the same seed, in points, and its 95% interval; more is better."""
    values = [[factor * runs[seed][metric] for seed in mine] for runs in (mine, plain)]
    found = paired_difference(*values)
    return {"points": round(found.mean, 3), "low": round(found.low, 3), "high": round(found.high, 3)}


def sign(gain: dict[str, float]) -> int:
    """1 and -1 where the interval tells better and worse, 0 where it tells neither."""
    return (gain["low"] > 0) - (gain["high"] < 0)


def columns(result: dict[str, Any]) -> dict[Column, dict[str, Row]]:
    """The rows by trick in each column, tasks beside each other."""
    settings = result["settings"]
    order = [(task, regime) for task in settings["tasks"] for regime in (*settings["regimes"], *SHIFTS)]
    found: dict[Column, dict[str, Row]] = {column: {} for column in order}
    for each in result["rows"]:
        found[each["task"], each["regime"]][each["trick"]] = each
    return {column: tricks for column, tricks in found.items() if tricks}


def renew(result: dict[str, Any]) -> None:
    """Write the part of the README between its marks."""
    README.write_text(placed(README.read_text(), BEGIN, section(result), END))


def section(result: dict[str, Any]) -> str:
    """The part of the README: in how many columns tricks are better or worse, and all figures, folded."""
    return "\n\n".join(
        [
            f"<details>\n<summary>All figures ({machines(result)})</summary>",
            *conclusions(result),
            "Differences of runs with the same seed, with 95% intervals (Student's t); bold where the interval leaves"
            " out 0. Of plain training its score and its calibration error.",
            *(table(result, task, *kind) for task in result["settings"]["tasks"] for kind in KINDS),
            "</details>",
        ]
    )


def machines(result: dict[str, Any]) -> str:
    """The machine of a benchmark, and those on which some of its tricks were measured later."""
    told = words(result["machine"])
    for other in dict.fromkeys(map(words, result.get("renewed", {}).values())):
        told += f"; {', '.join(name for name, where in result['renewed'].items() if words(where) == other)}: {other}"
    return told


def words(machine: dict[str, Any]) -> str:
    """A machine and its versions."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def table(result: dict[str, Any], task: str, title: str, gain: str, level: str) -> str:
    """The levels of plain training on a task by regime, and the gains of the tricks."""
    found = {regime: tricks for (of, regime), tricks in columns(result).items() if of == task}
    measured = [trick for trick in result["settings"]["tricks"] if any(trick in tricks for tricks in found.values())]
    body = [[PLAIN, *(f"{tricks[PLAIN][level]:.1f}" for tricks in found.values())]] + [
        [trick, *(interval(tricks[trick][gain]) for tricks in found.values())] for trick in measured if trick != PLAIN
    ]
    return grid([f"{task}: {title}", *found], body)


def interval(gain: dict[str, float]) -> str:
    """The gain and its limits."""
    text = f"{gain['points']:+.1f}"
    return f"{f'**{text}**' if sign(gain) else text} ({gain['low']:+.1f} to {gain['high']:+.1f})"


def conclusions(result: dict[str, Any]) -> list[str]:
    """A sentence for each group of regimes and for calibration, and how far they go."""
    found = columns(result)
    accuracy = {column: tricks for column, tricks in found.items() if column[0] not in LOSS_TASKS}
    groups = [
        (group, {column: tricks for column, tricks in accuracy.items() if column[1] in regimes}, "gain")
        for group, regimes in GROUPS.items()
    ] + [
        ("For the language model", {each: tricks for each, tricks in found.items() if each not in accuracy}, "gain"),
        ("By calibration error, in all columns", found, "ece_gain"),
    ]
    sentences = [
        f"- **{group}**, better than plain training: {told(mine, gain, 1)}; worse: {told(mine, gain, -1)}."
        for group, mine, gain in groups
        if mine
    ]
    signs = [sign(each["gain"]) for tricks in found.values() for name, each in tricks.items() if name != PLAIN]
    return [
        "Which tricks the intervals tell from plain training, in how many of the columns in which they were measured,"
        " and their largest difference there, in points (per cent of balanced accuracy or of the calibration error, for"
        " text hundredths of a nat per character)."
        f" A list names at most {NAMED} tricks, those of the most columns."
        f" {sum(map(bool, signs))} of {len(signs)} intervals of scores leave out 0, where"
        f" {0.05 * len(signs):.0f} would by chance.",
        "\n".join(sentences),
        collapsed(result["runs"]),
    ]


def collapsed(runs: Sequence[Run]) -> str:
    """A sentence about runs that have less than half of the median accuracy of all runs in their task and regime."""
    groups: dict[Column, list[Run]] = {}
    for run in runs:
        if run["part"] != SWEEP and "test_accuracy" in run:
            groups.setdefault((run["task"], run["regime"]), []).append(run)
    found = []
    for (task, regime), mine in groups.items():
        least = median(run["test_accuracy"] for run in mine) / 2
        low = Counter(run["trick"] for run in mine if run["test_accuracy"] < least)
        found += [f"{trick} ({task}, {regime}: {number})" for trick, number in low.items()]
    return f"Runs with less than half of the median accuracy in their task and regime: {'; '.join(found) or 'none'}."


def told(found: dict[Column, dict[str, Row]], gain: str, better: int) -> str:
    """The tricks that the intervals tell to be better (1) or worse (-1), those in most columns first."""
    gains: dict[str, list[tuple[float, Column]]] = {}
    measured: Counter[str] = Counter()
    for column, tricks in found.items():
        measured.update([*tricks])
        for trick, each in tricks.items():
            if sign(each[gain]) == better:
                gains.setdefault(trick, []).append((each[gain]["points"], column))
    parts = []
    for trick in sorted(gains, key=lambda trick: -len(gains[trick])):
        points, (task, regime) = max(gains[trick], key=lambda each: better * each[0])
        parts.append(f"{trick} in {len(gains[trick])} of {measured[trick]} ({points:+.1f} on {task}, {regime})")
    more = [f"and {len(parts) - NAMED} more"] if len(parts) > NAMED else []
    return ", ".join(parts[:NAMED] + more) or "none"


def draw(path: Path, result: dict[str, Any]) -> None:
    """The heat map: blue is better, red is worse, and grey is inconclusive."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found, tricks = columns(result), result["settings"]["tricks"]
    halves = ({column: mine for column, mine in found.items() if column[0] in tasks} for tasks in PANELS)
    parts = [half for half in halves if half]
    shown = [[trick for trick in tricks if any(trick in mine for mine in part.values())] for part in parts]
    figure = Figure(figsize=(12, 2.6 + 0.28 * sum(map(len, shown))), layout="constrained")
    axes = figure.subplots(len(parts), height_ratios=[len(names) + 4 for names in shown], squeeze=False)[:, 0]
    for axis, part, names in zip(axes, parts, shown, strict=True):
        _panel(axis, part, names)
    axes[-1].set_xlabel(
        "points over plain training and their 95% intervals; the first row is the score of plain training"
        " (text: 0.01 nats per character); grey: inconclusive",
        fontsize=8,
    )
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


def _panel(axis: Any, found: dict[Column, dict[str, Row]], tricks: list[str]) -> None:
    """The columns of some tasks."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    colour = Normalize(-STRONGEST, STRONGEST)
    for x, mine in enumerate(found.values()):
        for y, trick in enumerate(tricks):
            if trick not in mine:
                continue
            gain, told_apart = mine[trick]["gain"], sign(mine[trick]["gain"])
            words, limits, ink = f"{gain['points']:+.1f}", f"{gain['low']:+.1f} to {gain['high']:+.1f}", "#666666"
            look: dict[str, Any] = {"facecolor": "#eeeeee"}
            if trick == PLAIN:
                words, limits, look = f"{mine[trick]['mean']:.1f}", "", {"facecolor": "white"}
            elif told_apart:
                look = {"facecolor": colormaps["RdBu"](colour(gain["points"]))}
                ink = "white" if abs(gain["points"]) > 0.7 * STRONGEST else "black"
            axis.add_patch(Rectangle((x, y), 1, 1, edgecolor="white", **look))
            axis.text(x + 0.5, y + 0.35, words, color=ink, fontsize=8, ha="center", va="center")
            axis.text(x + 0.5, y + 0.78, limits, color=ink, fontsize=4.5, ha="center", va="center")
    heads = [f"{task}, {regime}" for task, regime in found]
    axis.set_xticks([x + 0.5 for x in range(len(found))], heads, rotation=40, ha="left", fontsize=7)
    axis.set_yticks([y + 0.5 for y in range(len(tricks))], tricks, fontsize=7)
    axis.set(xlim=(0, len(found)), ylim=(len(tricks), 0))
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
