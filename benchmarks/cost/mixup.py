"""Mixing batches beside timm's Mixup: time and memory of a mixed batch, and a whole training step.

A mixed batch costs, besides the network: drawing who is mixed with whom and how much, mixing the inputs, making the
target, and the loss from the logits on and back to them. timm mixes in place, so each contender gets the inputs anew,
before its time begins. ``unmixed`` is the loss alone, with the labels as they are; the floor is that and the traffic of
a mix, one copy of the inputs and half another, since it reads two tensors and writes one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import lightning as L
import torch
import torch.nn.functional as F
from fitted import PLAIN, empty, tiny_fits
from machine import kept_memory
from rows import Row, added_rows, figure, over, row, rows_of, target
from settings import SEED, Settings
from space import memory
from timing import Turn, Work, fits, in_turns, timed
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.core.batches import callback as batches

NAME = "mixup"
PEERS = ("timm",)
ALPHA = 0.2
COPY, UNMIXED, OURS, TIMM = "x.clone()", "unmixed", "lightning_tricks", "timm"
FLOOR = "unmixed, and the traffic of a mix"
CLASSES = 1000
# a callback of ours and the settings of timm that do the same
KINDS: dict[str, tuple[Callable[[], lt.Mixup | lt.CutMix], dict[str, Any]]] = {
    "Mixup": (partial(lt.Mixup, ALPHA), {"mixup_alpha": ALPHA}),
    "Mixup(per_sample)": (partial(lt.Mixup, ALPHA, per_sample=True), {"mixup_alpha": ALPHA, "mode": "elem"}),
    "CutMix": (lt.CutMix, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}),
}
CALLBACKS = {
    PLAIN: empty,
    "Mixup": lambda: [lt.Mixup(ALPHA)],
    "Mixup(per_sample)": lambda: [lt.Mixup(ALPHA, per_sample=True)],
    "HiddenMixup": lambda: [lt.HiddenMixup("net.0", ALPHA)],
    "Mixup(prob=0)": lambda: [lt.Mixup(ALPHA, prob=0.0)],  # the BatchPipeline alone
}
Mixed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def our_mixed(callback: lt.Mixup | lt.CutMix) -> Mixed:
    """The callback's part of ``BatchPipeline``: a batch's random numbers, its work, and what the module gets."""
    numbers = count()

    def mixed(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        number = next(numbers)
        work = batches.BatchContext((x, labels), number, random.Random(f"{SEED} {number}"))
        callback._change(cast(L.Trainer, None), work)  # which mixing does not need
        return work.finished()

    return mixed


def timm_mixed(classes: int, device: str, **settings: Any) -> Mixed:
    from timm.data.mixup import Mixup

    mixup = Mixup(num_classes=classes, label_smoothing=0.0, **settings)
    return lambda x, y: _on(device, mixup(x, y))


def _on(device: str, mixed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return mixed[0], mixed[1].to(device)


def with_loss(mixed: Mixed, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, logits: Tensor) -> Work:
    """Mixing and the loss, forward and back."""

    def work() -> None:
        _, target = mixed(x, y)
        torch.autograd.grad(loss(logits, target), logits)

    return work


def contenders(kind: str, device: str) -> dict[str, tuple[Mixed, Callable[[Tensor, Tensor], Tensor]]]:
    """How each mixes, and its loss."""
    from timm.loss import SoftTargetCrossEntropy

    callback, settings = KINDS[kind]
    return {
        UNMIXED: (lambda *batch: batch, F.cross_entropy),
        OURS: (our_mixed(callback()), F.cross_entropy),
        TIMM: (timm_mixed(CLASSES, device, **settings), SoftTargetCrossEntropy()),
    }


def drawn(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and logits."""
    x = torch.randn(shape, device=device)
    logits = torch.randn(shape[0], CLASSES, device=device, requires_grad=True)
    return x, torch.randint(CLASSES, shape[:1], device=device), logits


def of_batches(kind: str, shape: tuple[int, ...], rounds: int, device: str) -> tuple[list[Row], float | None]:
    """Times of a mixed batch, and ours over timm's; each work has inputs of its own, made anew before its time."""
    x, y, logits = drawn(shape, device)

    def turn(name: str) -> Turn:
        if name == COPY:
            return {COPY: timed(x.clone, device)}
        own = x.clone()
        work = with_loss(*contenders(kind, device)[name], own, y, logits)
        return {f"{name}: inputs": timed(partial(own.copy_, x), device), name: timed(work, device)}

    measured = in_turns({name: partial(turn, name) for name in (COPY, UNMIXED, OURS, TIMM)}, rounds)
    times = measured.times
    copies, unmixed = times.pop(COPY), times[UNMIXED]
    shown = {name: each for name, each in times.items() if not name.endswith(": inputs")}
    shown[FLOOR] = [1.5 * copy + plain for copy, plain in zip(copies, unmixed, strict=True)]
    shape_name = "x".join(map(str, shape))
    ratio = over(times[OURS], times[TIMM]) if TIMM in times else None
    return rows_of(f"{kind}, {shape_name}", measured._replace(times=shown), FLOOR), ratio


def of_targets(kind: str, device: str) -> list[Row]:
    """Memory of a target and its loss, in tensors of float32 with a row for each sample and a column for each class."""
    x, y, logits = drawn((128, 1, 1, 1), device)  # inputs that hardly take any
    found = []
    for name in (OURS, TIMM):
        mixed, loss = contenders(kind, device)[name]
        parts = {"target": partial(mixed, x, y), "target and loss": with_loss(mixed, loss, x, y, logits)}
        for part, work in parts.items():
            work()
            taken, _ = memory(work, device, logits.nbytes)
            found.append(row(f"peak memory, {kind}", f"{name}: {part}", [taken["peak"]], "samples x classes"))
    return found


def run(settings: Settings) -> list[Row]:
    """All figures."""
    import numpy as np

    np.random.seed(SEED)  # which timm draws from
    shapes: tuple[tuple[int, ...], ...] = settings.pick(
        "shapes", ((128, 3, 64, 64), (64, 3, 224, 224)), ((128, 3, 64, 64),), ((8, 3, 8, 8),)
    )
    rounds = settings.pick("rounds", 40, 8, 1)
    found, ratios = [], []
    with kept_memory():
        for kind in KINDS:
            for shape in shapes:
                rows, ratio = of_batches(kind, shape, rounds, settings.device)
                found += rows
                ratios += [] if ratio is None else [row(f"{OURS} over {TIMM}", rows[0].case, [ratio], "ratio")]
            found += of_targets(kind, settings.device)
    steps = tiny_fits(CALLBACKS, settings.pick("steps", 300, 120, 60), settings.device)
    measured = in_turns(fits(steps), settings.pick("fits", 10, 2, 1), warm_up=0)
    found += [*ratios, *rows_of("step, tiny", measured, PLAIN), *added_rows("added to a step, tiny", measured, PLAIN)]
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """No slower than timm, no dense targets, and little Python."""
    ratios = [each for each in rows if each.case == f"{OURS} over {TIMM}"]
    found = [target(f"{each.what}: over timm", each.median, "<=", 1.0) for each in ratios]
    for kind in KINDS:
        space = figure(rows, f"peak memory, {kind}", f"{OURS}: target")
        found.append(target(f"{kind}: target over samples x classes", space, "<=", 0.1))
    step = figure(rows, "added to a step, tiny", "Mixup")
    return [*found, target("us added to a tiny step by Mixup", step, "<=", 250)]
