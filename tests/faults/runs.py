"""A short training that saves at every step and can be resumed exactly: what is killed and corrupted here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

import lightning_tricks as lt
from tests.nets import NormNet, build, data, fit


class Resumable:
    """Batches shuffled by seed and epoch, whose position Lightning saves and restores.

    Lightning restores the position only from a checkpoint made inside an epoch; which epoch it is comes from
    ``sampler.set_epoch``, called at the start of every epoch as for a DistributedSampler.
    """

    def __init__(self, batch_size: int = 8, seed: int = 5) -> None:
        self.dataset, self.batch_size, self.seed = data(), batch_size, seed
        self.epoch = self.batches = 0
        self.sampler = self

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, 0

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        order = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        for part in torch.randperm(len(self.dataset), generator=order).split(self.batch_size)[self.batches :]:
            self.batches += 1
            yield self.dataset[part]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]


class Scheduled(NormNet):
    """Its schedule counts the steps of the fit, which must not cost the loader its position."""

    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=0.03), self, warmup=0.2)


def resume(ckpt_path: Path | None, *, callbacks: tuple[Callback, ...] = (), **settings: Any) -> L.Trainer:
    """Train to the end, from the checkpoint if there is one."""
    ema = lt.EMA(0.9, every_n_steps=2, start=0.2)
    given = {"max_epochs": 3, "callbacks": [ema, *callbacks], **settings}
    return fit(build(Scheduled), train=Resumable(), ckpt_path=ckpt_path, **given)


class EveryStep(ModelCheckpoint):
    """Saves after every optimizer step but the last one of an epoch, which is for a checkpoint at the epoch's end.

    Lightning (2.6.6) loses count otherwise: resumed between an epoch's last step and its end it skips that epoch's
    validation, and resumed once more from a checkpoint of the epoch after it trains too many steps. A resumed run
    would also save between two steps, and no checkpoint holds accumulated gradients.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_last_batch and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


def train(
    folder: Path,
    ckpt_path: Path | None = None,
    *,
    keep: int = -1,
    callbacks: tuple[Callback, ...] = (),
    trained: Callable[..., L.Trainer] = resume,
    **settings: Any,
) -> None:
    """The same, or another training, with checkpoints after every step, for epochs, and at the end."""
    steps = EveryStep(
        folder, "{step}", monitor="step", mode="max", save_top_k=keep, every_n_train_steps=1, save_last=True
    )
    epochs = ModelCheckpoint(folder, "epoch-{step}", monitor="val_loss", save_top_k=keep)
    run = trained(ckpt_path, callbacks=(*callbacks, steps, epochs), enable_checkpointing=True, **settings)
    run.save_checkpoint(folder / "final.ckpt")


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What must be bit-equal: both kinds of weights, what the tricks know, optimizer, schedule and step.

    Not the loops' progress, which differs between two checkpoints made at the same step in different hooks.
    """
    names = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    tricks = {key: each for key, each in checkpoint["callbacks"].items() if "monitor" not in key}
    return {**tricks, **{name: checkpoint[name] for name in names}}


def differences(a: Any, b: Any) -> list[str]:
    """Where two nested states are not bit for bit the same."""
    left, right = _leaves(a), _leaves(b)
    changed = [path for path in left.keys() & right.keys() if not _same(left[path], right[path])]
    return sorted([*changed, *(left.keys() ^ right.keys())])


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict | list | tuple):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {name: leaf for key, child in items for name, leaf in _leaves(child, f"{path}/{key!r}").items()}


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if not isinstance(a, Tensor):
        return bool(a == b)
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
