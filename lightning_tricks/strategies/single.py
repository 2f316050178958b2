"""The strategy for one device in one process."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy

__all__ = ["SinglePreset"]


@final
class SinglePreset(PresetStrategy, SingleDeviceStrategy):
    """One device of any accelerator: the presets ``single_bf16`` and ``single_fp16``.

    Args:
        precision: The precision to train in: "bf16-mixed", "16-mixed" or "32-true".
        async_save: Whether training goes on while the checkpoints of ``ModelCheckpoint`` are written, from a copy in
            host memory; see ``docs/strategies.md``.
        **settings: Further arguments of Lightning's ``SingleDeviceStrategy``.

    Example:
        >>> import lightning as L
        >>> L.Trainer(strategy=SinglePreset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
    """

    def __init__(self, *, precision: PresetPrecision = "bf16-mixed", async_save: bool = False, **settings: Any) -> None:
        super().__init__(precision=precision, async_save=async_save, **settings)
        self._parallel_devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """A list of the one device, set by the Trainer from ``accelerator=`` and ``devices=``."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} trains on one device, got devices={len(devices)}."
                " Pass devices=1, or strategy='ddp_bf16'."
            )
        self._parallel_devices = devices
        self._root_device = devices[0]
