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
from lightning_tricks.advisor.remarks import UNLIMITED, advice, nothing_fits, shortage, why_it_fits, why_not
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.core.adapters.inject import adaptable_linear
from lightning_tricks.core.checks import check_count, check_range, check_type
from lightning_tricks.core.report import readable
from lightning_tricks.optimizers.table import row_of
from lightning_tricks.strategies.fsdp2.plan import planned_layers

__all__ = ["Suggestion", "suggest_strategy"]


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
        return self.hardware.trainer(self.preset, self.accumulate_grad_batches)

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
        raise ValueError(" ".join([nothing_fits(failed, hardware, margin) + left_out, *map(str, others)]))
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
