"""The seconds of a collective: rings over the devices of nodes, whose links and network cards work at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """What is between devices: bytes a second that a device sends, and the seconds until the first one arrives.

    Args:
        inside: Bytes a second within a node.
        between: Bytes a second of the network, for each device.
        inside_latency: Seconds of a step of a ring within a node.
        between_latency: Seconds of a step between nodes.
    """

    inside: float
    between: float
    inside_latency: float = 3.4e-6
    between_latency: float = 14e-6


def gather(size: float, per_node: int, nodes: int, links: Links) -> float:
    """Seconds in which every device has all ``size`` bytes of which each held a part; a reduce-scatter is the same.

    Every device receives ``size (n - 1) / n`` bytes from its neighbour, and every node ``size (1 - 1 / nodes)`` through
    the network cards of those of its devices that take part; a ring has ``n - 1`` steps, of which ``nodes - 1`` are
    between nodes.

    Args:
        size: The bytes of all parts together.
        per_node: The devices of a node that take part.
        nodes: The nodes.
        links: The links of the devices.

    Example:
        >>> gather(8e9, per_node=8, nodes=1, links=Links(1e9, 1e9, 0, 0))
        7.0
        >>> gather(8e9, per_node=1, nodes=8, links=Links(1e9, 1e9, 0, 0))
        7.0
        >>> gather(8e9, per_node=4, nodes=2, links=Links(1e9, 5e8, 0, 0))  # 4e9 bytes through four cards, all at once
        7.0
    """
    devices = per_node * nodes
    inside = size * (devices - 1) / devices / links.inside if per_node > 1 else 0.0
    between = size * (1 - 1 / nodes) / (per_node * links.between)
    steps = (nodes - 1) * links.between_latency + (devices - nodes) * links.inside_latency
    return max(inside, between) + steps


def all_reduce(size: float, per_node: int, nodes: int, links: Links) -> float:
    """Seconds of a sum over devices: a reduce-scatter and a gather.

    Example:
        >>> all_reduce(8e9, per_node=8, nodes=1, links=Links(1e9, 1e9, 0, 0))
        14.0
    """
    return 2 * gather(size, per_node, nodes, links)


def pipeline_bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The idle time of a pipeline over its busy time: ``(p - 1) / (m v)``.

    Of all the time, ``(p - 1) / (m + p - 1)`` is idle where a stage has one chunk of layers (GPipe, 1F1B).

    Args:
        stages: The stages p.
        micro_batches: The micro-batches m of an optimizer step.
        chunks: The chunks v of layers that a stage has, one after the other (interleaved 1F1B).

    Example:
        >>> pipeline_bubble(4, 12)
        0.25
        >>> pipeline_bubble(4, 12, chunks=2)
        0.125

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473.
    """
    return (stages - 1) / (micro_batches * chunks)
