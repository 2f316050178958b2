"""Handwritten digits on Ray: python ray_train.py --strategy ddp_bf16 --workers 32 --gpu (see docs/multi_node.md)."""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lightning_tricks as lt
from lightning_tricks.examples.digits import Digits, DigitsData


def train(options: dict[str, Any]) -> None:
    """Train in a worker; after a failure go on from the newest checkpoint that is complete."""
    L.seed_everything(0)
    folder = Path(options["storage"], ray.train.get_context().get_experiment_name(), "checkpoints")
    trainer = lt.ray_trainer(
        options["strategy"],
        max_steps=options["steps"],
        callbacks=[ModelCheckpoint(folder)],  # every epoch; every_n_train_steps=100 for long ones
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Digits(), datamodule=DigitsData(batch_size=32), ckpt_path=lt.newest_checkpoint(folder))


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp_bf16")
    parser.add_argument("--workers", type=int, default=2, help="devices in all, on any number of machines")
    parser.add_argument("--gpu", action="store_true", help="a GPU each")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--storage", required=True, help="a folder that all machines share")
    options = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=options.storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    print(f"last checkpoint: {lt.newest_checkpoint(Path(result.path, 'checkpoints'))}")


if __name__ == "__main__":
    main()
