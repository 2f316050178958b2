"""Does a gain grow, stay or vanish with more data and more weights? The language model at 1, 4 and 16 times of both.

``nice python benchmarks/gain_scaling.py`` (about an hour of one core; ``--reduced`` tries it for a few steps). The
text, network and rules are those of ``language_model.py``, whose training takes five times as long. Data: a 256th, a
64th and a 16th of the text, with 84 features; all train for as many steps, which draw each sample sixteen times, four
times and once on average. Weights: 42, 84 and 168 features, which is 1, 4 and 16 times the weights of the blocks, with
all of the text. It writes ``benchmarks/results/gain_scaling.json``, draws the gains over plain training beside it, and
goes on in another session (``kept_runs.py``).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import finetune_report
from corpus import described, load_documentation
from kept_runs import kept_runs
from language_model import FULL, OPTIMIZER, REDUCED, TRICKS, Network, Scale, Shape, fit, load_bytes, scheduled
from quality_report import PLAIN, interval, paired, sign
from rows import written
from tables import RESULTS, grid
from tuned import PARTS, Budget, Contender, Trick, finals_of, measure, measured_on, table

import lightning_tricks as lt
from lightning_tricks.examples.tasks import Split
from lightning_tricks_cli.runs.demo import small_runs

WIDTHS, MIDDLE = (42, 84, 168), 84
CELLS = {  # shares of the text and widths of the network
    "sequences": [(1 / 256, MIDDLE), (1 / 64, MIDDLE), (1 / 16, MIDDLE)],
    "weights": [(1.0, width) for width in WIDTHS],
}
TRENDS = {1: "it rises", -1: "it falls", 0: "no trend"}
WHY = {
    "cosine": "A quarter of the length may choose a wrong rate for it.",
    "cosine, Muon": "It overfits sequences that are drawn sixteen times; its papers draw each once (arXiv 2502.16982).",
    "SAM": "The paper has images; on language models it is for fine-tuning (arXiv 2110.08529).",
}  # of those that are worse
SHORT = FULL._replace(budget=Budget(192, 3, 48))
SOME: dict[str, Trick] = {name: TRICKS[name] for name in (PLAIN, "EMA", "cosine", "cosine, Muon")}
SOME |= {"SAM": Trick(lambda: scheduled("constant", lt.SAMCallback()))}


def load_share(scale: Scale, share: float) -> Split:
    """All of validation and test, and the first sequences of training."""
    found = load_bytes(scale)
    tokens, following = found["train"]
    most = round(share * len(tokens))
    return {**found, "train": (tokens[:most], following[:most])}


def shape_of(scale: Scale, width: int) -> Shape:
    """The network of a width, as reduced as the scale is."""
    return scale.shape._replace(width=width * scale.shape.width // FULL.shape.width // 2 * 2)


def contenders(scale: Scale, share: float, width: int) -> dict[str, Contender]:
    """All of them, with a share of the text and a width of the network."""
    arm = partial(fit, partial(load_share, scale, share), shape_of(scale, width), scale.batch, "cpu")
    return {name: trick.contender(arm) for name, trick in SOME.items()}


def settings_of(scale: Scale) -> dict[str, Any]:
    """What all runs depend on."""
    settings = {"budget": scale.budget._asdict(), "batch": scale.batch, **OPTIMIZER}
    return settings | described(load_documentation(scale.strings))


def result(found: dict[tuple[float, int], dict[str, list[Any]]], scale: Scale) -> dict[str, Any]:
    """The figures of the cells."""
    sizes = {}
    for share, width in found:
        weights = sum(weight.numel() for weight in Network(shape_of(scale, width)).parameters())
        sizes[share, width] = {"sequences": len(load_share(scale, share)["train"][0]), "weights": weights}
    return {
        "benchmark": "gain_scaling",
        "settings": settings_of(scale),
        **{
            part: [
                {"share": share, "width": width, **sizes[share, width], **line}
                for (share, width), each in found.items()
                for line in each[part]
            ]
            for part in PARTS
        },
    }


def gains_of(made: dict[str, Any], name: str, row: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """The gain of each seed in the cell of a row."""
    cell = (row["share"], row["width"])
    finals = finals_of([run for run in made["runs"] if (run["share"], run["width"]) == cell])
    mine = finals[name]
    return {seed: {"gain": 100 * (run["test_loss"] - mine[seed]["test_loss"])} for seed, run in finals[PLAIN].items()}


def trend(made: dict[str, Any], name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """What a gain does from the first row to the last, by the differences of runs with the same seed."""
    change = paired(gains_of(made, name, rows[-1]), gains_of(made, name, rows[0]), "gain", 1)
    return f"{TRENDS[sign(change)]}, {interval(rows[0]['gain'])} and {interval(rows[-1]['gain'])}"


def along(rows: Sequence[dict[str, Any]], size: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each trick, from the smallest size to the largest."""
    mine = sorted((row for row in rows if (row["share"], row["width"]) in CELLS[size]), key=lambda row: row[size])
    return {name: [row for row in mine if row["trick"] == name] for name in SOME if name != PLAIN}


def section(made: dict[str, Any]) -> str:
    """The part of the README: what each gain does with more data and more weights, the picture, the figures."""
    budget, lines, head = made["settings"]["budget"], [], ["", *map(str, CELLS)]
    rows = {size: along(made["rows"], size) for size in CELLS}
    for name in rows["weights"]:
        told = [f"with more {size} {trend(made, name, rows[size][name])}" for size in CELLS]
        lines.append(f"- **{name}**: {'; '.join(told)}.")
    cell = ("share", "width", *CELLS)  # of which all were measured on one machine
    machines = [{key: value for key, value in line.items() if key not in cell} for line in made["machines"]]
    cells = [
        (name, *(", ".join(f"{row[size]:,}: {interval(row['gain'])}" for row in rows[size][name]) for size in CELLS))
        for name in rows["weights"]
    ]
    largest = [row for row in made["rows"] if (row["share"], row["width"]) == (1.0, WIDTHS[-1])]
    times = "; ".join(f"{row['trick']} {row['over_plain']:.1f}" for row in largest if row["trick"] != PLAIN)
    hours = sum(run["seconds"] for run in made["runs"]) / 3600
    worse = dict.fromkeys(row["trick"] for row in made["rows"] if sign(row["gain"]) < 0)
    return "\n\n".join(
        [
            "#### Do gains grow, stay or vanish with more data and more weights?",
            f"With most weights {finetune_report.most(largest, 'hundredths of a nat')}.",
            "![Gains over plain training against data and against weights](results/gain_scaling.svg)",
            f"`python benchmarks/gain_scaling.py`: the language model for {budget['steps']} steps, {budget['seeds']}"
            " seeds, with a 256th, a 64th and a 16th of the text (each sample is drawn sixteen times, four times and"
            " once on average), and with all of the text and 1, 4 and 16 times the weights of the blocks, each at"
            f" learning rates of its own; {hours:.1f} hours in one thread. Times over plain training's: {times}."
            " Hundredths of a nat per byte over AdamW at a constant rate, with 95% intervals, at the smallest and the"
            " largest size; the trend is that of the differences of runs with the same seed.",
            "\n".join(lines),
            f"<details>\n<summary>All figures</summary>\n\n{measured_on(machines)}",
            grid(head, cells),
            *([grid(["worse", "why"], [(name, WHY.get(name, "")) for name in worse])] if worse else []),
            "</details>",
        ]
    )


def draw(path: Path, made: dict[str, Any]) -> None:
    """The gain of each trick, by data and by weights, with its interval."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, size in zip(axes, CELLS, strict=True):
        axis.axhline(0, color="#999999", linewidth=1)
        for place, (name, mine) in enumerate(along(made["rows"], size).items()):
            places = [row[size] * (1 + 0.04 * place) for row in mine]  # beside each other
            gains = [row["gain"] for row in mine]
            spread = [
                [each["points"] - each["low"] for each in gains],
                [each["high"] - each["points"] for each in gains],
            ]
            axis.errorbar(places, [each["points"] for each in gains], spread, label=name, marker="o", ms=4, capsize=2)
        axis.set_yscale("symlog", linthresh=10)
        axis.set(xscale="log", xlabel=f"{size} of training" if size == "sequences" else size)
    axes[0].set_ylabel("gain over plain training (0.01 nats)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8, frameon=False)
    finetune_report.save(figure, path)


def main() -> None:
    """Run, write and print after every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="a few steps, into results/scratch")
    args = parser.parse_args()
    scale, output, kept = (REDUCED, RESULTS / "scratch", None) if args.reduced else (SHORT, RESULTS, RESULTS / "runs")
    folder = RESULTS / "scratch" / f"gain scaling{', reduced' if args.reduced else ''}"
    file = kept and kept / "gain_scaling.json"
    found: dict[tuple[float, int], dict[str, list[Any]]] = {}
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    with small_runs(), kept_runs(folder, file, settings_of(scale)) as runs:  # of one thread
        for share, width in chain(*CELLS.values()):
            cell = runs / f"{share:g} of the text, width {width}"
            found[share, width] = measure(contenders(scale, share, width), scale.budget, cell, metric="loss")
            (output / "gain_scaling.json").write_text(written(made := result(found, scale)))
            print(f"{share:g} of the text, {width} features\n\n{table(found[share, width]['rows'])}\n", flush=True)
    draw(output / "gain_scaling.svg", made)
    if output == RESULTS:
        finetune_report.renew("gain_scaling", section(made))


if __name__ == "__main__":
    main()
