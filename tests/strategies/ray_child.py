"""A Ray of its own: what ``ray_trainer`` does outside of workers, in one, and in two of which one fails; as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt


class FailOnce(Callback):
    """The second worker fails in the second epoch, at the first attempt: as its machine does, or with an error.

    If it is killed, it leaves a checkpoint that was never finished, which says that it is newer.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.note, self.killed = Path(folder, f"failed-{name}"), name != "failed"

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1 and not self.note.exists():
            self.note.touch()
            if self.killed:
                saved = Path(trainer.checkpoint_callback.dirpath, "epoch=9-step=999.ckpt")  # type: ignore[union-attr,arg-type]
                saved.write_bytes(b"PK")
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a machine is gone")


def failing(options: dict[str, Any]) -> None:
    """The script's own function with a failure, and notes on the Trainer."""
    from ray.train.lightning import RayLightningEnvironment

    from configs.multi_node import ray_train

    original = lt.ray_trainer

    def watched(*args: Any, **arguments: Any) -> L.Trainer:
        arguments["callbacks"].append(FailOnce(options["storage"], options["name"]))
        trainer = original(*args, **arguments)
        facts = {
            "device": str(trainer.strategy.root_device),
            "devices": trainer.num_devices,
            "environment": isinstance(trainer.strategy.cluster_environment, RayLightningEnvironment),
            "nodes": trainer.num_nodes,
            "precision": trainer.precision,
            "preset": trainer.strategy.strategy_name,
            "world": trainer.world_size,
        }
        Path(options["storage"], f"facts-{options['name']}-{trainer.global_rank}.json").write_text(json.dumps(facts))
        return trainer

    lt.ray_trainer = watched
    try:
        ray_train.train(options)
    finally:
        lt.ray_trainer = original


def run(train: Any, storage: str, **options: Any) -> str | None:
    """The newest checkpoint of the run."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    result = TorchTrainer(
        train,
        train_loop_config={"storage": storage, "strategy": "ddp_bf16", **options},
        scaling_config=ScalingConfig(num_workers=options["workers"]),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    return lt.newest_checkpoint(Path(result.path, "checkpoints"))


def main(storage: str, steps: int) -> None:
    import ray  # here, since doctests import this file and Ray may be missing

    from configs.multi_node import ray_train

    found: dict[str, Any] = {}
    try:
        lt.ray_trainer("ddp_bf16")
    except RuntimeError as error:
        found["outside"] = str(error)
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        for name, strategy in (("failed", "ddp_bf16"), ("killed", "ddp_bf16"), ("sharded", "fsdp2_bf16")):
            found[name] = run(failing, storage, workers=2, steps=steps, name=name, strategy=strategy)
        found["facts"] = [json.loads(Path(storage, f"facts-failed-{rank}.json").read_text()) for rank in range(2)]
        found["alone"] = run(ray_train.train, storage, workers=1, steps=steps)
    finally:
        ray.shutdown()
    assert not dist.is_initialized()
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
