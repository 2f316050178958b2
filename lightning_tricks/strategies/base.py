"""What all strategies of presets have in common: they bring their precision along, so that one string says both."""

from __future__ import annotations

import os
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_tricks.core.checks import check_choice
from lightning_tricks.core.lightning.trainer import requested_precision, saves_folder
from lightning_tricks.core.trick import announce

PresetPrecision = Literal["bf16-mixed", "16-mixed", "32-true"]


class PresetStrategy(Strategy):
    """Base of a strategy whose precision is an argument of its own.

    Lightning hands every strategy the plugin that it made from ``Trainer(precision=...)``, fp32 if none was given. The
    setter puts the strategy's own in the place of that default and refuses anything else that differs.

    Args:
        precision: What the strategy trains in.
        **settings: Arguments of Lightning's strategy.
    """

    precisions: tuple[str, ...] = ("bf16-mixed", "16-mixed", "32-true")

    def __init__(self, *, precision: PresetPrecision, **settings: Any) -> None:
        check_choice("precision", precision, self.precisions)
        self.precision = precision
        self.strategy_name = type(self).__name__  # unless it is made by a preset, which has a name
        super().__init__(**settings)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            own, given = self.make_precision_plugin(), plugin.precision
            # not only the plugin counts: on CPU it is bf16's for an asked "16-mixed"
            asked = requested_precision() or (self.precision if given == "32-true" else given)
            if asked != self.precision:
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} trains in {self.precision!r}, got precision={asked!r}."
                    " Leave precision= out, or choose another strategy."
                )
            if given != self.precision:
                plugin = own
            elif not isinstance(plugin, type(own)):
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} works with a {type(own).__name__}, got the plugin"
                    f" {type(plugin).__name__}. Leave the plugin out."
                )
        self._precision_plugin = plugin

    @override
    def connect(self, model: pl.LightningModule) -> None:
        sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        partitioned = [each for each in model.parameters() if hasattr(each, "ds_id")]
        by = "FSDP2" if sharded and not isinstance(self, ModelParallelStrategy) else ""
        by = "DeepSpeed" if partitioned and not isinstance(self, DeepSpeedStrategy) else by
        if by:
            raise MisconfigurationException(
                f"{type(model).__name__} was sharded by {by} in an earlier run and stays so, got"
                f" strategy={self.strategy_name!r}. Make the module anew, and load its weights from a checkpoint."
            )
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            announce(self.lightning_module.trainer)

    @property
    @override
    def launcher(self) -> Any:
        return None if self.alone else super().launcher  # nothing to launch, in a notebook either

    @property
    def alone(self) -> bool:
        """Whether there is one process only."""
        return getattr(self, "num_nodes", 1) * getattr(self, "num_processes", 1) == 1

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        if os.path.isdir(checkpoint_path) and not saves_folder(self.lightning_module.trainer):
            raise MisconfigurationException(
                f"ckpt_path={str(checkpoint_path)!r} is a folder of shards, and strategy={self.strategy_name!r} loads"
                " one file. Resume by a preset like the one that saved it, or make its weights one file, with"
                " lightning-tricks consolidate, and load that into the module."
            )
        return super().load_checkpoint(checkpoint_path, weights_only)

    def make_precision_plugin(self) -> Precision:
        """The plugin for this precision on the accelerator of the Trainer."""
        if self.precision == "32-true":
            return Precision()
        return MixedPrecision(self.precision, self.device_type)

    @property
    def device_type(self) -> str:
        """The type of the Trainer's devices, as torch names it."""
        if isinstance(self.accelerator, CPUAccelerator):
            return "cpu"
        return "mps" if isinstance(self.accelerator, MPSAccelerator) else "cuda"
