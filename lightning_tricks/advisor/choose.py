"""Choosing the fastest strategy preset that fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from types import NoneType
from typing import Any, NamedTuple, final

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks.advisor.hardware import Hardware
from lightning_tricks.advisor.memory.estimate import MemoryEstimate, estimate_memory
from lightning_tricks.advisor.memory.states import SETTINGS, OptimizerLike
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.core.adapters.inject import adaptable_linear
from lightning_tricks.core.checks import check_count, check_range, check_type
from lightning_tricks.core.install import pip_install
from lightning_tricks.core.report import readable
from lightning_tricks.optimizers.table import row_of
from lightning_tricks.strategies.fsdp2.plan import planned_layers

__all__ = ["Suggestion", "suggest_strategy"]


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


DENSE = ("single", "ddp")  # The presets with a full model on each device, which nf4 and int8 weights need.


class Alternative(NamedTuple):
    """Another way to make a model fit.

    Args:
        change: What to change in the training, as an argument or a callback.
        strategy: The fastest preset that fits with the change, or the fastest of all if none does.
        total: The bytes on each device at the peak.
        fits: Whether that fits.
    """

    change: str
    strategy: str
    total: int
    fits: bool

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"With {self.change}, {self.strategy} takes {readable(self.total)} on each device: {fits}."


@final
@dataclass(frozen=True)
class Suggestion:
    """A strategy preset with batch size and accumulation, as returned by ``suggest_strategy``.

    Args:
        preset: The name of the preset, one of ``presets()``.
        hardware: The hardware that it was chosen for.
        micro_batch_size: The number of samples on each device in a forward pass; None if no batch was given.
        accumulate_grad_batches: The number of forward passes per optimizer step.
        reasons: Why this preset fits and faster ones do not, with numbers.
        advice: Further advice.
        estimate: The estimated memory of the preset.
        alternatives: Changes of the training with which a faster preset might fit; empty if the fastest one fits.
        faster: The estimated memory of the faster presets, which do not fit.

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
    alternatives: tuple[Alternative, ...] = ()
    faster: tuple[MemoryEstimate, ...] = ()

    @property
    def effective_batch_size(self) -> int | None:
        """The number of samples of an optimizer step; None if no batch was given."""
        if self.micro_batch_size is None:
            return None
        return self.micro_batch_size * self.accumulate_grad_batches * self.hardware.batches(self.preset)

    @property
    def trainer(self) -> dict[str, Any]:
        """The arguments of the Trainer."""
        return {
            "strategy": self.preset,
            "devices": self.hardware.devices,
            "num_nodes": self.hardware.nodes,
            "accumulate_grad_batches": self.accumulate_grad_batches,
        }

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        return {
            **self.trainer,
            "micro_batch_size": self.micro_batch_size,
            "effective_batch_size": self.effective_batch_size,
            "reasons": list(self.reasons),
            "advice": list(self.advice),
            "alternatives": [alternative._asdict() for alternative in self.alternatives],
            "estimate": self.estimate.to_dict(),
        }

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.trainer.items())
        batch = [] if self.micro_batch_size is None else [f"DataLoader(batch_size={self.micro_batch_size})"]
        return "\n".join([f"Trainer({arguments})", *batch, *self.reasons, *self.advice, *map(str, self.alternatives)])

    def rows(self) -> list[tuple[str, str, str, str]]:
        """A row for all that was considered: preset, bytes on each device, whether it fits, and the change or lack."""
        failed = ((each, each.strategy, why) for each, why in zip(self.faster, self.reasons, strict=False))
        found = [(name, readable(each.total), "no", why.removeprefix(f"{name} ")) for each, name, why in failed]
        found.append((self.preset, readable(self.estimate.total), "yes", "suggested"))
        changed = ((each, "yes" if each.fits else "no") for each in self.alternatives)
        return found + [(each.strategy, readable(each.total), fits, f"with {each.change}") for each, fits in changed]


def suggest_strategy(
    model: nn.Module | int,
    *,
    hardware: Hardware | None = None,
    batch: Any = None,
    batch_size: int | None = None,
    optimizer: OptimizerLike = "adamw",
    margin: float = 0.1,
) -> Suggestion:
    """Suggest the fastest strategy preset that fits into memory, with batch size and accumulation.

    It takes the first preset that fits with at least one sample on each device. On one device these are: everything on
    the device; optimizer states in host memory; weights in host memory, too; all on a disk. On several devices: a full
    model on each (DDP, with compressed gradients over slow links); sharded (FSDP2; over slow links first ZeRO-1 and
    ZeRO-2, which send no more than DDP, and on several nodes HSDP); over fast links with split layers (tensor
    parallelism, for a model of transformers with a plan of its own); with weights in 16 bits (ZeRO-3); then offloaded
    as above. Then it takes as many samples at a time as fit, up to the device's share of ``batch_size``; accumulation
    does the rest.

    Args:
        model: A module or a number of parameters, as for ``estimate_memory``.
        hardware: The devices to train on; by default those of this machine.
        batch: An example batch to measure activations with. Without it they are not counted and must fit into the
            margin.
        batch_size: The number of samples of an optimizer step over all devices, by default as many as fit at a time.
            It needs ``batch``.
        optimizer: The optimizer, as for ``estimate_memory``; presets that refuse a name are passed over.
        margin: The fraction of the memory to leave free, in [0, 1), for kernels and fragmentation.

    Raises:
        TypeError: As ``estimate_memory``.
        ValueError: If nothing fits; the message says what is missing, and what fits with another optimizer or with
            adapters. Where host memory was assumed to be this machine's, it is no limit. Also as ``estimate_memory``.

    Example:
        >>> suggestion = suggest_strategy(7_000_000_000, hardware=Hardware(80e9, devices=8, host_memory=1e12))
        >>> suggestion.preset
        'fsdp2_bf16'
    """
    check_type("hardware", hardware, Hardware, NoneType)
    check_range("margin", margin, 0.0, 1.0, below=True)
    if batch_size is not None:
        check_count("batch_size", batch_size)
        if batch is None:
            raise ValueError(f"batch_size={batch_size} needs batch=, an example batch of any size.")
    if hardware is None:
        try:
            hardware = Hardware.detect()
        except ValueError as error:
            raise ValueError(f"hardware=None: {error}") from error

    possible = [name for name in candidates(hardware) if name != "tp_bf16" or _can_split(model, hardware.devices)]
    refused = [name for name in possible if isinstance(optimizer, str) and refuses(optimizer, name)]
    names = [name for name in possible if name not in refused]

    def first_that_fits(machines: Hardware) -> tuple[MemoryEstimate | None, list[MemoryEstimate]]:
        """The memory of the first preset that fits, and that of the presets before it."""
        failed: list[MemoryEstimate] = []
        for name in names:
            estimate = _smallest_estimate(model, batch, machines, margin, name, optimizer)
            if not shortage(estimate, machines, margin):
                return estimate, failed
            failed.append(estimate)
        return None, failed

    machines = hardware
    found, failed = first_that_fits(machines)
    others = alternatives(
        model,
        failed,
        optimizer,
        partial(_smallest_estimate, model, batch, hardware, margin),
        lambda estimate: not shortage(estimate, hardware, margin),
    )
    size = model if isinstance(model, int) else sum(weight.numel() for weight in model.parameters())
    if failed and hardware.bf16:
        others += _split(size, hardware, margin, optimizer, "tp_bf16" in possible)
    if found is None and hardware.host_is_assumed:
        machines = replace(hardware, host_memory=UNLIMITED)
        found, failed = first_that_fits(machines)
    if found is None:
        left_out = f" {', '.join(refused)} refuse optimizer={optimizer!r}: another may fit there." if refused else ""
        raise ValueError(" ".join([_nothing_fits(failed, hardware, margin) + left_out, *map(str, others)]))
    micro, accumulate = _batches(found, hardware, batch_size, margin)
    found = found if micro is None else found.with_batch(micro)
    reasons = [*(why_not(faster, machines, margin) for faster in failed)]
    if found.recomputes:
        reasons.append(
            f"{found.strategy} needs callbacks=[ActivationCheckpointing()]: without it, every device keeps 16-bit"
            " copies of all weights from the forward to the backward pass."
        )
    reasons.append(why_it_fits(found, machines, margin))
    if found.host and hardware.host_is_assumed:
        suffices = "" if machines is hardware else " and is too little: train on a machine with more"
        if suffices and any(other.fits for other in others):
            suffices += ", or with a change below that fits"
        reasons.append(
            f"This machine's host memory of {readable(hardware.host_memory)} was assumed{suffices} (host_memory=)."
        )
    texts = advice(found, hardware, margin, failed, batch_size, accumulate, size)
    return Suggestion(found.strategy, hardware, micro, accumulate, tuple(reasons), texts, found, others, tuple(failed))


def _smallest_estimate(
    model: nn.Module | int,
    batch: Any,
    hardware: Hardware,
    margin: float,
    strategy: str,
    optimizer: OptimizerLike,
    lora: LoRA | None = None,
) -> MemoryEstimate:
    """The memory with one sample at a time; without activations if not even the rest fits."""
    estimate = partial(
        estimate_memory,
        model,
        strategy=strategy,
        optimizer=optimizer,
        devices=hardware.devices,
        nodes=hardware.nodes,
        lora=lora,
    )
    without_batch = _recomputed_if_needed(estimate(), hardware, margin)
    if batch is None or shortage(without_batch, hardware, margin):
        return without_batch
    return _recomputed_if_needed(estimate(batch=batch).with_batch(1), hardware, margin)


def recomputed(estimate: MemoryEstimate) -> MemoryEstimate:
    """The same estimate with activation checkpointing, but for the activations.

    Under FSDP2 a block that is computed again frees the 16-bit copies of its weights with its activations.
    """
    if not estimate.strategy.startswith(("fsdp2", "hsdp", "tp")):
        return replace(estimate, recomputes=True)
    copies = min(estimate.casts, estimate.gathered // 2)  # of the blocks that are gathered at a time
    return replace(estimate, casts=copies, recomputes=True)


def _recomputed_if_needed(estimate: MemoryEstimate, hardware: Hardware, margin: float) -> MemoryEstimate:
    """The same estimate, or that with activation checkpointing under FSDP2 if it does not fit."""
    sharded = estimate.strategy.startswith(("fsdp2", "hsdp", "tp"))
    return recomputed(estimate) if sharded and shortage(estimate, hardware, margin) else estimate


def refuses(optimizer: str, preset: str) -> bool:
    """Whether ``lightning_tricks.optimizer`` refuses a name under a preset."""
    if optimizer in SETTINGS:
        return False
    row = row_of(optimizer)
    if preset.startswith("zero"):
        return not row.zero
    refuses = not row.fsdp2 or (preset == "tp_bf16" and not row.tensor_parallel)
    return refuses and preset.startswith(("fsdp2", "hsdp", "tp"))


def _can_split(model: nn.Module | int, devices: int) -> bool:
    """Whether a model has a plan of its own, by which its layers can be split."""
    try:
        return devices > 1 and isinstance(model, nn.Module) and bool(planned_layers(model, None, devices))
    except MisconfigurationException:
        return False


def alternatives(
    model: nn.Module | int,
    failed: Sequence[MemoryEstimate],
    optimizer: OptimizerLike,
    estimate: Callable[[str, OptimizerLike, LoRA | None], MemoryEstimate],
    fits: Callable[[MemoryEstimate], bool],
) -> tuple[Alternative, ...]:
    """With 8-bit optimizer states, or adapters of all linear layers: the fastest of the strategies that do not fit.

    Args:
        model: A module or a number of parameters.
        failed: The memory of the strategies that do not fit, the fastest first.
        optimizer: The optimizer that does not fit.
        estimate: The memory of a strategy with an optimizer and adapters.
        fits: Whether that fits.
    """
    layers = adaptable_linear(model) if isinstance(model, nn.Module) else ["."]
    changes: dict[str, tuple[OptimizerLike, LoRA | None]] = {}
    if optimizer != "adamw8bit":
        changes["optimizer='adamw8bit'"] = ("adamw8bit", None)
    if layers and find_spec("peft") is not None:
        changes["LoRA(r=8) on all linear layers"] = (optimizer, LoRA(layers, r=8))
        changes["LoRA(r=8, base='nf4') on all linear layers"] = (optimizer, LoRA(layers, r=8, base="nf4"))
    found = []
    for change, (stepping, adapters) in changes.items():
        on_device = adapters is not None and adapters.base != "keep"
        tried = []
        for name in (each.strategy for each in failed):
            if isinstance(stepping, str) and refuses(stepping, name):
                continue
            if (on_device and not name.startswith(DENSE)) or (adapters is not None and name == "tp_bf16"):
                continue
            tried.append(estimate(name, stepping, adapters))
            if fits(tried[-1]):
                break
        if tried:
            best = tried[-1] if fits(tried[-1]) else tried[0]
            whole = f"{change} and ActivationCheckpointing()" if best.recomputes else change
            found.append(Alternative(whole, best.strategy, best.total, fits(best)))
    return tuple(found)


def _split(
    size: int, hardware: Hardware, margin: float, optimizer: OptimizerLike, has_plan: bool
) -> tuple[Alternative, ...]:
    """Layers that are split by a plan of one's own, and stages of a pipeline: without activations, evenly divided."""
    found, usable = [], hardware.device_memory * (1 - margin)
    refused = isinstance(optimizer, str) and refuses(optimizer, "tp_bf16")
    if hardware.devices > 1 and hardware.links == "fast" and not has_plan and not refused:
        total = _smallest_estimate(size, None, hardware, margin, "tp_bf16", optimizer).total
        found.append(Alternative("a plan for its layers (docs/scaling.md)", "tp_bf16", total, total <= usable))
    if hardware.world > 1:
        total = estimate_memory(size, strategy="single_bf16", optimizer=optimizer).total // hardware.world
        stages = f"a pipeline of {hardware.world} stages (docs/scaling.md)"
        found.append(Alternative(stages, "ModelParallelStrategy", total, total <= usable))
    return tuple(found)


def candidates(hardware: Hardware) -> list[str]:
    """Names of presets for the hardware, the fastest first."""
    one_device = hardware.world == 1
    if not hardware.bf16:
        on_device = ["single_fp16"] if one_device else ["ddp_fp16", "zero2_fp16", "zero3_fp16"]
        return [*on_device, "zero2_offload_fp16", "zero3_offload_fp16"]
    if one_device:
        on_device = ["single_bf16"]
    elif hardware.links == "slow":
        within_nodes = ["hsdp_bf16"] if hardware.nodes > 1 and hardware.devices > 1 else []
        on_device = ["ddp_compressed_bf16", "zero1_bf16", "zero2_bf16", *within_nodes, "fsdp2_bf16", "zero3_bf16"]
    else:
        on_device = ["ddp_bf16", "fsdp2_bf16", "tp_bf16", "zero3_bf16"]
    return [*on_device, "zero2_offload_bf16", "zero3_offload_bf16", "zero3_nvme_bf16"]


def _batches(
    estimate: MemoryEstimate, hardware: Hardware, batch_size: int | None, margin: float
) -> tuple[int | None, int]:
    """The batch size on each device, and the number of batches to accumulate."""
    if estimate.measured is None:
        return None, 1
    largest = estimate.largest_batch(hardware.device_memory * (1 - margin))
    if batch_size is None:
        return (largest - largest % 8 if largest > 8 else largest), 1  # Tensor cores prefer multiples of 8.
    share = max(1, -(-batch_size // hardware.batches(estimate.strategy)))  # Rounded up, as below.
    accumulate = -(-share // largest)
    return -(-share // accumulate), accumulate


def _nothing_fits(failed: list[MemoryEstimate], hardware: Hardware, margin: float) -> str:
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
