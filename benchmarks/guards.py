"""What the guards and the clipping cost in a step, beside one pass of ``clip_grad_norm_`` and timm's clipping.

Run ``python benchmarks/guards.py`` (about a minute); it prints tables and writes ``benchmarks/results/guards.json``.
Inside a fit, all hooks that a callback has in a step are called in a row, with gradients and Adam's state as they are
then. In every round all contenders take their turn, shuffled, in one process. Times are medians over the rounds, ratios
medians of the ratios within a round: the load of a machine drifts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from ema import Net, architecture
from lightning.pytorch.callbacks import Callback
from machine import Work, in_turns, machine, prepare, table
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.core.snapshot import Snapshot

RESULTS = Path(__file__).parent / "results"
PEERS = ("timm",)
SEED = 0
NETWORKS = {"resnet18": "resnet18", "vit_tiny": "vit_tiny_patch16_224"}
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


class Trained(Net):
    """A network with Adam, which has the usual state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Measure(Callback):
    """Takes the times after the first step; the callbacks before it are those of the Trainer."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.steps: dict[str, Any] = {}
        self.by_unit: dict[str, Any] = {}
        self.snapshots: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
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
        self.steps = self._times({FLOOR: clip, **ours}, self.rounds)
        self.by_unit = self._times(by_unit, self.rounds)
        snapshot = Snapshot(trainer, module)
        take, restore = partial(Snapshot, trainer, module), partial(snapshot.restore, trainer, module)
        self.snapshots = self._times({FLOOR: clip, "take": take, "restore": restore}, -(-self.rounds // 10))

    def _times(self, works: dict[str, Work], rounds: int) -> dict[str, Any]:
        return in_turns([{name: work} for name, work in works.items()], rounds, next(iter(works)), "cpu")


def step_of(callback: Any, trainer: pl.Trainer, module: pl.LightningModule, batch: Any) -> None:
    """All that a callback does in a step in which nothing is wrong."""
    callback.on_train_batch_start(trainer, module, batch, 0)
    callback.on_before_backward(trainer, module, torch.ones(()))
    callback.on_before_optimizer_step(trainer, module, trainer.optimizers[0])
    callback.on_train_batch_end(trainer, module, None, batch, 0)


def of_network(name: str, rounds: int) -> dict[str, Any]:
    """The figures of one network, printed as they come."""
    torch.manual_seed(SEED)
    module = Trained(architecture(NETWORKS[name]))
    batch = torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))
    measure, ours = Measure(rounds), [make() for make in OURS.values()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        callbacks=[*ours, measure],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    fill = {"norms": {0: torch.rand(HISTORY)}}
    clip = next(each for each in ours if isinstance(each, lt.AutoClip))
    measure.on_train_start = lambda *_: clip.load_state_dict(fill)  # type: ignore[method-assign]
    trainer.fit(module, DataLoader([batch], batch_size=None))
    found = {"steps": measure.steps, "by_unit": measure.by_unit, "snapshots": measure.snapshots}
    for title, rows in found.items():
        table(f"{name}: {title}", rows)
    return {"parameters": sum(weight.numel() for weight in module.parameters()), **found}


def targets(networks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was aimed at, and whether it was reached."""
    found = {name: network["steps"][SKIP]["over_floor"] for name, network in networks.items()}
    return {
        f"{name}: {SKIP} over {FLOOR}": {"value": value, "target": f"<= {LIMIT}", "met": value <= LIMIT}
        for name, value in found.items()
    }


def measured(rounds: int) -> dict[str, Any]:
    """All figures."""
    networks = {name: of_network(name, rounds) for name in NETWORKS}
    settings = {"threads": torch.get_num_threads(), "rounds": rounds, "seed": SEED, "history": HISTORY}
    result = {"machine": machine(*PEERS), "settings": settings, "networks": networks, "targets": targets(networks)}
    table("targets", result["targets"])
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--output", type=Path, default=RESULTS / "guards.json", help="where the figures go")
    args = parser.parse_args()
    prepare(PEERS, args.threads)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(measured(2 if args.quick else args.rounds), indent=1) + "\n")


if __name__ == "__main__":
    main()
