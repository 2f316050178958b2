"""Does a gain grow, stay or vanish with more data and more weights? The language model at 1, 4 and 16 times of both.

``nice python benchmarks/gain_scaling.py`` (an hour and a half of one core; ``--reduced`` tries it for a few steps). The
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
from operator import itemgetter
from pathlib import Path
from typing import Any

import finetune_report
from corpus import described, load_documentation
from kept_runs import kept_runs
from language_model import FULL, OPTIMIZER, REDUCED, TRICKS, Network, Scale, Shape, fit, load_bytes, scheduled
from quality_report import PLAIN, interval, paired, sign
from rows import written
from tables import RESULTS, grid
from tuned import (
    PARTS,
    Budget,
    Contender,
    Trick,
    at_rates,
    best_rates,
    best_rows,
    cell,
    finals_of,
    measure,
    measured_on,
    own,
    table,
)

import lightning_tricks as lt
from lightning_tricks.examples.tasks import Split
from lightning_tricks_cli.runs.demo import small_runs

WIDTHS, MIDDLE = (42, 84, 168), 84
CELLS = {  # shares of the text and widths of the network
    "sequences": [(1 / 256, MIDDLE), (1 / 64, MIDDLE), (1 / 16, MIDDLE)],
    "weights": [(1.0, width) for width in WIDTHS],
}
TRENDS = {1: "rises", -1: "falls", 0: "shows no trend"}
WHY = {
    "cosine": "In so short a training a rate that stays high until shortly before the end is better: flat_cos.",
    "SAM": "The paper has images; on language models it is for fine-tuning (arXiv 2110.08529).",
}  # of those that are worse
SHORT = FULL._replace(budget=Budget(192, 3, 48))
SOME: dict[str, Trick] = {
    **at_rates(PLAIN, TRICKS[PLAIN], 3.0),
    **at_rates("EMA", TRICKS["EMA"], 3.0),
    **at_rates("flat_cos", Trick(lambda: scheduled("flat_cos")), 3.0),
    **at_rates("cosine", TRICKS["cosine"], 0.3, 0.1),
    **at_rates("cosine, Muon", TRICKS["cosine, Muon"], 0.3, 0.1, 0.03),
    **at_rates("SAM", Trick(lambda: scheduled("constant", lt.SAMCallback())), 3.0, 10.0),
}


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


def gains_of(made: dict[str, Any], row: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """The gain of each seed in the cell of a row."""
    runs = [run for run in made["runs"] if cell(run) == cell(row)]
    finals = finals_of(runs)
    mine, plain = finals[row["trick"]], finals[best_rates(runs)[PLAIN]]
    return {seed: {"gain": 100 * (run["test_loss"] - mine[seed]["test_loss"])} for seed, run in plain.items()}


def change(made: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By how much a gain differs between the first row and the last, by the differences of runs with the same seed."""
    return paired(gains_of(made, rows[-1]), gains_of(made, rows[0]), "gain", 1)


def answer(made: dict[str, Any], size: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Which differences from plain training rise with a size, fall, and do neither, and which are gains at its end."""
    kinds: dict[str, list[str]] = {
        words: [] for words in (*TRENDS.values(), "better than plain training at the largest size")
    }
    for name, mine in rows.items():
        if name != PLAIN:
            kinds[TRENDS[sign(change(made, mine))]].append(f"*{name}*")
            kinds["better than plain training at the largest size"] += [f"*{name}*"] * (mine[-1]["gain"]["low"] > 0)
    told = [f"{words}: {', '.join(names) or 'none'}" for words, names in kinds.items()]
    return f"- With more **{size}** the difference from plain training {'; '.join(told)}."


def along(made: dict[str, Any], size: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each trick at the best of its rates, from the smallest size to the largest."""
    mine = sorted((row for row in best_rows(made) if (row["share"], row["width"]) in CELLS[size]), key=itemgetter(size))
    return {name: [row for row in mine if own(row["trick"]) == name] for name in dict.fromkeys(map(own, SOME))}


def section(made: dict[str, Any]) -> str:
    """The part of the README: what each gain does with more data and more weights, the picture, the figures."""
    budget, lines, head = made["settings"]["budget"], [], ["", *map(str, CELLS)]
    rows = {size: along(made, size) for size in CELLS}
    names = [name for name in rows["weights"] if name != PLAIN]
    for name in names:
        ends = ((size, *(interval(rows[size][name][place]["gain"]) for place in (0, -1))) for size in CELLS)
        told = [f"with more {size} from {first} to {last}" for size, first, last in ends]
        lines.append(f"- **{name}**: {'; '.join(told)}.")
    where = ("share", "width", *CELLS)  # of which all were measured on one machine
    machines = [{key: value for key, value in line.items() if key not in where} for line in made["machines"]]
    cells = [
        (name, *(", ".join(f"{row[size]:,}: {interval(row['gain'])}" for row in rows[size][name]) for size in CELLS))
        for name in names
    ]
    largest = {name: of[-1] for name, of in rows["weights"].items()}
    times = "; ".join(f"{name} {largest[name]['over_plain']:.1f}" for name in names)
    hours = sum(run["seconds"] for run in made["runs"]) / 3600
    worse = dict.fromkeys(own(row["trick"]) for row in best_rows(made) if sign(row["gain"]) < 0)
    return "\n\n".join(
        [
            "#### Do gains grow, stay or vanish with more data and more weights?",
            "\n".join(answer(made, size, rows[size]) for size in CELLS),
            "![Gains over plain training against data and against weights](results/gain_scaling.svg)",
            f"`python benchmarks/gain_scaling.py`: the language model for {budget['steps']} steps, {budget['seeds']}"
            " seeds, with a 256th, a 64th and a 16th of the text (each sample is drawn sixteen times, four times and"
            " once on average), and with all of the text and 1, 4 and 16 times the weights of the blocks, each at the"
            f" best of its learning rates, by validation; {hours:.1f} hours in one thread. Times over plain training's:"
            f" {times}. Hundredths of a nat per byte over AdamW at the best constant rate, with 95% intervals, at the"
            " smallest and the largest size; what grows and shrinks is told by the differences of runs with the same"
            " seed between these two.",
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
        for place, (name, mine) in enumerate(along(made, size).items()):
            if name == PLAIN:
                continue
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
            here = runs / f"{share:g} of the text, width {width}"
            found[share, width] = measure(contenders(scale, share, width), scale.budget, here, metric="loss")
            (output / "gain_scaling.json").write_text(written(made := result(found, scale)))
            print(f"{share:g} of the text, {width} features\n\n{table(found[share, width]['rows'])}\n", flush=True)
    draw(output / "gain_scaling.svg", made)
    if output == RESULTS:
        finetune_report.renew("gain_scaling", section(made))


if __name__ == "__main__":
    main()
