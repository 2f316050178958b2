"""What there is to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from lightning_tricks.advisor.environment import devices_here, host_memory
from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_range


@final
@dataclass(frozen=True)
class Hardware:
    """Devices, nodes and the links between them.

    Args:
        device_memory: Bytes of each device.
        devices: Of each node.
        nodes: Machines.
        links: "fast" (NVLink in a node, InfiniBand between nodes) or "slow" (PCIe, Ethernet); torch does not tell.
        host_memory: Bytes of each node's memory; 0: nothing can be offloaded.
        nvme: Bytes of each node's NVMe disk; 0: none.
        bf16: Whether the devices compute in bf16 (Ampere and later do).

    Raises:
        ValueError: If a value is out of range.

    Example:
        >>> Hardware(device_memory=24e9, devices=8).world
        8
    """

    device_memory: float
    devices: int = 1
    nodes: int = 1
    links: Literal["fast", "slow"] = "fast"
    host_memory: float = 0
    nvme: float = 0
    bf16: bool = True

    def __post_init__(self) -> None:
        for name in ("device_memory", "host_memory", "nvme"):
            check_range(name, getattr(self, name), 0)
        check_count("devices", self.devices)
        check_count("nodes", self.nodes)
        check_choice("links", self.links, ("fast", "slow"))
        check_bool("bf16", self.bf16)

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.devices * self.nodes

    @classmethod
    def detect(cls, **known: Any) -> Hardware:
        """This machine's, with what is ``known`` in the place of what is found.

        Args:
            **known: Arguments of ``Hardware``.

        Raises:
            ValueError: If the memory of a device is not known: without CUDA.
        """
        devices = devices_here()
        found: dict[str, Any] = {"host_memory": host_memory()}
        if devices[0].kind == "cuda":
            found["devices"] = len(devices)
            found["device_memory"] = min(device.memory for device in devices)
            found["bf16"] = all(device.bf16 for device in devices)
        elif "device_memory" not in known:
            raise ValueError("No CUDA device is seen here: pass device_memory= in bytes, of the hardware to train on.")
        return cls(**{**found, **known})
