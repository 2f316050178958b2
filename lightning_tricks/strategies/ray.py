"""Strategy presets in the workers of Ray Train."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.install import required
from lightning_tricks.strategies.base import PresetStrategy
from lightning_tricks.strategies.presets import preset

__all__ = ["ray_trainer"]

_SET_BY_RAY = ("accelerator", "devices", "num_nodes")  # Arguments of the Trainer.


def ray_trainer(strategy: str | PresetStrategy, **arguments: Any) -> L.Trainer:
    """Make a stock Trainer with a preset's strategy in a worker of Ray Train.

    Accelerator, devices and nodes follow from Ray's ``ScalingConfig``. Ray makes the process group, so its backend and
    timeout are arguments of ``TorchConfig``. ``ray.train.lightning.prepare_trainer`` is not needed; it accepts only
    its own strategies.

    For metrics and checkpoints in Ray's result pass ``callbacks=[RayTrainReportCallback()]`` from
    ``ray.train.lightning`` and ``enable_checkpointing=False``. A run that Ray restarts resumes with ``ckpt_path=``, the
    file ``checkpoint.ckpt`` in the folder of ``ray.train.get_checkpoint()``: see ``configs/multi_node/ray_train.py``.

    Args:
        strategy: The name of a preset, or a strategy, such as ``ray_trainer(**preset(name, ...), ...)`` passes.
        **arguments: Further arguments of the Trainer.

    Returns:
        The Trainer.

    Raises:
        ImportError: If Ray Train is missing.
        RuntimeError: When called outside of a worker's training function.
        TypeError: For an argument that Ray sets.
        MisconfigurationException: If Ray has placed different numbers of workers on its nodes.

    Example:
        >>> def train():  # runs in each worker
        ...     trainer = ray_trainer("fsdp2_bf16", max_epochs=3)
        ...     trainer.fit(Net(), datamodule=Data())
        >>> from ray.train import ScalingConfig  # doctest: +SKIP
        >>> from ray.train.torch import TorchTrainer  # doctest: +SKIP
        >>> TorchTrainer(train, scaling_config=ScalingConfig(num_workers=16, use_gpu=True)).fit()  # doctest: +SKIP
    """
    if conflicting := sorted(arguments.keys() & set(_SET_BY_RAY)):
        raise TypeError(
            f"ray_trainer takes {', '.join(_SET_BY_RAY)} from Ray, got {', '.join(conflicting)}. Pass"
            " ScalingConfig(num_workers=..., use_gpu=...) to the TorchTrainer instead."
        )
    with required("ray_trainer needs Ray Train", "ray"):
        import ray.train.torch
        from ray.train.lightning import RayLightningEnvironment

    class Environment(RayLightningEnvironment, LightningEnvironment):
        """Ray's, which is one of lightning.pytorch wherever that is installed, also for pytorch_lightning."""

    workers, nodes = _workers_per_node()
    device = ray.train.torch.get_device()
    strategy = preset(strategy)["strategy"] if isinstance(strategy, str) else strategy
    plugins = arguments.pop("plugins", None) or []
    trainer = L.Trainer(
        strategy=strategy,
        accelerator=device.type,
        devices=workers,
        num_nodes=nodes,
        plugins=[*(plugins if isinstance(plugins, list) else [plugins]), Environment()],
        **arguments,
    )
    if device.type == "cuda" and trainer.strategy.root_device != device:
        # Ray may assign a worker another visible device than the one that its local rank implies.
        trainer.strategy.parallel_devices = [device] * workers  # type: ignore[attr-defined]
    return trainer


def _workers_per_node() -> tuple[int, int]:
    """The number of workers on each node, and the number of nodes."""
    import ray.train

    try:
        context = ray.train.get_context()
    except RuntimeError as error:
        raise RuntimeError(
            "ray_trainer must be called in a worker of Ray Train, got a call from outside. Call it in the train"
            " function that you pass to TorchTrainer."
        ) from error
    total, local = context.get_world_size(), context.get_local_world_size()
    expected_rank = context.get_node_rank() * local + context.get_local_rank()
    if total % local or context.get_world_rank() != expected_rank:
        raise MisconfigurationException(
            f"ray_trainer needs the same number of workers on each node, got {local} of {total} on this one. Choose a"
            " ScalingConfig(num_workers=..., resources_per_worker=..., placement_strategy=...) that fills nodes evenly."
        )
    return local, total // local
