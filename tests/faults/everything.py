"""Trainings with all tricks that go together at work, which can be interrupted anywhere and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lightning_tricks as lt
from tests.callbacks.test_moe_balance import Experts
from tests.conformance.trick import filled
from tests.faults.runs import Resumable
from tests.nets import NormNet, build, loader, trainer

EPOCHS = 3


class Images(NormNet):
    """Images for CutMix, BatchNorm for SAM and SWA; no dropout, whose random numbers Lightning does not save."""

    def __init__(self) -> None:
        super().__init__(0.03)
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 2)
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].unflatten(1, (2, 2, 2)), batch[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)


def tricks() -> list[Callback]:
    """All but TerminateOnNonFinite, which cannot be beside SkipNonFinite."""
    return [
        lt.SkipNonFinite(),
        lt.RewindOnSpike(threshold=1e6, window=4, every_n_steps=3),
        lt.AdaptiveClip(0.1),
        lt.EMA(0.9, start=2),
        lt.SWA(0.5, every_n_steps=2, validate="raw", at_end="raw", recalibrate_batchnorm=False),
        lt.HardExampleFilter(0.75),
        lt.Mixup(0.4, prob=0.4),
        lt.CutMix(prob=0.4),
        lt.LRSchedule("cosine", warmup=3),
        lt.GradualUnfreeze([2, 6], parameters=[r"^layers\.3", r"^layers\.[01]\."]),
        lt.ActivationCheckpointing(["layers.0"]),
    ]


class Everything(lt.SAMMixin, Images):
    """With SAM."""

    sam = lt.SAM(rho=0.05)


class Growing(Images):
    """Images that are small at first."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].unflatten(1, (2, 4)), batch[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(filled(x))


class Free(Growing):
    """With an optimizer that needs no schedule; without BatchNorm, whose statistics need the loader once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = nn.Identity()

    def configure_optimizers(self) -> Any:
        return lt.optimizer("schedulefree_adamw", self, lr=0.03)


class Mixture(Growing):
    """With experts before the last layer, whose counts of tokens no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(5, Experts(12))


class InChunks(lt.GradCacheMixin, Growing):
    """Two embeddings of a sample, made chunk by chunk; without BatchNorm, whose statistics are those of a batch."""

    chunk = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.other = nn.Linear(8, 6)

    def embed(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch[0].flatten(1)
        return F.normalize(self(x), dim=1), F.normalize(self.other(x), dim=1)

    def contrast(self, one: Tensor, other: Tensor) -> Tensor:
        return lt.clip_loss(one, other)

    training_step = lt.GradCacheMixin.training_step


def tricks_of_growth() -> list[Callback]:
    """Those that look on, and those that grow, freeze and round."""
    return [
        lt.SkipNonFinite(),
        lt.AutoClip(50),
        lt.Doctor(),
        lt.DataWait(warn=1.0),
        lt.Throughput(),
        lt.Preemption("runs"),
        lt.LayerFreezing(start=7, stop=10, parameters=[r"^layers\.[01]\."]),
        lt.ProgressiveResizing(0.5, stop=8, multiple_of=1),
        lt.BatchTransform(lt.CutOut(0.5)),
        lt.Mixup(0.4, per_sample=True, prob=0.5),
        lt.QAT(start=4, modules=r"^layers\.[35]"),
    ]


def tricks_without_schedule() -> list[Callback]:
    return [lt.ScheduleFree(), lt.LeanLoss("layers.5"), lt.SequenceLengthWarmup(0.5, stop=8, multiple_of=1, inputs=0)]


def tricks_in_backward() -> list[Callback]:
    return [lt.StepInBackward(), lt.EMA(0.9), lt.HiddenMixup("layers.2"), lt.BatchTransform(lt.CutOut(0.5))]


def lora() -> lt.LoRA:
    return lt.LoRA([r"layers\.0", r"layers\.3"], r=2, train=r"layers\.5")


TRAININGS: dict[str, tuple[type[Images], Callable[[], list[Callback]]]] = {
    "everything": (Everything, tricks),
    "growth": (Growing, tricks_of_growth),
    "without schedule": (Free, tricks_without_schedule),
    "in backward": (Growing, tricks_in_backward),
    "adapters": (Images, lambda: [lt.SkipNonFinite(), lora(), lt.EMA(0.9), lt.AdaptiveClip(0.1)]),
    "experts": (Mixture, lambda: [lt.MoEBalance(0.05), lt.EMA(0.9)]),
    "chunks": (InChunks, lambda: [lt.SkipNonFinite(), lt.EMA(0.9), lt.LRSchedule("cosine", warmup=3)]),
    "SAM of a callback": (Images, lambda: [lt.SAMCallback(0.05), lt.SkipNonFinite(), lt.EMA(0.9)]),
}


def make(folder: Path, *others: Callback, training: str = "everything", **settings: Any) -> L.Trainer:
    given = {"max_epochs": EPOCHS, "default_root_dir": folder, "callbacks": [*others, *TRAININGS[training][1]()]}
    return trainer(**{**given, **settings})


def run(made: L.Trainer, module: L.LightningModule, train: Any = None, ckpt_path: Path | None = None) -> None:
    """Fit from the same random numbers."""
    L.seed_everything(7, verbose=False)
    made.fit(module, Resumable() if train is None else train, loader(24), ckpt_path=ckpt_path)


def resume(
    ckpt_path: Path | None, *, callbacks: tuple[Callback, ...] = (), training: str = "everything", **settings: Any
) -> L.Trainer:
    """Train to the end, from the checkpoint if there is one, as ``runs.resume`` does with fewer tricks."""
    kind, own = TRAININGS[training]
    made = trainer(**{"max_epochs": EPOCHS, "callbacks": [*own(), *callbacks], **settings})
    run(made, fresh(kind), ckpt_path=ckpt_path)
    return made


def fresh(kind: type[L.LightningModule] = Everything) -> Any:
    return build(kind)


def outcome(made: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """All that must be bit-equal after a fit: weights, averages of both kinds, optimizer, schedule and steps."""
    states = {
        type(each).__name__: each.state_dict()
        for each in made.callbacks  # type: ignore[attr-defined]
        if isinstance(each, lt.AutoClip | lt.EMA | lt.SWA)
    }
    averages = {name: {k: v for k, v in each.items() if k != "history"} for name, each in states.items()}
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "averages": averages,
        "optimizer": [each.state_dict() for each in made.optimizers],
        "schedule": [each.scheduler.state_dict() for each in made.lr_scheduler_configs],
        "steps": made.global_step,
    }
