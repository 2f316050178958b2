"""One device, one process."""

from __future__ import annotations

from typing import Any, final

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.strategies.precision import FixedPrecision


@final
class SingleBF16(FixedPrecision, SingleDeviceStrategy):
    """One device, whichever the accelerator gives, in bf16-mixed."""

    strategy_name = "single_bf16"
    precision = "bf16-mixed"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._parallel_devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device, set by the Trainer from ``accelerator=`` and ``devices=``."""
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
