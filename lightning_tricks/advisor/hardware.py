"""The machines to train on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

from lightning_tricks.advisor.environment import devices_here, host_memory
from lightning_tricks.advisor.simulate.devices import DEVICES
from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_range

__all__ = ["Hardware"]


@final
@dataclass(frozen=True)
class Hardware:
    """The devices and nodes to train on, and the links between them.

    Args:
        device_memory: The memory of each device, in bytes.
        devices: The number of devices per node, at least 1.
        nodes: The number of nodes, at least 1.
        links: "fast" (NVLink in a node, InfiniBand between nodes) or "slow" (PCIe, Ethernet); torch cannot detect it.
        host_memory: The memory of each node, in bytes; 0 means that nothing can be offloaded to it.
        nvme: The space on each node's NVMe disk, in bytes; 0 means that there is none.
        bf16: Whether the devices compute in bf16, as Ampere and later do.
        host_is_assumed: Whether ``host_memory`` is that of this machine because no other was given.
        kind: The kind of the devices, with whose data sheet ``suggest_plan`` simulates a step: "a100-40gb", "a100",
            "h100-500w", "h100" or "h200"; None if it is no matter.

    Raises:
        TypeError: If a value has the wrong type.
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
    host_is_assumed: bool = False
    kind: str | None = None

    def __post_init__(self) -> None:
        for name in ("device_memory", "host_memory", "nvme"):
            check_range(name, getattr(self, name), 0)
        check_count("devices", self.devices)
        check_count("nodes", self.nodes)
        check_choice("links", self.links, ("fast", "slow"))
        check_bool("bf16", self.bf16)
        check_bool("host_is_assumed", self.host_is_assumed)
        if self.kind is not None:
            check_choice("kind", self.kind, DEVICES)

    @property
    def world(self) -> int:
        """The number of devices on all nodes."""
        return self.devices * self.nodes

    def batches(self, preset: str) -> int:
        """The number of batches that the devices compute at a time: one each, or one in a node (``tp_bf16``)."""
        return self.nodes if preset == "tp_bf16" else self.world

    def trainer(self, preset: str, accumulate: int) -> dict[str, Any]:
        """The arguments of a Trainer on the devices."""
        sizes = {"devices": self.devices, "num_nodes": self.nodes, "accumulate_grad_batches": accumulate}
        return {"strategy": preset, **sizes}

    @classmethod
    def of(cls, kind: str, **known: Any) -> Hardware:
        """Devices of a kind, with the memory of its data sheet.

        Args:
            kind: "a100-40gb", "a100", "h100-500w", "h100" or "h200".
            **known: Other arguments of ``Hardware``.

        Raises:
            ValueError: If the kind is unknown, or a value is out of range.

        Example:
            >>> Hardware.of("h100", devices=8, nodes=64).world
            512
        """
        check_choice("kind", kind, DEVICES)
        return cls(**{"device_memory": DEVICES[kind].memory, **known, "kind": kind})

    @classmethod
    def detect(cls, **known: Any) -> Hardware:
        """Describe this machine.

        Args:
            **known: Arguments of ``Hardware`` that replace the detected ones.

        Raises:
            ValueError: If there is no CUDA device and ``device_memory`` is not given.
        """
        devices = devices_here()
        detected: dict[str, Any] = {"host_memory": host_memory(), "host_is_assumed": "host_memory" not in known}
        if devices[0].kind == "cuda":
            detected["devices"] = len(devices)
            detected["device_memory"] = min(device.memory for device in devices)
            detected["bf16"] = all(device.bf16 for device in devices)
        elif "device_memory" not in known:
            raise ValueError("No CUDA device is seen here: pass device_memory=, the bytes of each device.")
        return cls(**{**detected, **known})
