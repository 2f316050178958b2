"""Presets in the workers of Ray Train."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.strategies.base import PresetStrategy
from lightning_tricks.strategies.presets import preset

__all__ = ["ray_trainer"]

_RAYS = ("accelerator", "devices", "num_nodes")  # what Ray decides


def ray_trainer(strategy: str | PresetStrategy, **arguments: Any) -> pl.Trainer:
    """A stock Trainer with a preset's strategy for the worker of Ray Train that calls it.

    Accelerator, devices and nodes follow from Ray's ``ScalingConfig``; the process group is Ray's, so its backend and
    timeout are arguments of ``TorchConfig``. ``ray.train.lightning.prepare_trainer`` is not needed and refuses all
    strategies but its own.

    For metrics and checkpoints in Ray's result pass ``callbacks=[RayTrainReportCallback()]`` of
    ``ray.train.lightning`` and ``enable_checkpointing=False``. A run that Ray restarts resumes by ``ckpt_path=``, the
    file ``checkpoint.ckpt`` in the folder of ``ray.train.get_checkpoint()``: see ``configs/multi_node/ray_train.py``.

    Args:
        strategy: The name of a preset; ``ray_trainer(**preset(name, ...), ...)`` for one with overrides.
        **arguments: Further arguments of the Trainer.

    Returns:
        The Trainer.

    Raises:
        ImportError: Without Ray Train.
        RuntimeError: Outside of a worker's training function.
        TypeError: For arguments that Ray decides.
        MisconfigurationException: If Ray has placed different numbers of workers on its nodes.

    Example:
        >>> def train():  # in each worker
        ...     trainer = ray_trainer("fsdp2_bf16", max_epochs=3)
        ...     trainer.fit(Net(), datamodule=Data())
        >>> from ray.train import ScalingConfig  # doctest: +SKIP
        >>> from ray.train.torch import TorchTrainer  # doctest: +SKIP
        >>> TorchTrainer(train, scaling_config=ScalingConfig(num_workers=16, use_gpu=True)).fit()  # doctest: +SKIP
    """
    if taken := sorted(arguments.keys() & set(_RAYS)):
        raise TypeError(
            f"ray_trainer has {', '.join(_RAYS)} from Ray, got {', '.join(taken)}. Say it by"
            " ScalingConfig(num_workers=..., use_gpu=...) of the TorchTrainer."
        )
    try:
        import ray.train.torch
        from ray.train.lightning import RayLightningEnvironment
    except ImportError as error:
        raise ImportError("ray_trainer needs Ray Train: pip install 'lightning-tricks[ray]'") from error
    local, nodes = _workers()
    device = ray.train.torch.get_device()
    strategy = preset(strategy)["strategy"] if isinstance(strategy, str) else strategy
    plugins = arguments.pop("plugins", None) or []
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=device.type,
        devices=local,
        num_nodes=nodes,
        plugins=[*(plugins if isinstance(plugins, list) else [plugins]), RayLightningEnvironment()],
        **arguments,
    )
    if device.type == "cuda" and trainer.strategy.root_device != device:
        # Ray has given this worker another of the visible devices than the one of its local rank
        trainer.strategy.parallel_devices = [device] * local  # type: ignore[attr-defined]
    return trainer


def _workers() -> tuple[int, int]:
    """How many workers there are on this node, and on how many nodes."""
    import ray.train

    try:
        context = ray.train.get_context()
    except RuntimeError as error:
        raise RuntimeError(
            "ray_trainer is called by the function that Ray Train runs in its workers, got a call from outside. Call it"
            " in the train function that you pass to TorchTrainer."
        ) from error
    total, local = context.get_world_size(), context.get_local_world_size()
    expected = context.get_node_rank() * local + context.get_local_rank()  # if each node has as many as this one
    if total % local or context.get_world_rank() != expected:
        raise MisconfigurationException(
            f"ray_trainer needs as many workers on each node, got {local} of {total} on this one. Choose a"
            " ScalingConfig(num_workers=..., resources_per_worker=..., placement_strategy=...) that fills nodes evenly."
        )
    return local, total // local
