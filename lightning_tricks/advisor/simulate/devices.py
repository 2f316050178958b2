"""What data sheets say of devices and links, and the share of it that training reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_tricks.advisor.simulate.traffic import Links

LINK_SHARE = 0.75  # of a link's bytes a second that collectives reach
PCIE, ETHERNET = 32e9, 12.5e9  # bytes a second of PCIe 4.0 x16, and of a node's card of 100 Gb/s


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        peak: Dense operations a second in bf16, of the data sheet.
        peak_float8: Dense operations a second in float8; 0 if it has none.
        memory: Bytes of its memory.
        bandwidth: Bytes a second of its memory.
        link: Bytes a second that it sends to other devices of its node, in one direction.
        network: Bytes a second of a network card, one for each device in nodes of this kind.
        products: The share of ``peak`` that products of matrices reach.
        attention: The share of ``peak`` that the products within attention reach.
    """

    peak: float
    peak_float8: float
    memory: float
    bandwidth: float
    link: float
    network: float
    products: float
    attention: float


# Data sheets of NVIDIA's A100, H100 and H200 (SXM), half of the figures with sparsity, and half of NVLink's for both
# directions; cards of 200 and 400 Gb/s, as DGX A100 and DGX H100 have. The H100 of 500 W is torchtitan's, with 96 GB
# of HBM2e and less power.
DEVICES = {
    "a100-40gb": Device(312e12, 0, 40e9, 1.555e12, 300e9, 25e9, products=0.71, attention=0.6),
    "a100": Device(312e12, 0, 80e9, 2.039e12, 300e9, 25e9, products=0.71, attention=0.6),
    "h100-500w": Device(989e12, 1979e12, 96e9, 2.4e12, 450e9, 50e9, products=0.545, attention=0.2),
    "h100": Device(989e12, 1979e12, 80e9, 3.35e12, 450e9, 50e9, products=0.615, attention=0.2),
    "h200": Device(989e12, 1979e12, 141e9, 4.8e12, 450e9, 50e9, products=0.615, attention=0.2),
}


def links_of(device: Device, per_node: int = 8, links: Literal["fast", "slow"] = "fast") -> Links:
    """The links of a device with what collectives reach of them.

    Args:
        device: The kind of device.
        per_node: The devices of a node, which share its card where links are slow.
        links: "fast" for NVLink and a card of InfiniBand for each device; "slow" for PCIe 4.0, and 100 Gb/s of Ethernet
            for a node.

    Example:
        >>> links_of(DEVICES["h100"]).between  # three quarters of 50 GB/s
        37500000000.0
    """
    inside, between = (device.link, device.network) if links == "fast" else (PCIE, ETHERNET / per_node)
    return Links(LINK_SHARE * inside, LINK_SHARE * between)
