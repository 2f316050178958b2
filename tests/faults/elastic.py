"""What torchrun starts, and starts again: FOLDER PRESET EPOCHS DATA. Training goes on from the newest checkpoint.

A preset whose name ends in "+async" saves while training goes on.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from tests.faults.runs import EveryStep, Resumable, Scheduled
from tests.nets import Net, PlainNet, build, data, loader, trainer, weights


class ScheduledPlain(PlainNet):
    """Without the running statistics of BatchNorm, which ZeRO saves of one rank only."""

    configure_optimizers = Scheduled.configure_optimizers


class Numbered(Dataset[Any]):
    """Samples with their numbers, and noise."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        x, y = data()[index]
        return x + 0.1 * torch.randn(8), y, index


class Dropped(Net):
    """Has dropout, and writes which samples are behind each step."""

    def __init__(self, samples: Path) -> None:
        super().__init__()
        self.file = samples.open("w")
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print(json.dumps([self.trainer.current_epoch, batch[2].tolist()]), file=self.file, flush=True)
        return super().training_step(batch[:2], batch_idx)

    configure_optimizers = Scheduled.configure_optimizers


class Told(Callback):
    """Tells what this process does, line by line: its id when its fit begins, then words."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}").open("w")

    def tell(self, word: str) -> None:
        print(word, file=self.file, flush=True)

    def setup(self, *_: Any, **__: Any) -> None:
        self.tell(f"{os.getpid()}")

    def on_train_batch_start(self, *_: Any) -> None:
        self.tell("training")

    def on_validation_start(self, *_: Any) -> None:
        self.tell("validating")

    def on_save_checkpoint(self, *_: Any) -> None:
        self.tell("saving")


OPTIONS: dict[str, dict[str, Any]] = {  # of presets
    "hsdp_bf16": {"replicas": 2},
    "tp_bf16": {"tensor_parallel": 2, "plan": {"layers.0": "colwise_gather_output", "layers.3": "rowwise_split_input"}},
}


def main(folder: Path, engine: str, epochs: int, shuffled: bool) -> None:
    warnings.filterwarnings("ignore", message="Checkpoint directory")
    torch.set_num_threads(1)
    run = folder / "run"
    callbacks = [
        *(Told(folder), lt.EMA(0.9, every_n_steps=2), lt.Preemption(run)),
        EveryStep(run, "{step}", monitor="step", mode="max", save_top_k=3, every_n_train_steps=1),
        ModelCheckpoint(run, "epoch-{step}", monitor="val_loss", save_top_k=2),
    ]
    name, later, _ = engine.partition("+async")
    given = {**OPTIONS.get(name, {}), **({"async_save": True} if later else {})}
    if name[0] != "z":
        given["process_group_backend"] = "gloo"
    made = trainer(
        **lt.preset(name, precision="32-true", timeout=timedelta(seconds=20), **given),
        **{
            "devices": int(os.environ["WORLD_SIZE"]),
            "max_epochs": epochs,
            "callbacks": callbacks,
            "enable_checkpointing": True,
        },
    )
    group = int(os.environ["RANK"]) // OPTIONS.get(name, {}).get("tensor_parallel", 1)  # of those that share a batch
    train: Any = Resumable(seed=5 + group)
    if shuffled:
        size = 2 if name == "hsdp_bf16" else 4  # of four ranks and of two: an epoch has six steps
        train = DataLoader(Numbered(), size, shuffle=True, num_workers=1)
        module = build(Dropped, samples=folder / f"samples-{os.getpid()}")
    else:
        module = build(ScheduledPlain if engine[0] == "z" else Scheduled)
    L.seed_everything(7 + int(os.environ["RANK"]) * shuffled, verbose=False)
    os.environ["PL_GLOBAL_SEED"] = "7"  # of the order of all ranks
    made.fit(module, train, loader(24), ckpt_path="newest")
    torch.save([weights(module), made.global_step], folder / f"final-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "shuffled")
