"""Which strategy: the fastest that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, Literal, final

from torch import nn

from lightning_tricks.advisor.environment import devices_here, host_memory
from lightning_tricks.advisor.memory.estimate import MemoryEstimate, estimate_memory, readable
from lightning_tricks.advisor.memory.states import OptimizerLike
from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_range, check_type

__all__ = ["Hardware", "Suggestion", "suggest_strategy"]


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


DEVICE = "on each device"


def shortage(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> dict[str, float]:
    """The bytes that are missing, by where; empty if it fits."""
    there = {
        DEVICE: (estimate.total, hardware.device_memory),
        "of host memory on each node": (estimate.host, hardware.host_memory),
        "of NVMe disk on each node": (estimate.nvme, hardware.nvme),
    }
    return {
        where: needed - size * (1 - margin) for where, (needed, size) in there.items() if needed > size * (1 - margin)
    }


def why_not(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> str:
    """Why a strategy was passed over."""
    missing = " and ".join(
        f"{readable(size)} more {where}" for where, size in shortage(estimate, hardware, margin).items()
    )
    least = "without activations" if estimate.batch_size is None else "with one sample at a time"
    return f"{estimate.strategy} needs {missing}, even {least}."


def why_it_fits(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> str:
    """How much of the memory the strategy takes."""
    samples = estimate.batch_size
    with_what = "without activations" if samples is None else f"with {samples} sample{'s' * (samples > 1)} at a time"
    said = (
        f"{estimate.strategy} takes {readable(estimate.total)} of {readable(hardware.device_memory)} on each device"
        f" {with_what}, and {margin:.0%} is to stay free"
    )
    if estimate.host:
        said += f"; {readable(estimate.host)} of {readable(hardware.host_memory)} of host memory"
    if estimate.nvme:
        said += f"; {readable(estimate.nvme)} of {readable(hardware.nvme)} of NVMe disk"
    return f"{said}."


def advice(
    estimate: MemoryEstimate,
    hardware: Hardware,
    margin: float,
    failed: Sequence[MemoryEstimate],
    batch_size: int | None,
    accumulate: int,
    narrow: MemoryEstimate | None,
) -> tuple[str, ...]:
    """What else to mind with the strategy that fits; ``narrow`` is the first that failed with 8-bit states."""
    said, micro = [], estimate.batch_size
    if estimate.measured is None:
        said.append("Activations were not counted: pass an example batch.")
    if narrow is not None and not shortage(narrow, hardware, margin):
        said.append(
            f"Optimizer states are {readable(failed[0].optimizer)} of what {narrow.strategy} needs: with an 8-bit"
            " optimizer (optimizer='adamw_8bit') it fits."
        )
    sliced = estimate.strategy.startswith(("fsdp2", "zero3"))
    if sliced and hardware.links == "slow" and hardware.world > 1:
        said.append(
            "Over slow links the weights travel in every forward and backward pass: let a step have many samples, or"
            " keep slices within a node (HSDP) or layers on their device (pipeline), for which there is no preset."
        )
    if micro is not None and estimate.activations > estimate.total / 2 and (accumulate > 1 or failed):
        said.append(
            f"Activations are {readable(estimate.activations)}: activation checkpointing keeps few of them, for about a"
            " fifth to a third more time."
        )
    if estimate.largest_layer > hardware.device_memory / 4:
        said.append(
            f"The largest layer takes {readable(estimate.largest_layer)} by itself: split it (memory-centric tiling,"
            " deepspeed.zero.TiledLinear)."
        )
    if estimate.nvme:
        said.append("Pass the folder on the disk: Trainer(**preset('zero3_nvme_bf16', nvme_path=...)).")
    if estimate.strategy.startswith("zero"):
        said.append("It needs DeepSpeed: pip install 'lightning-tricks[deepspeed]'.")
    effective = None if micro is None else micro * accumulate * hardware.world
    if effective is None or effective == batch_size:
        return tuple(said)
    if batch_size is not None:
        fewer = f": {batch_size} devices are enough" if batch_size < hardware.world else ""
        said.append(f"The devices share {effective} samples a step evenly, not {batch_size}{fewer}.")
    said.append(
        f"An optimizer step sees {effective} sample{'s' * (effective > 1)}: scale the learning rate by it, linearly for"
        " SGD, by the square root for Adam (scale_lr)."
    )
    return tuple(said)


@final
@dataclass(frozen=True)
class Suggestion:
    """What to train with; made by ``suggest_strategy``.

    Args:
        preset: One of ``presets()``.
        hardware: What it was chosen for.
        micro_batch_size: Samples on each device in one forward pass; None if no batch was given.
        accumulate_grad_batches: Forward passes of one optimizer step.
        reasons: Why this one and none before it, with the numbers.
        advice: What else to mind.
        estimate: Its memory.

    Example:
        >>> from lightning_tricks.advisor import Hardware, suggest_strategy
        >>> suggest_strategy(1_000_000, hardware=Hardware(24e9)).trainer
        {'strategy': 'single_bf16', 'devices': 1, 'num_nodes': 1, 'accumulate_grad_batches': 1}
    """

    preset: str
    hardware: Hardware
    micro_batch_size: int | None
    accumulate_grad_batches: int
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    estimate: MemoryEstimate

    @property
    def effective_batch_size(self) -> int | None:
        """Samples of one optimizer step; None if no batch was given."""
        if self.micro_batch_size is None:
            return None
        return self.micro_batch_size * self.accumulate_grad_batches * self.hardware.world

    @property
    def trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer."""
        return {
            "strategy": self.preset,
            "devices": self.hardware.devices,
            "num_nodes": self.hardware.nodes,
            "accumulate_grad_batches": self.accumulate_grad_batches,
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        batch = {"micro_batch_size": self.micro_batch_size, "effective_batch_size": self.effective_batch_size}
        words = {"reasons": list(self.reasons), "advice": list(self.advice)}
        return {**self.trainer, **batch, **words, "estimate": self.estimate.to_dict()}

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.trainer.items())
        batch = [] if self.micro_batch_size is None else [f"DataLoader(batch_size={self.micro_batch_size})"]
        return "\n".join([f"Trainer({arguments})", *batch, *self.reasons, *self.advice])


def suggest_strategy(
    model: nn.Module | int,
    *,
    hardware: Hardware | None = None,
    batch: Any = None,
    batch_size: int | None = None,
    optimizer: OptimizerLike = "adamw",
    margin: float = 0.1,
) -> Suggestion:
    """The fastest strategy preset that fits the memory there is, with batch size and accumulation.

    In this order, the first that fits with at least one sample on each device: one device: whole; optimizer in host
    memory; weights, too; on a disk. Several devices: whole on each (DDP, which sends compressed gradients over slow
    links); in slices (FSDP2; over slow links ZeRO-1 and ZeRO-2 before it, which send no more than DDP); then with host
    memory and disk as above. Then as many samples at a time as fit, up to the device's share of ``batch_size``, which
    accumulation makes up.

    Args:
        model: A module or a plain count of parameters, as for ``estimate_memory``.
        hardware: What to train on; None: this machine.
        batch: An example batch for activations; without one they are not counted, and the margin must hold them.
        batch_size: Samples of an optimizer step, over all devices; None: as many as fit at a time. It needs ``batch``.
        optimizer: As for ``estimate_memory``.
        margin: The part of the memory to leave free, in [0, 1): for kernels and what an allocator leaves in pieces.

    Raises:
        ValueError: If nothing fits; says what is missing. As ``estimate_memory`` does.

    Example:
        >>> suggestion = suggest_strategy(7_000_000_000, hardware=Hardware(80e9, devices=8, host_memory=1e12))
        >>> suggestion.preset
        'fsdp2_bf16'
    """
    check_type("hardware", hardware, Hardware, NoneType)
    hardware = hardware or Hardware.detect()
    check_range("margin", margin, 0.0, 1.0, below=True)
    if batch_size is not None:
        check_count("batch_size", batch_size)
        if batch is None:
            raise ValueError(f"batch_size={batch_size} needs batch=: an example batch, of any size.")

    def least(name: str, optimizer: OptimizerLike) -> MemoryEstimate:
        """With one sample at a time; not measured if it does not fit without any."""
        estimated = partial(
            estimate_memory, model, strategy=name, optimizer=optimizer, devices=hardware.devices, nodes=hardware.nodes
        )
        bare = estimated()
        return bare if batch is None or shortage(bare, hardware, margin) else estimated(batch=batch).with_batch(1)

    failed: list[MemoryEstimate] = []
    for name in candidates(hardware):
        estimate = least(name, optimizer)
        if shortage(estimate, hardware, margin):
            failed.append(estimate)
            continue
        micro, accumulate = _batches(estimate, hardware, batch_size, margin)
        estimate = estimate if micro is None else estimate.with_batch(micro)
        reasons = [*(why_not(each, hardware, margin) for each in failed), why_it_fits(estimate, hardware, margin)]
        narrow = least(failed[0].strategy, "adamw_8bit") if failed else None
        said = advice(estimate, hardware, margin, failed, batch_size, accumulate, narrow)
        return Suggestion(name, hardware, micro, accumulate, tuple(reasons), said, estimate)
    raise ValueError(_nothing_fits(failed, hardware, margin))


def candidates(hardware: Hardware) -> list[str]:
    """Names of presets, the fastest first."""
    one, slow = hardware.world == 1, hardware.links == "slow"
    if not hardware.bf16:
        whole = ["single_fp16"] if one else ["ddp_fp16"]
        sliced = [] if one else ["zero2_fp16", "zero3_fp16"]
        return [*whole, *sliced, "zero2_offload_fp16", "zero3_offload_fp16"]
    if one:
        whole, sliced = ["single_bf16"], []
    elif slow:
        whole, sliced = ["ddp_compressed_bf16"], ["zero1_bf16", "zero2_bf16", "fsdp2_bf16"]
    else:
        whole, sliced = ["ddp_bf16"], ["fsdp2_bf16"]
    return [*whole, *sliced, "zero2_offload_bf16", "zero3_offload_bf16", "zero3_nvme_bf16"]


def _batches(
    estimate: MemoryEstimate, hardware: Hardware, batch_size: int | None, margin: float
) -> tuple[int | None, int]:
    """Samples at a time on each device, and how many times."""
    if estimate.measured is None:
        return None, 1
    most = estimate.largest_batch(hardware.device_memory * (1 - margin))
    if batch_size is None:
        return (most - most % 8 if most > 8 else most), 1  # sizes that tensor cores like
    share = max(1, -(-batch_size // hardware.world))
    times = -(-share // most)
    return -(-share // times), times


def _nothing_fits(failed: list[MemoryEstimate], hardware: Hardware, margin: float) -> str:
    shortages = [shortage(estimate, hardware, margin) for estimate in failed]
    lacking = min(shortages, key=lambda missing: (missing.get(DEVICE, 0), sum(missing.values())))
    last = failed[shortages.index(lacking)]
    missing = " and ".join(f"{readable(size)} {where}" for where, size in lacking.items())
    remedy = "Use more devices"
    if DEVICE not in lacking:
        remedy += ", more host memory, or an NVMe disk (nvme=)" if last.nvme == 0 else ", or a larger disk"
    remedy += ", or train fewer of the weights (LoRA)"
    if last.activations > hardware.device_memory / 4:
        remedy += ", or activation checkpointing"
    if last.largest_layer > hardware.device_memory / 4:
        remedy += (
            f". The largest layer alone takes {readable(last.largest_layer)}: split it (memory-centric tiling,"
            " deepspeed.zero.TiledLinear, or tensor parallelism with ModelParallelStrategy)"
        )
    return f"Nothing fits. Nearest is {last.strategy}, for which {missing} is missing. {remedy}."
