"""Strategies that bring their precision along, so that one string says both."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch.accelerators import CPUAccelerator, MPSAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.trainer import requested_precision


class FixedPrecision(Strategy):
    """Base of a strategy whose precision is part of its name.

    Lightning hands every strategy the plugin that it made from ``Trainer(precision=...)``, fp32 if none was given. This
    setter puts the preset's own in the place of that default and refuses anything else that differs.
    """

    strategy_name: str
    precision: Literal["bf16-mixed"]

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        asked = requested_precision()  # not only the plugin counts: on CPU it says "bf16-mixed" for an asked "16-mixed"
        if plugin is not None and asked is None and type(plugin) is Precision:
            plugin = MixedPrecision(self.precision, self._device_type())
        elif plugin is not None and (asked or plugin.precision) != self.precision:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} trains in {self.precision!r}, got precision="
                f"{asked or plugin.precision!r}. Leave precision= out, or choose another strategy."
            )
        self._precision_plugin = plugin

    def _device_type(self) -> str:
        if isinstance(self.accelerator, CPUAccelerator):
            return "cpu"
        return "mps" if isinstance(self.accelerator, MPSAccelerator) else "cuda"
