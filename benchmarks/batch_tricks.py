"""What mixing and filtering batches cost: beside timm's Mixup, in a whole training step, in memory.

Run ``python benchmarks/batch_tricks.py`` (about three minutes; ``--device cuda`` on a GPU); it prints tables and writes
``benchmarks/results/batch_tricks.json`` (``batch_tricks_cuda.json``). In every round all contenders take their turn,
shuffled, in one process. Times are medians over the rounds, ratios medians of the ratios within a round: the load of a
machine drifts.

A mixed batch costs, besides the network: drawing who is mixed with whom and how much, mixing the inputs, making the
target, and the loss from the logits on and back to them. timm mixes in place, so each contender gets the inputs anew,
before its time begins. ``unmixed`` is the loss alone, with the labels as they are. Memory that is freed is kept for
what comes next, as on a GPU: whether large tensors are made of fresh pages depends on what was there before, and takes
up to five times as long as copying them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import random
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from ema import NETWORKS, Net, aim
from lightning.pytorch.callbacks import Callback
from machine import Work, fit, in_turns, machine, memory, over, prepare, spread, table
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.core import batches

RESULTS = Path(__file__).parent / "results"
PEERS = ("timm",)
SEED, ALPHA = 0, 0.2
CLONE, UNMIXED, OURS, TIMM = "x.clone()", "unmixed", "lightning_tricks", "timm"
PLAIN = "plain"
SHAPES = ((128, 3, 64, 64), (64, 3, 224, 224))
CLASSES, MANY_CLASSES = 1000, 21841
MMAP_MAX, TRIM_THRESHOLD = -4, -1  # of malloc.h
# a callback of ours and the settings of timm that do the same
KINDS: dict[str, tuple[Callable[[], lt.Mixup | lt.CutMix], dict[str, Any]]] = {
    "Mixup": (partial(lt.Mixup, ALPHA), {"mixup_alpha": ALPHA}),
    "Mixup(per_sample)": (partial(lt.Mixup, ALPHA, per_sample=True), {"mixup_alpha": ALPHA, "mode": "elem"}),
    "CutMix": (lt.CutMix, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}),
}


# -- a mixed batch without the network: inputs, labels and logits are given, what is timed gives the logits' gradient --


Mixed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def our_mixed(callback: lt.Mixup | lt.CutMix) -> Mixed:
    """The callback's part of ``Tap``: a batch's random numbers, its work, and what the module gets."""
    numbers = count()

    def mixed(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        number = next(numbers)
        work = batches.Work((x, labels), number, random.Random(f"{SEED} {number}"))
        callback._change(cast(pl.Trainer, None), work)  # which mixing does not need
        return work.finished()

    return mixed


def timm_mixed(classes: int, **settings: Any) -> Mixed:
    from timm.data.mixup import Mixup

    return Mixup(num_classes=classes, label_smoothing=0.0, **settings)


def with_loss(mixed: Mixed, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, logits: Tensor) -> Work:
    """Mixing and the loss, forward and back."""

    def work() -> None:
        _, target = mixed(x, y)
        torch.autograd.grad(loss(logits, target), logits)

    return work


def contenders(kind: str, classes: int) -> dict[str, tuple[Mixed, Callable[[Tensor, Tensor], Tensor]]]:
    """How each of the two mixes, and its loss."""
    from timm.loss import SoftTargetCrossEntropy

    callback, settings = KINDS[kind]
    return {
        OURS: (our_mixed(callback()), F.cross_entropy),
        TIMM: (timm_mixed(classes, **settings), SoftTargetCrossEntropy()),
    }


def drawn(shape: tuple[int, ...], classes: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and logits."""
    x = torch.randn(shape, device=device)
    logits = torch.randn(shape[0], classes, device=device, requires_grad=True)
    return x, torch.randint(classes, shape[:1], device=device), logits


def of_batches(kind: str, shape: tuple[int, ...], rounds: int, device: str) -> dict[str, dict[str, float]]:
    """Times of a mixed batch, and their ratio to timm's in the round; each work has inputs of its own."""
    x, y, logits = drawn(shape, CLASSES, device)
    inputs = {name: x.clone() for name in (CLONE, UNMIXED, OURS, TIMM)}
    works: dict[str, Work] = {
        CLONE: inputs[CLONE].clone,
        UNMIXED: with_loss(lambda *batch: batch, F.cross_entropy, inputs[UNMIXED], y, logits),
    }
    works |= {name: with_loss(*each, inputs[name], y, logits) for name, each in contenders(kind, CLASSES).items()}
    turns = [{f"{name}: inputs": partial(inputs[name].copy_, x), name: work} for name, work in works.items()]
    times = in_turns(turns, rounds, TIMM, device)
    rows = {name: times[name] for name in works}
    for row in rows.values():
        row["over_timm"] = row.pop("over_floor")
    return rows


def of_targets(kind: str, classes: int, device: str) -> dict[str, dict[str, float]]:
    """Memory of targets and loss, in tensors of float32 with a row for each sample and a column for each class."""
    shape = (SHAPES[0][0], 1, 1, 1)  # of inputs that hardly take any
    rows = {}
    for name, (mixed, loss) in contenders(kind, classes).items():
        x, y, logits = drawn(shape, classes, device)
        works = {"target": partial(mixed, x, y), "with_loss": with_loss(mixed, loss, x, y, logits)}
        works["target"](), works["with_loss"]()
        space = {part: memory(work, device, logits.nbytes)[0] for part, work in works.items()}
        rows[name] = {f"{part}_{when}": each[when] for part, each in space.items() for when in ("peak", "kept")}
    return rows


# -- a whole training step under a stock Trainer, the batch lying ready ------------------------------------------------


CALLBACKS: dict[str, Callable[[], Callback]] = {
    PLAIN: Callback,
    "Mixup": partial(lt.Mixup, ALPHA),
    "Mixup(per_sample)": partial(lt.Mixup, ALPHA, per_sample=True),
    "Mixup(prob=0)": partial(lt.Mixup, ALPHA, prob=0.0),  # the Tap alone
}
STEPS = 300  # of a fit with the tiny network
FILTERS: dict[str, Callable[[], Callback]] = {
    PLAIN: Callback,
    "prune": partial(lt.HardExampleFilter, 0.5),
    "prune, score_scale": partial(lt.HardExampleFilter, 0.5, score_scale=0.5),
    "loss": partial(lt.HardExampleFilter, 0.5, mode="loss"),
}
IMAGES = {"cpu": (32, 3, 64, 64), "cuda": (128, 3, 224, 224)}  # for the filters
FILTER_STEPS = {"cpu": 7, "cuda": 30}


def tiny_step(callback: Callback, device: str) -> float:
    """Microseconds of a step of a network so small that what counts is what surrounds it."""
    torch.manual_seed(SEED)
    network, shape = NETWORKS["tiny"]
    batch = torch.randn(shape, device=device), torch.randint(4, shape[:1], device=device)
    return fit(Net(network()), batch, STEPS, callback, device)


def filtered_step(callback: Callback, device: str) -> float:
    """Microseconds of a step of a ResNet-18; every step is a lap, so that the fits are short and change often."""
    import timm

    torch.manual_seed(SEED)
    x, y, _ = drawn(IMAGES[device], 10, device)
    network = timm.create_model("resnet18", num_classes=10)
    return fit(Net(network), (x, y), FILTER_STEPS[device], callback, device, every=1)


def of_steps(
    step: Callable[[Callback, str], float], callbacks: dict[str, Callable[[], Callback]], fits: int, device: str
) -> dict[str, dict[str, float]]:
    """Step times with each callback, their ratio to the plain one of the round, and what they add to it."""
    times: dict[str, list[float]] = {name: [] for name in callbacks}
    shuffled = random.Random(SEED)
    for _ in range(1 + fits):  # the first is not counted
        for name in shuffled.sample(list(callbacks), len(callbacks)):
            times[name].append(step(callbacks[name](), device))
    times = {name: row[1:] for name, row in times.items()}
    rows = {}
    for name, row in times.items():
        added = spread([each - plain for each, plain in zip(row, times[PLAIN], strict=True)])
        rows[name] = {**spread(row), "over_plain": over(row, times[PLAIN]), "added_median_us": added["median_us"]}
    return rows


def keep_memory() -> None:
    """Have malloc neither map large blocks one by one nor give memory back; only glibc can be asked to."""
    if platform.libc_ver()[0] == "glibc":
        malloc_options = ctypes.CDLL(None).mallopt
        malloc_options(MMAP_MAX, 0)
        malloc_options(TRIM_THRESHOLD, 2**31 - 1)


# -- together ----------------------------------------------------------------------------------------------------------


def targets(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What came out, what was aimed at, and whether it was reached."""
    found = {}
    for name, row in result["batches"].items():
        found[f"{name}: ours / timm"] = aim(row[OURS]["over_timm"], "<=", 1.0)
    for name, row in result["memory"].items():
        found[f"{name}: our target's B x C"] = aim(row[OURS]["target_peak"], "<=", 0.1)
    scaled = result["filter"]["prune, score_scale"]
    found["ResNet-18: prune, score_scale=.5 / plain"] = aim(scaled["over_plain"], "<=", 0.8)
    return found


def measure(rounds: int, fits: int, device: str) -> dict[str, Any]:
    """All figures, printed as they come."""
    import numpy as np

    torch.manual_seed(SEED)
    np.random.seed(SEED)  # which timm draws from
    mixed, space = {}, {}
    for kind in KINDS:
        for shape in SHAPES:
            name = f"{kind}, {'x'.join(map(str, shape))}"
            mixed[name] = of_batches(kind, shape, rounds, device)
            table(f"{name}, {CLASSES} classes", mixed[name])
    for kind in KINDS:
        for classes in (CLASSES, MANY_CLASSES):
            name = f"{kind}, {classes} classes"
            space[name] = of_targets(kind, classes, device)
            table(f"{name}: memory in B x C", space[name])
    steps = of_steps(tiny_step, CALLBACKS, fits, device)
    table("training step, tiny", steps)
    filtered = of_steps(filtered_step, FILTERS, fits, device)
    table("training step, ResNet-18, keep=.5", filtered)

    place = torch.cuda.get_device_name() if device == "cuda" else device
    settings = {"device": place, "threads": torch.get_num_threads(), "seed": SEED, "rounds": rounds, "fits": fits}
    settings["filter_batch"] = list(IMAGES[device])
    result = {"machine": machine(*PEERS), "settings": settings}
    result |= {"batches": mixed, "memory": space, "steps": steps, "filter": filtered}
    result["targets"] = targets(result)
    table("targets", result["targets"])
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--fits", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="where the figures go")
    args = parser.parse_args()
    prepare(PEERS, args.threads)
    keep_memory()
    rounds, fits = (2, 1) if args.quick else (args.rounds, args.fits)
    output = args.output or RESULTS / ("batch_tricks.json" if args.device == "cpu" else "batch_tricks_cuda.json")
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(measure(rounds, fits, args.device), indent=1) + "\n")


if __name__ == "__main__":
    main()
