"""What torchrun starts, and starts again: FOLDER PRESET EPOCHS. Training goes on from the newest checkpoint."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_tricks as lt
from tests.faults.runs import EveryStep, Resumable, Scheduled
from tests.nets import PlainNet, build, loader, trainer, weights


class ScheduledPlain(PlainNet):
    """Without the running statistics of BatchNorm, which ZeRO saves of one rank only."""

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


def main(folder: Path, engine: str, epochs: int) -> None:
    warnings.filterwarnings("ignore", message="Checkpoint directory")
    torch.set_num_threads(1)
    run = folder / "run"
    callbacks = [
        *(Told(folder), lt.EMA(0.9, every_n_steps=2), lt.Preemption(run)),
        EveryStep(run, "{step}", monitor="step", mode="max", save_top_k=3, every_n_train_steps=1),
        ModelCheckpoint(run, "epoch-{step}", monitor="val_loss", save_top_k=2),
    ]
    backend = {} if engine[0] == "z" else {"process_group_backend": "gloo"}
    made = trainer(
        **lt.preset(engine, precision="32-true", timeout=timedelta(seconds=20), **backend),
        **{"devices": 2, "max_epochs": epochs, "callbacks": callbacks, "enable_checkpointing": True},
    )
    module = build(ScheduledPlain if engine[0] == "z" else Scheduled)
    pl.seed_everything(7, verbose=False)
    made.fit(module, Resumable(seed=5 + int(os.environ["RANK"])), loader(24), ckpt_path="newest")
    torch.save([weights(module), made.global_step], folder / f"final-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
