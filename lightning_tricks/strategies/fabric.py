"""The presets that Fabric takes by their strings; apart from presets, which are made for a Trainer."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.fabric.connector import _Connector, _convert_precision_to_unified_args
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from typing_extensions import override

from lightning_tricks.core.call_stack import locals_of
from lightning_tricks.strategies.fsdp2.blocks import sharding_groups
from lightning_tricks.strategies.fsdp2.prepare import prepare, require_untied


class FabricPreset(Strategy):
    """A strategy of Fabric that brings its own precision.

    Fabric passes every strategy the plugin made from ``Fabric(precision=...)``, fp32 by default. The setter replaces
    that default and refuses any other precision.

    Args:
        preset: The name of the preset.
        precision: The precision to train in.
        **settings: Arguments of Fabric's strategy.
    """

    def __init__(self, preset: str, precision: Literal["bf16-mixed", "16-mixed"], **settings: Any) -> None:
        self.preset, self.trains_in = preset, precision
        super().__init__(**settings)

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    @override
    def precision(self, plugin: Precision | None) -> None:
        self._precision = plugin
        if plugin is None:
            return
        constructor = locals_of(_Connector.__init__)
        asked = None if constructor is None else _convert_precision_to_unified_args(constructor["precision"])
        given = asked or plugin.precision  # the plugin does not tell a default from a wish
        if given != self.trains_in and (asked or given != "32-true"):
            raise ValueError(
                f"strategy={self.preset!r} trains in {self.trains_in!r}, got precision={given!r}: leave precision= out,"
                f" make it {self.trains_in!r}, or choose another strategy."
            )
        assert self.accelerator is not None, "Fabric sets it before the precision"
        device: torch.device = self.accelerator.get_parallel_devices(self.accelerator.parse_devices(1))[0]
        self._precision = MixedPrecision(self.trains_in, device.type)


class FabricSingle(FabricPreset, SingleDeviceStrategy):
    """One device: ``single_bf16`` and ``single_fp16``."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        """None yet, so that Fabric sets them from ``accelerator=`` and ``devices=``."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"strategy={self.preset!r} trains on one device, got devices={len(devices)}: pass devices=1, or"
                " strategy='ddp_bf16'."
            )
        self._root_device = devices[0]


class FabricDDP(FabricPreset, DDPStrategy):
    """Data parallelism: ``ddp_bf16`` and ``ddp_fp16``."""

    def __init__(self, preset: str, precision: Literal["bf16-mixed", "16-mixed"]) -> None:
        super().__init__(preset, precision, gradient_as_bucket_view=True)


class FabricFSDP2(FabricPreset, ModelParallelStrategy):
    """Fully sharded data parallelism: ``fsdp2_bf16``, with the blocks of the preset of a Trainer."""

    def __init__(self, preset: str, precision: Literal["bf16-mixed", "16-mixed"]) -> None:
        super().__init__(preset, precision, parallelize_fn=self._shard, tensor_parallel_size=1)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        groups = sharding_groups(module)
        require_untied(module)
        for group in [*groups, *([] if isinstance(module, FSDPModule) else [module])]:
            prepare(group, self.root_device)
            fully_shard(group, mesh=mesh["data_parallel"])
        return module


IN_FABRIC: dict[str, type[FabricPreset]] = {
    "single_bf16": FabricSingle,
    "single_fp16": FabricSingle,
    "ddp_bf16": FabricDDP,
    "ddp_fp16": FabricDDP,
    "fsdp2_bf16": FabricFSDP2,
}


def fabric_preset(preset: str, precision: Any) -> FabricPreset:
    """Make the strategy of a preset for Fabric.

    Raises:
        ValueError: For a preset that needs a Trainer.
    """
    if preset not in IN_FABRIC:
        raise ValueError(
            f"strategy={preset!r} needs a Trainer, got a Fabric: take {', '.join(map(repr, IN_FABRIC))}, or a strategy"
            " of Fabric's own, such as DeepSpeedStrategy(stage=2) for ZeRO."
        )
    return IN_FABRIC[preset](preset, precision)
