"""What a suggestion says: sentences with the numbers in them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tricks.advisor.estimate import MemoryEstimate, readable
from lightning_tricks.advisor.hardware import Hardware

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
