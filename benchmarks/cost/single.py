"""Tricks that teach, look or weigh, each alone: what it adds to a step of a tiny network, and a teacher to a real one.

The floor of a teacher is ``one more forward pass`` of the same network without gradients, by the module itself. What
needs accumulation, embeddings or samples with numbers has a plain fit of its own with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from fitted import PLAIN, QUIET, Batch, Callbacks, Laps, Net, architecture, drawn, empty, fit, tiny
from lightning.pytorch.callbacks import Callback
from rows import Row, added_rows, figure, rows_of, target
from settings import SEED, Settings
from timing import Timed, fits, in_turns
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt

NAME = "single"
PEERS = ("timm",)
TINY, REAL = "step, tiny", "step, ViT-tiny"
FORWARD, MEAN, MODULE, ASKED = "one more forward pass", "Distill(Teacher())", "Distill(module)", "self.teacher(x)"
STATS = "GradientStats()"


class Twice(Net):
    """Computes once more without gradients, as a teacher does."""

    def training_step(self, batch: Batch) -> Tensor:
        """The loss of a distillation, written by hand."""
        with torch.no_grad():
            said = self.net(batch[0])
        return distilled(self.net(batch[0]), said, batch[1])


class Asks(Net):
    """Calls its teacher."""

    def training_step(self, batch: Batch) -> Tensor:
        """The same with the teacher's answer."""
        return distilled(self(batch[0]), self.teacher(batch[0]), batch[1])

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.net(x)


def distilled(mine: Tensor, said: Tensor, labels: Tensor) -> Tensor:
    """What ``Distill`` adds up."""
    return nn.functional.cross_entropy(mine, labels) + lt.functional.distillation_loss(mine, said)


Made = tuple[type[Net], Callable[[Callable[[], nn.Module]], list[Callback]]]
TEACHERS: dict[str, Made] = {
    PLAIN: (Net, lambda network: []),
    FORWARD: (Twice, lambda network: []),
    MEAN: (Net, lambda network: [lt.Distill(lt.Teacher())]),
    MODULE: (Net, lambda network: [lt.Distill(network())]),
    ASKED: (Asks, lambda network: [lt.Teacher()]),
}
LOOKING: dict[str, Made] = {
    STATS: (Net, lambda network: [lt.GradientStats()]),
    "GradientStats(every_n_steps=1)": (Net, lambda network: [lt.GradientStats(every_n_steps=1)]),
}


def step(network: Callable[[], nn.Module], made: Made, batch: Batch, steps: int, lap: int, **settings: Any) -> float:
    """Microseconds of a step."""
    torch.manual_seed(SEED)
    kind, callbacks = made
    return fit(kind(network()), batch, steps, callbacks(network), every=lap, **settings)


def words() -> nn.Module:
    """A network of sequences of 16 tokens."""
    return nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(256, 4))


def numbered(callbacks: Callbacks, steps: int) -> float:
    """Microseconds of a step with a loader that numbers its samples."""
    torch.manual_seed(SEED)
    laps, samples = Laps(20), drawn((8 * steps, 32), 4, "cpu")
    trainer = L.Trainer(accelerator="cpu", callbacks=[laps, *callbacks()], **QUIET)
    trainer.fit(Net(tiny()), DataLoader(TensorDataset(*samples), 8))
    return laps.step()


def run(settings: Settings) -> list[Row]:
    """The tiny network with each, and the real one with teachers."""
    steps, rounds = settings.pick("steps", 400, 200, 60), settings.pick("fits", 8, 2, 1)
    small = drawn((32, 32), 4, settings.device)
    tokens = torch.randint(64, (32, 16), device=settings.device), small[1]
    accumulated = partial(step, tiny, batch=small, steps=steps, lap=20, accumulate_grad_batches=4)
    cases: dict[str, dict[str, Callable[[], float]]] = {
        TINY: {name: partial(step, tiny, made, small, steps, 20) for name, made in {**TEACHERS, **LOOKING}.items()},
        "step, accumulation of 4": {
            PLAIN: partial(accumulated, made=TEACHERS[PLAIN]),
            "TokenMean()": partial(accumulated, made=(Net, lambda network: [lt.TokenMean()])),
        },
        "step, embeddings": {
            PLAIN: partial(step, words, TEACHERS[PLAIN], tokens, steps, 20),
            "NEFTune()": partial(step, words, (Net, lambda network: [lt.NEFTune()]), tokens, steps, 20),
        },
        "step, numbered samples": {
            PLAIN: partial(numbered, empty, steps),
            "LabelErrors()": partial(numbered, lambda: [lt.LabelErrors(None)], steps),
        },
    }
    found: list[Row] = []
    for case, contenders in cases.items():
        measured = in_turns(fits(contenders), rounds, warm_up=0)
        found += rows_of(case, measured, PLAIN) + added_rows(f"added to a {case}", measured, PLAIN)
    if name := settings.pick("network", "vit_tiny_patch16_224", "vit_tiny_patch16_224", ""):
        batch = drawn(settings.pick("batch", (4, 3, 224, 224), (2, 3, 224, 224), ()), 4, settings.device)
        real: dict[str, Timed] = {
            key: partial(step, partial(architecture, name), made, batch, 5, 1) for key, made in TEACHERS.items()
        }
        measured = in_turns(fits(real), settings.pick("fits of the real one", 5, 1, 1), warm_up=0)
        found += rows_of(REAL, measured, FORWARD, "ms")
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Microseconds of what looks, and a teacher over a forward pass."""
    found = [target(f"us added to a tiny step by {STATS}", figure(rows, f"added to a {TINY}", STATS), "<=", 60)]
    if any(each.case == REAL for each in rows):
        found += [
            target(f"a real step with {name}, over {FORWARD}", figure(rows, REAL, name, "over_floor"), "<=", 1.1)
            for name in (MEAN, MODULE, ASKED)
        ]
    return found
