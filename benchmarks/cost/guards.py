"""What the guards and the clipping cost in a step, beside one pass of ``clip_grad_norm_`` and timm's clipping.

Inside a fit, all hooks that a callback has in a step are called in a row, with gradients and Adam's state as they are
then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from fitted import QUIET, AdamNet, architecture, drawn, tiny
from lightning.pytorch.callbacks import Callback
from rows import Row, figure, rows_of, target
from settings import SEED, Settings
from timing import Work, in_turns, works
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.rewind_on_spike import Snapshot

NAME = "guards"
PEERS = ("timm",)
HISTORY = 1000  # of AutoClip, full
FLOOR, AGC = "clip_grad_norm_", "timm adaptive_clip_grad"
SKIP, ADAPTIVE = "SkipNonFinite", "AdaptiveClip"
OURS: dict[str, Callable[[], Callback]] = {
    SKIP: lt.SkipNonFinite,
    "TerminateOnNonFinite": lt.TerminateOnNonFinite,
    "RewindOnSpike": lt.RewindOnSpike,
    ADAPTIVE: lt.AdaptiveClip,
    "AutoClip": lt.AutoClip,
}
LIMIT = 1.25  # of SkipNonFinite's time over that of the floor
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet18": (partial(architecture, "resnet18"), (2, 3, 224, 224)),
    "vit_tiny": (partial(architecture, "vit_tiny_patch16_224"), (2, 3, 224, 224)),
    "tiny": (tiny, (32, 32)),
}


class Measure(Callback):
    """Takes the times after the first step; the callbacks before it are those of the Trainer."""

    def __init__(self, name: str, rounds: int, device: str) -> None:
        self.name, self.rounds, self.device = name, rounds, device
        self.rows: list[Row] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure."""
        from timm.utils import adaptive_clip_grad

        weights = list(module.parameters())
        clip = partial(clip_grad_norm_, weights, 1.0)
        ours: dict[str, Work] = {
            type(callback).__name__: partial(step_of, callback, trainer, module, batch)
            for callback in trainer.callbacks
            if type(callback).__name__ in OURS
        }
        by_unit = {AGC: partial(adaptive_clip_grad, weights), ADAPTIVE: ours.pop(ADAPTIVE)}
        self._note("step", {FLOOR: clip, **ours}, self.rounds)
        self._note("clipping by unit", by_unit, self.rounds)
        snapshot = Snapshot(trainer, module)
        take, restore = partial(Snapshot, trainer, module), partial(snapshot.restore, trainer, module)
        self._note("snapshot of RewindOnSpike", {FLOOR: clip, "take": take, "restore": restore}, -(-self.rounds // 10))

    def _note(self, case: str, contenders: Mapping[str, Work], rounds: int) -> None:
        makers = {what: lambda work=work: work for what, work in contenders.items()}
        measured = in_turns(works(makers, self.device), rounds)
        self.rows += rows_of(f"{case}, {self.name}", measured, next(iter(contenders)))


def step_of(callback: Any, trainer: L.Trainer, module: L.LightningModule, batch: Any) -> None:
    """All that a callback does in a step in which nothing is wrong."""
    callback.on_train_batch_start(trainer, module, batch, 0)
    callback.on_before_backward(trainer, module, torch.ones((), device=module.device))
    callback.on_before_optimizer_step(trainer, module, trainer.optimizers[0])
    callback.on_train_batch_end(trainer, module, None, batch, 0)


def of_network(name: str, rounds: int, device: str) -> list[Row]:
    """The figures of one network."""
    torch.manual_seed(SEED)
    network, shape = NETWORKS[name]
    measure, ours = Measure(name, rounds, device), [make() for make in OURS.values()]
    trainer = L.Trainer(accelerator=device, max_steps=1, callbacks=[*ours, measure], **QUIET)
    fill = {"norms": {0: torch.rand(HISTORY)}}
    clip = next(each for each in ours if isinstance(each, lt.AutoClip))
    measure.on_train_start = lambda *_: clip.load_state_dict(fill)  # type: ignore[method-assign]
    trainer.fit(AdamNet(network()), DataLoader([drawn(shape, 4, device)], batch_size=None))
    return measure.rows


def run(settings: Settings) -> list[Row]:
    """All figures."""
    names = settings.pick("networks", tuple(NETWORKS), ("vit_tiny", "tiny"), ("tiny",))
    rounds = settings.pick("rounds", 100, 10, 1)
    return [each for name in names for each in of_network(name, rounds, settings.device)]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Looking at the gradients by one pass over them; on a tiny network it is not the pass that takes time."""
    cases = [each.case for each in rows if each.case.startswith("step") and each.what == SKIP]
    return [
        target(f"{case}: {SKIP} over {FLOOR}", figure(rows, case, SKIP, "over_floor"), "<=", LIMIT)
        for case in cases
        if case != "step, tiny"
    ]
