"""The table of strategy presets."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_tricks.core.checks import check_choice
from lightning_tricks.core.lightning.namespace import OTHER, wrong_lightning
from lightning_tricks.strategies.base import PresetStrategy
from lightning_tricks.strategies.ddp.preset import DDPPreset
from lightning_tricks.strategies.fabric import FabricPreset, fabric_preset
from lightning_tricks.strategies.fsdp2.preset import FSDP2Preset
from lightning_tricks.strategies.single import SinglePreset
from lightning_tricks.strategies.zero.preset import ZeROPreset

__all__ = ["preset", "presets"]


@dataclass(frozen=True)
class _Row:
    name: str
    strategy: type[Any]
    when: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self, **overrides: Any) -> PresetStrategy:
        strategy = self.strategy(**{**self.arguments, **overrides})
        strategy.strategy_name = self.name
        return strategy

    def make_for_fabric(self) -> FabricPreset:
        return fabric_preset(self.name, self.arguments.get("precision", "bf16-mixed"))

    def refuse(self) -> None:
        raise wrong_lightning(f"strategy={self.name!r}", f"a {OTHER}.Trainer")


_FP16 = {"precision": "16-mixed"}

_TABLE = {
    row.name: row
    for row in (
        _Row("single_bf16", SinglePreset, "one device; matrix products in bf16, weights and optimizer in fp32"),
        _Row("single_fp16", SinglePreset, "single_bf16 for a device without bf16 (V100, T4); scales the loss", _FP16),
        _Row("ddp_bf16", DDPPreset, "model and optimizer fit on each device; any number of devices and nodes"),
        _Row("ddp_fp16", DDPPreset, "ddp_bf16 for devices without bf16", _FP16),
        _Row(
            "ddp_compressed_bf16",
            DDPPreset,
            "ddp_bf16 over slow links: gradients are sent in 16 bits, with PowerSGD or with local SGD",
            {"compression": "bf16"},
        ),
        _Row(
            "ddp_diloco_bf16",
            DDPPreset,
            "ddp_bf16 over the slowest links: nodes train apart, and every 100 steps DiLoCo's outer optimizer steps",
            {"compression": "local_sgd", "local_sgd_period": 100, "outer_lr": 0.7, "outer_momentum": 0.9},
        ),
        _Row("fsdp2_bf16", FSDP2Preset, "model and optimizer do not fit, and links are fast: shards everything"),
        _Row("fsdp2_offload_bf16", FSDP2Preset, "fsdp2_bf16 with the shards in host memory", {"offload": True}),
        _Row(
            "hsdp_bf16",
            FSDP2Preset,
            "fsdp2_bf16 for several nodes on slow links: shards within a node, copies across nodes",
            {"replicas": "nodes"},
        ),
        _Row(
            "tp_bf16",
            FSDP2Preset,
            "fsdp2_bf16 for one sample that is too long for a device, on fast links: splits layers within a node",
            {"tensor_parallel": "node"},
        ),
        _Row("zero1_bf16", ZeROPreset, "the model fits, its optimizer states do not: shards those", {"stage": 1}),
        _Row("zero2_bf16", ZeROPreset, "zero1_bf16 with sharded gradients", {"stage": 2}),
        _Row("zero2_fp16", ZeROPreset, "zero2_bf16 for devices without bf16", {"stage": 2, **_FP16}),
        _Row(
            "zero2_offload_bf16",
            ZeROPreset,
            "zero2_bf16 with optimizer and gradients in host memory; also helps on a single device",
            {"stage": 2, "offload": "cpu"},
        ),
        _Row(
            "zero2_offload_fp16",
            ZeROPreset,
            "zero2_offload_bf16 for devices without bf16",
            {"stage": 2, "offload": "cpu", **_FP16},
        ),
        _Row("zero3_bf16", ZeROPreset, "zero2_bf16 with sharded weights; DeepSpeed's counterpart of fsdp2_bf16"),
        _Row("zero3_fp16", ZeROPreset, "zero3_bf16 for devices without bf16", _FP16),
        _Row("zero3_offload_bf16", ZeROPreset, "zero3_bf16 with all shards in host memory", {"offload": "cpu"}),
        _Row(
            "zero3_offload_fp16",
            ZeROPreset,
            "zero3_offload_bf16 for devices without bf16",
            {"offload": "cpu", **_FP16},
        ),
        _Row(
            "zero3_nvme_bf16",
            ZeROPreset,
            "zero3_offload_bf16 with the shards on the NVMe disk at nvme_path=",
            {"offload": "nvme", "nvme_path": "/local_nvme"},
        ),
    )
}


def preset(name: str, **overrides: Any) -> dict[str, Any]:
    """Make the Trainer arguments of a preset: ``Trainer(**preset(name))`` equals ``Trainer(strategy=name)``.

    Args:
        name: The name of a preset, one of ``presets()``.
        **overrides: Arguments of the strategy that replace those of the preset, for example
            ``find_unused_parameters=True``.

    Returns:
        ``{"strategy": ...}`` with a new strategy object, which also sets the precision.

    Raises:
        ValueError: If there is no such preset; the message suggests the nearest name.
        TypeError: If the strategy has no argument of an override's name.

    Example:
        >>> import lightning as L
        >>> L.Trainer(**preset("single_bf16"), accelerator="cpu", logger=False).precision
        'bf16-mixed'
    """
    check_choice("preset name", name, _TABLE)
    row = _TABLE[name]
    allowed = _arguments(row.strategy)
    if unknown := sorted(overrides.keys() - allowed):
        raise TypeError(f"preset {name!r} has no argument {', '.join(unknown)}; it takes {', '.join(sorted(allowed))}.")
    return {"strategy": row.make(**overrides)}


def presets() -> list[dict[str, Any]]:
    """List the presets, one row each: name, strategy, its arguments, precision and when to use it.

    Returns:
        Rows with the keys ``name``, ``strategy``, ``arguments``, ``precision``, ``when``. In YAML a strategy is given
        by the name, or by ``class_path: lightning_tricks.<strategy>`` with the ``arguments`` as ``init_args``.

    Example:
        >>> [row["name"] for row in presets() if row["strategy"] == "DDPPreset"]
        ['ddp_bf16', 'ddp_fp16', 'ddp_compressed_bf16', 'ddp_diloco_bf16']
    """
    return [
        {
            "name": name,
            "strategy": row.strategy.__name__,
            "arguments": dict(row.arguments),
            "precision": row.arguments.get("precision", "bf16-mixed"),
            "when": row.when,
        }
        for name, row in _TABLE.items()
    ]


def register() -> None:
    """Register each name as a ``Trainer(strategy=...)`` string, and as one of ``Fabric``.

    In the other Lightning, if it is loaded, they raise an error that says what to import, until that was imported.

    Raises:
        RuntimeError: If another package has registered the name.
    """
    for name, row in _TABLE.items():
        for registry, make in ((StrategyRegistry, row.make), (STRATEGY_REGISTRY, row.make_for_fabric)):
            registered = registry[name]["strategy"] if name in registry else make
            if getattr(registered, "__module__", "") not in _MODULES:
                raise RuntimeError(f"The strategy name {name!r} is already registered by {registered!r}.")
            registry.register(name, make, description=row.when, override=True)
        if (strategies := sys.modules.get(f"{OTHER}.strategies")) and name not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(name, row.refuse, description=row.when)


_MODULES = ("lightning_tricks.strategies.presets", "pytorch_lightning_tricks.strategies.presets")


def _arguments(strategy: type[PresetStrategy]) -> set[str]:
    """The names of the arguments that a strategy takes, including those that it passes to its base classes."""
    names: set[str] = set()
    for owner in strategy.__mro__:
        if "__init__" in vars(owner):
            parameters = inspect.signature(owner.__init__).parameters  # type: ignore[misc]
            names.update(parameters)
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    if issubclass(strategy, DDPPreset):
        names.update(inspect.signature(DistributedDataParallel.__init__).parameters)
    return names - {"self", "kwargs", "settings", *_NO_OVERRIDES}


_NO_OVERRIDES = {  # Arguments that the Trainer or the preset sets.
    *("accelerator", "parallel_devices", "precision_plugin", "data_parallel_size", "tensor_parallel_size"),
    *("module", "device", "device_ids", "output_device", "process_group"),
}
