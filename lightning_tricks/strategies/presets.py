"""The table of strategy presets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_tricks.core.checks import check_choice
from lightning_tricks.strategies.base import PresetStrategy
from lightning_tricks.strategies.ddp.preset import DDPPreset
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


_FP16 = {"precision": "16-mixed"}

_TABLE = {
    row.name: row
    for row in (
        _Row("single_bf16", SinglePreset, "one device; matrix products in bf16, weights and optimizer in fp32"),
        _Row(
            "single_fp16", SinglePreset, "single_bf16 for a device without bf16 (V100, T4): the loss is scaled", _FP16
        ),
        _Row("ddp_bf16", DDPPreset, "model and optimizer fit on each device; as many devices and nodes as there are"),
        _Row("ddp_fp16", DDPPreset, "ddp_bf16 for devices without bf16", _FP16),
        _Row(
            "ddp_compressed_bf16",
            DDPPreset,
            "ddp_bf16 over slow links: gradients travel in 16 bits, by PowerSGD or by local SGD",
            {"compression": "bf16"},
        ),
        _Row("fsdp2_bf16", FSDP2Preset, "they do not fit, and links are fast: each device holds a slice of everything"),
        _Row("fsdp2_offload_bf16", FSDP2Preset, "fsdp2_bf16 with the slices in host memory", {"offload": True}),
        _Row("zero1_bf16", ZeROPreset, "the model fits, its optimizer states do not: slices of those", {"stage": 1}),
        _Row("zero2_bf16", ZeROPreset, "zero1_bf16 with slices of the gradients, too", {"stage": 2}),
        _Row("zero2_fp16", ZeROPreset, "zero2_bf16 for devices without bf16", {"stage": 2, **_FP16}),
        _Row(
            "zero2_offload_bf16",
            ZeROPreset,
            "zero2_bf16 with optimizer and gradients in host memory; helps a single device, too",
            {"stage": 2, "offload": "cpu"},
        ),
        _Row(
            "zero2_offload_fp16",
            ZeROPreset,
            "zero2_offload_bf16 for devices without bf16",
            {"stage": 2, "offload": "cpu", **_FP16},
        ),
        _Row("zero3_bf16", ZeROPreset, "zero2_bf16 with slices of the weights, too; fsdp2_bf16 by DeepSpeed"),
        _Row("zero3_fp16", ZeROPreset, "zero3_bf16 for devices without bf16", _FP16),
        _Row("zero3_offload_bf16", ZeROPreset, "zero3_bf16 with all slices in host memory", {"offload": "cpu"}),
        _Row(
            "zero3_offload_fp16",
            ZeROPreset,
            "zero3_offload_bf16 for devices without bf16",
            {"offload": "cpu", **_FP16},
        ),
        _Row(
            "zero3_nvme_bf16",
            ZeROPreset,
            "zero3_offload_bf16 with the slices on the NVMe disk at nvme_path=",
            {"offload": "nvme", "nvme_path": "/local_nvme"},
        ),
    )
}


def preset(name: str, **overrides: Any) -> dict[str, Any]:
    """Trainer arguments of a preset: ``Trainer(**preset(name))`` is ``Trainer(strategy=name)``.

    Args:
        name: One of ``presets()``.
        **overrides: Arguments of the strategy in the place of the preset's, for example
            ``find_unused_parameters=True``.

    Returns:
        ``{"strategy": ...}`` with a new strategy object, which brings the precision.

    Raises:
        ValueError: If there is no such preset; names the nearest one.
        TypeError: If an override is no argument of the strategy.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(**preset("single_bf16"), accelerator="cpu", logger=False).precision
        'bf16-mixed'
    """
    check_choice("preset name", name, _TABLE)
    row = _TABLE[name]
    allowed = _arguments(row.strategy)
    if unknown := sorted(overrides.keys() - allowed):
        raise TypeError(f"preset {name!r} has no argument {', '.join(unknown)}; it takes {', '.join(sorted(allowed))}.")
    return {"strategy": row.make(**overrides)}


def presets() -> list[dict[str, Any]]:
    """The presets, one row each: name, strategy, its arguments, precision and when to use it.

    Returns:
        Rows with the keys ``name``, ``strategy``, ``arguments``, ``precision``, ``when``. In YAML the name is a
        strategy; so are ``class_path`` ``lightning_tricks.`` and the row's ``strategy``, its ``arguments`` as
        ``init_args``.

    Example:
        >>> [row["name"] for row in presets() if row["strategy"] == "DDPPreset"]
        ['ddp_bf16', 'ddp_fp16', 'ddp_compressed_bf16']
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
    """Make each name a ``Trainer(strategy=...)`` string; a name that is somebody else's is an error."""
    for name, row in _TABLE.items():
        taken = StrategyRegistry[name]["strategy"] if name in StrategyRegistry else row.make
        if getattr(taken, "__module__", "") != __name__:
            raise RuntimeError(f"The strategy name {name!r} is registered already, by {taken!r}.")
        StrategyRegistry.register(name, row.make, description=row.when, override=True)


def _arguments(strategy: type[PresetStrategy]) -> set[str]:
    """The names that the strategy's constructor understands; DDP hands what it does not know on to torch's."""
    names: set[str] = set()
    for owner in strategy.__mro__:
        if "__init__" in vars(owner):
            parameters = inspect.signature(owner.__init__).parameters  # type: ignore[misc]
            names.update(parameters)
            if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
                break
    if issubclass(strategy, DDPPreset):
        names.update(inspect.signature(DistributedDataParallel.__init__).parameters)
    return names - {"self", "kwargs", "settings", *_NO_OVERRIDES}


_NO_OVERRIDES = {  # what the Trainer or the preset sets
    *("accelerator", "parallel_devices", "precision_plugin", "data_parallel_size", "tensor_parallel_size"),
    *("module", "device", "device_ids", "output_device", "process_group"),
}
