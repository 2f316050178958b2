"""What strategies lack, and what is said of those that fit and of those that do not."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_tricks.advisor.hardware import Hardware
from lightning_tricks.advisor.memory.estimate import MemoryEstimate
from lightning_tricks.core.install import pip_install
from lightning_tricks.core.report import readable

DEVICE = "on each device"
UNLIMITED = 1e18  # bytes
LARGE = 10**9  # parameters of models whose products are large enough for float8
PIPELINE = "pipeline, which sends activations instead of weights (the recipe is in docs/scaling.md)"
SPLIT = (
    "split it among devices (preset('tp_bf16', plan=...)), or into tiles that ZeRO-3 gathers one after the other"
    " (deepspeed.zero.TiledLinear, with the settings in docs/scaling.md)"
)


def shortage(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> dict[str, float]:
    """The missing bytes by kind of memory; empty if the estimate fits."""
    usable = 1 - margin
    needed_and_available = {
        DEVICE: (estimate.total, hardware.device_memory * usable),
        "of host memory on each node": (estimate.host, hardware.host_memory * usable),
        "of NVMe disk on each node": (estimate.nvme, hardware.nvme * usable),
    }
    return {
        kind: needed - available for kind, (needed, available) in needed_and_available.items() if needed > available
    }


def why_not(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> str:
    """Say why a strategy does not fit."""
    missing = " and ".join(
        f"{readable(size)} more {kind}" for kind, size in shortage(estimate, hardware, margin).items()
    )
    smallest = "without activations" if estimate.batch_size is None else "with one sample at a time"
    recomputed = " and with ActivationCheckpointing()" if estimate.recomputes else ""
    return f"{estimate.strategy} needs {missing}, even {smallest}{recomputed}."


def why_it_fits(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> str:
    """Say how much of the memory the strategy takes."""
    samples = estimate.batch_size
    batch = "without activations" if samples is None else f"with {samples} sample{'s' * (samples > 1)} at a time"
    text = (
        f"{estimate.strategy} takes {readable(estimate.total)} of {readable(hardware.device_memory)} on each device"
        f" {batch}, and {margin:.0%} must stay free"
    )
    if estimate.host:
        of = f" of {readable(hardware.host_memory)}" if hardware.host_memory < UNLIMITED else ""
        text += f"; {readable(estimate.host)}{of} of host memory on each node"
    if estimate.nvme:
        text += f"; {readable(estimate.nvme)} of {readable(hardware.nvme)} of NVMe disk"
    return f"{text}."


def advice(
    estimate: MemoryEstimate,
    hardware: Hardware,
    margin: float,
    failed: Sequence[MemoryEstimate],
    batch_size: int | None,
    accumulate: int,
    size: int,
) -> tuple[str, ...]:
    """Give further advice on the strategy that fits.

    Args:
        estimate: The memory of the strategy.
        hardware: The devices to train on.
        margin: The fraction of the memory to leave free.
        failed: The memory of the faster strategies, which do not fit.
        batch_size: The requested number of samples of an optimizer step.
        accumulate: The number of batches of an optimizer step.
        size: The number of parameters of the model.
    """
    texts, micro = [], estimate.batch_size
    if estimate.measured is None:
        texts.append("Activations were not counted: that takes a model and an example batch.")
    if hardware.world > 1 and hardware.links == "fast":
        texts.append("Links are taken to be fast (NVLink, InfiniBand): for PCIe or Ethernet, set links='slow'.")
    elif hardware.world > 1 and estimate.strategy.startswith(("fsdp2", "zero3")):
        pipeline = f", or a {PIPELINE}" if hardware.nodes > 1 else ""
        texts.append(
            "Over slow links the weights are sent in every forward and backward pass: use many samples per step"
            f"{pipeline}."
        )
    elif estimate.strategy == "ddp_compressed_bf16" and hardware.nodes > 1:
        texts.append(
            "Where sending gradients in 16 bits still takes longer than a step (Ethernet, several sites),"
            f" strategy='ddp_diloco_bf16' sends weights every 100 steps, for {readable(8 * size)} more on each device."
        )
    if hardware.world > 8:
        texts.append("Presets by their simulated tokens a second: suggest_plan, or --device (docs/scaling.md).")
    if size >= LARGE and hardware.bf16 and not estimate.strategy.startswith("zero3"):
        texts.append("On Ada, Hopper and later, callbacks=[Float8(), Compile()] may be faster. It saves no memory.")
    if micro is not None and estimate.activations > estimate.total / 2 and (accumulate > 1 or failed):
        texts.append(
            f"Activations are {readable(estimate.activations)}: activation checkpointing keeps few of them, for about a"
            " fifth to a third more time."
        )
    if estimate.largest_layer > hardware.device_memory / 4:
        texts.append(f"The largest layer takes {readable(estimate.largest_layer)} by itself: {SPLIT}.")
    if estimate.nvme:
        texts.append("Pass the folder on the disk: Trainer(**preset('zero3_nvme_bf16', nvme_path=...)).")
    if estimate.strategy.startswith("zero"):
        texts.append(f"It needs DeepSpeed: {pip_install('deepspeed')}.")
    batches = hardware.batches(estimate.strategy)
    effective = None if micro is None else micro * accumulate * batches
    if effective is None or effective == batch_size:
        return tuple(texts)
    if batch_size is not None:
        fewer = f": {batch_size} devices are enough" if batch_size < batches == hardware.world else ""
        texts.append(f"The devices can share {effective} samples per step evenly, not {batch_size}{fewer}.")
    texts.append(
        f"An optimizer step sees {effective} sample{'s' * (effective > 1)}: scale the learning rate accordingly,"
        " linearly for SGD, by the square root for Adam (scale_lr)."
    )
    return tuple(texts)


def nothing_fits(failed: list[MemoryEstimate], hardware: Hardware, margin: float) -> str:
    """Say what is missing, and what would help."""
    shortages = [shortage(estimate, hardware, margin) for estimate in failed]
    smallest = min(shortages, key=lambda missing: (missing.get(DEVICE, 0), sum(missing.values())))
    nearest = failed[shortages.index(smallest)]
    missing = " and ".join(f"{readable(size)} {kind}" for kind, size in smallest.items())
    remedy = "Use more devices"
    if DEVICE not in smallest:
        remedy += ", more host memory, or an NVMe disk (nvme=)" if nearest.nvme == 0 else ", or a larger disk"
    if hardware.world > 1:
        remedy += f", or a {PIPELINE}"
    remedy += ", or train fewer of the weights (LoRA)"
    if nearest.activations > hardware.device_memory / 4:
        remedy += ", or use activation checkpointing, or split layers by a plan (preset('tp_bf16', plan=...))"
    if nearest.largest_layer > hardware.device_memory / 4:
        remedy += f". The largest layer alone takes {readable(nearest.largest_layer)}: {SPLIT}"
    return f"Nothing fits. Nearest is {nearest.strategy}, for which {missing} is missing. {remedy}."
