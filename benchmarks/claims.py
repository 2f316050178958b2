"""What papers claim of tricks that are worse than plain training in ``quality.json``, tried as the papers have it.

``nice python benchmarks/claims.py`` (an hour of one core; interrupted, it goes on where it was). A row that is
worse may tell of our settings, and not of the trick. So where the paper claims a gain on tasks of that kind, the trick
is run in the paper's configuration, in the same task and regime, beside plain training in that configuration: both
tuned by ``quality.py``'s rules, with its seeds. ``TRIALS`` has these configurations; ``OTHERWISE`` says of all other
rows that are worse why they contradict no paper. It writes ``benchmarks/results/claims.json`` and a part of
``benchmarks/README.md``.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import Callback
from machine import machine
from quality import CELLS, PICTURES, TASKS, Recipe, Scale, Trick, measure
from quality_report import SHIFTS, SWEEP, collapsed, interval, machines, row, sign
from rows import written
from tables import README, RESULTS, grid, placed

import lightning_tricks as lt

FILE, SCRATCH = RESULTS / "claims.json", RESULTS / "scratch" / "claims"
BEGIN, END = "<!-- claims: written by benchmarks/claims.py -->", "<!-- end of claims -->"
ALL = tuple(TASKS)


class Trial(NamedTuple):
    """A gain that a paper claims, and its configuration."""

    paper: str
    claim: str
    tasks: tuple[str, ...]  # those of ours that are of the kind that it speaks of
    configuration: str  # the paper's, or that of its authors' program, as it is run here
    recipe: Callable[[], Recipe]
    lr: float  # where tuning begins
    base: str  # training without the trick in the same configuration, of BASES


def cosine(*, weight_decay: float | None = None, optimizer: str | None = None, epochs: float = 1.0) -> Recipe:
    """A warm-up of 5% and a cosine to 0."""
    schedule = lt.LRSchedule("cosine", warmup=0.05)
    return Recipe((schedule,), weight_decay=weight_decay, optimizer=optimizer, epochs=epochs)


def beside(*tricks: Callback, epochs: float = 4.0, weighted: bool = False) -> Recipe:
    """Tricks with a cosine, for four times the epochs."""
    return Recipe((*tricks, lt.LRSchedule("cosine", warmup=0.05)), epochs=epochs, weighted=weighted)


BASES = {
    "a constant rate": Trick(Recipe, lr=0.1),
    "a cosine": Trick(cosine, lr=0.1),
    "a cosine, four times the epochs": Trick(lambda: cosine(epochs=4.0), lr=0.1),
    "a cosine, eight times the epochs": Trick(lambda: cosine(epochs=8.0), lr=0.1),
    "AdamW, a cosine, weight decay 0.1": Trick(lambda: cosine(optimizer="adamw", weight_decay=0.1), lr=0.01),
}
TRIALS = {
    "SAM": Trial(
        "arXiv 2010.01412",
        "On images better than SGD for twice the epochs",
        PICTURES,
        "SGD, a cosine, four times our epochs",
        lambda: Recipe((lt.LRSchedule("cosine", warmup=0.05),), lt.SAM(0.05), epochs=4.0),
        lr=0.1,
        base="a cosine, eight times the epochs",
    ),
    "one_cycle": Trial(
        "arXiv 1708.07120",
        "On images as accurate in fewer epochs, more so with few samples",
        PICTURES,
        "The maximum is tuned, momentum goes from 0.95 to 0.85 and back",
        lambda: Recipe((lt.LRSchedule("one_cycle", momentum=(0.85, 0.95)),)),
        lr=0.1,
        base="a constant rate",
    ),
    "Mixup": Trial(
        "arXiv 1710.09412",
        "More accurate on images, also with wrong labels",
        PICTURES,
        "alpha=1, SGD, a cosine, four times our epochs",
        lambda: beside(lt.Mixup(1.0)),
        lr=0.1,
        base="a cosine, four times the epochs",
    ),
    "CutMix": Trial(
        "arXiv 1905.04899",
        "More accurate on images",
        PICTURES,
        "alpha=1, prob=0.5, SGD, a cosine, four times our epochs",
        lambda: beside(lt.CutMix(1.0, prob=0.5)),
        lr=0.1,
        base="a cosine, four times the epochs",
    ),
    "HardExampleFilter": Trial(
        "arXiv 1910.00762",
        "On images as accurate in less time",
        PICTURES,
        "The hardest third of the samples, which the paper draws by their losses, SGD, a cosine, four times our epochs",
        lambda: beside(lt.HardExampleFilter(keep=1 / 3)),
        lr=0.1,
        base="a cosine, four times the epochs",
    ),
    "ProgressiveResizing, 1.5 times the epochs": Trial(
        "Howard, fast.ai's DAWNBench entry, 2018",
        "On images as accurate in less time",
        ("textures",),
        "SGD, a cosine, six times our epochs",
        lambda: beside(lt.ProgressiveResizing(multiple_of=8), epochs=6.0),
        lr=0.1,
        base="a cosine, four times the epochs",
    ),
    "class weights": Trial(
        "arXiv 1901.05555",
        "On images with a long tail more accurate",
        PICTURES,
        "Weights of one over the number of samples (its beta near 1), SGD, a cosine, four times our epochs",
        lambda: beside(weighted=True),
        lr=0.1,
        base="a cosine, four times the epochs",
    ),
    "ScheduleFree": Trial(
        "arXiv 2405.15682",
        "At least as good as a tuned schedule that falls",
        PICTURES,
        "Its SGD, which the paper has for images, 5% of warm-up",
        lambda: Recipe((lt.ScheduleFree(),), optimizer="schedulefree_sgd", settings={"warmup_steps": 11}),
        lr=1.0,
        base="a cosine",
    ),
    "Lion": Trial(
        "arXiv 2302.06675",
        "Better than AdamW on images and language models, in large batches most",
        ALL,
        "A cosine, weight decay 1; but batches as ours",
        lambda: cosine(optimizer="lion", weight_decay=1.0),
        lr=0.001,
        base="AdamW, a cosine, weight decay 0.1",
    ),
    "Muon": Trial(
        "arXiv 2502.16982; Jordan, https://kellerjordan.github.io/posts/muon",
        "The loss of AdamW in half of the compute (language models), records of speed (images)",
        ALL,
        "A cosine, weight decay 0.1, one learning rate",
        lambda: cosine(optimizer="muon", weight_decay=0.1),
        lr=0.01,
        base="AdamW, a cosine, weight decay 0.1",
    ),
}
OF = {"Muon, both rates": "Muon"}  # tricks whose trial is that of another one
OTHERWISE = {
    "plain, half the epochs": "What stopping early does; no paper's.",
    "plain, twice the epochs": "What longer training does; no paper's.",
    "AdamW, both rates": "A control of ours.",
    "SAM": "The paper has images; on language models it is for fine-tuning (arXiv 2110.08529).",
    "SAM, rho 0.3": "A radius of ours; the paper's is 0.05.",
    "SAM, half the epochs": "For equal compute; the paper gives plain training twice the epochs instead.",
    "EMA + flat_cos": "A combination of ours.",
    "SAM + EMA + flat_cos": "A combination of ours.",
    "label smoothing 0.1": "It gains accuracy; the loss of a language model it makes higher (arXiv 1706.03762).",
    "AutoClip": "The paper separates the sources of audio by recurrent networks (arXiv 2007.14469).",
    "AdaptiveClip": "It makes ResNets without normalization train in large batches (arXiv 2102.06171).",
    "HardExampleFilter": "The paper has images.",
    'HardExampleFilter, mode="loss"': "The paper detects objects: most regions are background (arXiv 1604.03540).",
    "LayerFreezing": "It saves time, and costs some accuracy (arXiv 1706.04983).",
    "rounded to int4": "Rounding saves memory.",
    "stochastic depth 0.2": "It is for residual networks of a hundred layers (arXiv 1603.09382); ours has two blocks.",
    "SequenceLengthWarmup": "It trains stably in fewer tokens (arXiv 2108.06084), not better in as many steps.",
}


def training(regime: str) -> str:
    """The regime of the training data: shifted test data are seen by the models of the clean one."""
    return "clean" if regime in SHIFTS else regime


def worse(quality: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that are worse than plain training."""
    return [each for each in quality["rows"] if sign(each["gain"]) < 0]


def wanted(quality: dict[str, Any]) -> dict[tuple[str, str], list[str]]:
    """The trials of each task and regime in which a row contradicts the paper."""
    found: dict[tuple[str, str], list[str]] = {cell: [] for cell in CELLS}
    for each in worse(quality):
        name = OF.get(each["trick"], each["trick"])
        cell = each["task"], training(each["regime"])
        if name in TRIALS and each["task"] in TRIALS[name].tasks and name not in found[cell]:
            found[cell].append(name)
    return {cell: names for cell, names in found.items() if names}


def trial(task: str, regime: str, names: Sequence[str], scale: Scale) -> dict[str, list[Any]]:
    """The sweeps and runs of some trials in a task and regime."""
    tricks = {name: Trick(TRIALS[name].recipe, lr=TRIALS[name].lr) for name in names}
    tricks |= {TRIALS[name].base: BASES[TRIALS[name].base] for name in names}
    return measure(task, regime, scale, SCRATCH, tricks)


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for every trial in every column, with its gain over plain training in the same configuration."""
    finals: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        if run["part"] != SWEEP:
            finals.setdefault((run["task"], run["regime"], run["trick"]), {})[run["seed"]] = run
    return [
        row(task, regime if part == "test" else part, part, name, mine, finals[task, regime, TRIALS[name].base])
        for (task, regime, name), mine in finals.items()
        for part in ("test", *SHIFTS)
        if name in TRIALS and f"{part}_ece" in next(iter(mine.values()))
    ]


def result(found: Sequence[dict[str, list[Any]]], scale: Scale) -> dict[str, Any]:
    """The figures of the trials, with what the papers claim."""
    sweep, runs = ([line for cell in found for line in cell[part]] for part in ("sweep", "runs"))
    described = ("paper", "claim", "tasks", "configuration", "base")
    return {
        "benchmark": "claims",
        "machine": machine("lightning-tricks", "scikit-learn", "scikit-image", "timm", "schedulefree"),
        "settings": scale._asdict(),
        "trials": [{"trick": name} | {key: getattr(each, key) for key in described} for name, each in TRIALS.items()],
        "otherwise": OTHERWISE,
        "sweep": sweep,
        "rows": rows(runs),
        "runs": runs,
    }


def section(result: dict[str, Any], quality: dict[str, Any]) -> str:
    """The part of the README: the trials, beside the rows that contradict the papers, and the other tricks."""
    found = {(each["trick"], each["task"], each["regime"]): each["gain"] for each in result["rows"]}
    lines, signs = [], []
    for each in worse(quality):
        gain = found.get((OF.get(each["trick"], each["trick"]), each["task"], each["regime"]))
        if gain is not None:
            signs.append(sign(gain))
            lines.append((each["trick"], f"{each['task']}, {each['regime']}", interval(each["gain"]), interval(gain)))
    described = ("trick", "paper", "claim", "configuration", "base")
    trials = [[each[key] for key in described] for each in result["trials"]]
    return "\n\n".join(
        [
            f"{len(lines)} rows that are worse contradict a paper. In its configuration {signs.count(1)} of them are"
            f" better than plain training, {signs.count(0)} are inconclusive, and {signs.count(-1)} are worse.",
            f"<details>\n<summary>Claims and figures ({machines(result)})</summary>",
            grid(["trick", "paper", "what it claims", "its configuration here", "beside training with"], trials),
            "Points over plain training in our configuration, and in that of the paper, as above:",
            grid(["trick", "setting", "ours", "the paper's"], lines),
            collapsed(result["runs"]),
            "Rows of the following tricks that are worse contradict no paper:",
            grid(["trick", "why"], [*result["otherwise"].items()]),
            "</details>",
        ]
    )


def renew(result: dict[str, Any], quality: dict[str, Any]) -> None:
    """Write the part of the README between its marks."""
    README.write_text(placed(README.read_text(), BEGIN, section(result, quality), END))


def main() -> None:
    """Run the trials that the committed rows ask for, write after every cell, and renew the README."""
    quality = json.loads((RESULTS / "quality.json").read_text())
    found, scale = [], Scale()
    gc.freeze()  # what is imported: ``compare`` collects garbage before every run
    for (task, regime), names in wanted(quality).items():
        found.append(trial(task, regime, names, scale))
        FILE.write_text(written(made := result(found, scale)))
    renew(made, quality)
    shutil.rmtree(SCRATCH)


if __name__ == "__main__":
    main()
