"""Planning a training on many devices: the presets by their simulated tokens a second."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from typing_extensions import override

from lightning_tricks.advisor.choose import recomputed, refuses
from lightning_tricks.advisor.hardware import Hardware
from lightning_tricks.advisor.memory.estimate import MemoryEstimate, estimate_memory
from lightning_tricks.advisor.memory.states import OptimizerLike
from lightning_tricks.advisor.remarks import shortage
from lightning_tricks.advisor.simulate.devices import DEVICES, links_of
from lightning_tricks.advisor.simulate.step import Spread, Step, simulate_step
from lightning_tricks.advisor.simulate.transformer import TransformerShape
from lightning_tricks.core.checks import check_count, check_range, check_type
from lightning_tricks.core.report import Grid, Tabled, readable

__all__ = ["TrainingPlan", "suggest_plan"]

COLUMNS = (
    *("strategy", "batch", "accumulate", "checkpointing"),
    *("each device", "tokens/s", "of the peak", "step", "speed"),
)


@dataclass(frozen=True)
class Candidate:
    """A preset with the batch with which it is fastest.

    Args:
        preset: The name of the preset.
        micro_batch: The samples that are computed at a time.
        accumulate: The batches of an optimizer step.
        estimate: The memory, with activations.
        step: The simulated step.
    """

    preset: str
    micro_batch: int
    accumulate: int
    estimate: MemoryEstimate
    step: Step


@final
@dataclass(frozen=True)
class TrainingPlan(Tabled):
    """The presets that fit, by their simulated speed; the result of ``suggest_plan``.

    Args:
        shape: The shape of the model.
        hardware: The devices that it is for.
        candidates: Each preset that fits, the fastest first.
        failed: The memory of those that do not fit.

    Example:
        >>> from lightning_tricks.advisor import Hardware, TransformerShape, suggest_plan
        >>> plan = suggest_plan(TransformerShape.of(7_000_000_000), hardware=Hardware.of("h100", devices=8, nodes=64))
        >>> plan.trainer
        {'strategy': 'hsdp_bf16', 'devices': 8, 'num_nodes': 64, 'accumulate_grad_batches': 1}
    """

    shape: TransformerShape
    hardware: Hardware
    candidates: tuple[Candidate, ...]
    failed: tuple[MemoryEstimate, ...] = ()

    @property
    def preset(self) -> str:
        """The name of the fastest preset."""
        return self.candidates[0].preset

    @property
    def trainer(self) -> dict[str, Any]:
        """The arguments of the Trainer, but for ``ActivationCheckpointing()`` where ``recomputes`` says so."""
        return self.hardware.trainer(self.preset, self.candidates[0].accumulate)

    @property
    def recomputes(self) -> bool:
        """Whether the fastest preset needs activation checkpointing."""
        return self.candidates[0].estimate.recomputes

    @property
    def effective_batch_size(self) -> int:
        """The number of samples of an optimizer step."""
        first = self.candidates[0]
        return first.micro_batch * first.accumulate * self.hardware.batches(first.preset)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all devices."""
        return self.candidates[0].step.tokens_per_second * self.hardware.world

    @property
    def share_of_peak(self) -> float:
        """The share of the devices' peak in bf16 that the operations of the model are (MFU)."""
        return self.candidates[0].step.share_of_peak(DEVICES[str(self.hardware.kind)])

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        found = [
            {
                "strategy": each.preset,
                "micro_batch_size": each.micro_batch,
                "accumulate_grad_batches": each.accumulate,
                "activation_checkpointing": each.estimate.recomputes,
                "bytes": each.estimate.total,
                "tokens_per_second": each.step.tokens_per_second * self.hardware.world,
                "share_of_peak": each.step.share_of_peak(DEVICES[str(self.hardware.kind)]),
                "step_seconds": each.step.seconds,
            }
            for each in self.candidates
        ]
        return {**self.trainer, "effective_batch_size": self.effective_batch_size, "candidates": found}

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each preset, with its speed beside that of the fastest."""
        best, device = self.candidates[0].step.tokens_per_second, DEVICES[str(self.hardware.kind)]
        found = [
            (
                each.preset,
                str(each.micro_batch),
                str(each.accumulate),
                "yes" if each.estimate.recomputes else "no",
                readable(each.estimate.total),
                f"{each.step.tokens_per_second * self.hardware.world:,.0f}",
                f"{each.step.share_of_peak(device):.0%}",
                f"{each.step.seconds:.2f} s",
                f"{each.step.tokens_per_second / best:.2f}",
            )
            for each in self.candidates
        ]
        return [
            *found,
            *((each.strategy, "", "", "yes", readable(each.total), "", "", "", "-") for each in self.failed),
        ]

    @override
    def _grid(self) -> Grid:
        return Grid(COLUMNS, self.rows(), above=self.head(), below=self.notes())

    def head(self) -> list[str]:
        """The Trainer and the loader."""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.trainer.items())
        if self.recomputes:
            arguments += ", callbacks=[ActivationCheckpointing()]"
        return [f"Trainer({arguments})", f"DataLoader(batch_size={self.candidates[0].micro_batch})"]

    def notes(self) -> list[str]:
        """What the figures say, and how far they can be trusted."""
        first, *others = self.candidates
        waits = {
            "compute": first.step.compute + first.step.optimizer,
            "sums of activations": first.step.tensor,
            "weights and gradients that no product hides": first.step.data,
        }
        parts = ", ".join(f"{seconds / first.step.seconds:.0%} {name}" for name, seconds in waits.items() if seconds)
        notes = [f"A step takes {first.step.seconds:.2f} s: {parts}."]
        if others:
            faster = first.step.tokens_per_second / others[0].step.tokens_per_second - 1
            notes.append(f"{others[0].preset} comes second: {first.preset} is {faster:.0%} faster.")
        if first.preset == "tp_bf16":
            notes.append("tp_bf16 needs a plan for the layers, which models of transformers have.")
        notes.append(
            f"An optimizer step sees {self.effective_batch_size} samples of {self.shape.sequence} tokens: scale the"
            " learning rate accordingly (scale_lr)."
        )
        notes.append("Figures are simulated, and within about 15% of published ones (docs/scaling.md).")
        return notes

    def __str__(self) -> str:
        return "\n".join([*self.head(), *self.notes()])


def suggest_plan(
    model: TransformerShape,
    *,
    hardware: Hardware,
    batch_size: int | None = None,
    optimizer: OptimizerLike = "adamw",
    margin: float = 0.1,
) -> TrainingPlan:
    """Suggest the preset with the most tokens a second for a transformer on many devices, by simulating a step.

    ``ddp_bf16``, ``fsdp2_bf16``, ``hsdp_bf16`` and ``tp_bf16`` are tried with and without activation checkpointing,
    each with as many samples at a time as fit and divide the device's share of ``batch_size``; accumulation does the
    rest. The step is the sum of its products and memory traffic, at the shares of the data sheet that training reaches,
    and of the traffic between devices that no product hides.

    Args:
        model: The shape of the model.
        hardware: The devices, with their kind: ``Hardware.of("h100", devices=8, nodes=64)``.
        batch_size: The number of samples of an optimizer step over all devices, by default as many as fit at a time.
        optimizer: The optimizer, as for ``estimate_memory``; presets that refuse a name are passed over.
        margin: The fraction of the memory to leave free, in [0, 1), for kernels and fragmentation.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If nothing fits, the hardware has no kind, or a value is out of range.

    Example:
        >>> from lightning_tricks.advisor import Hardware, TransformerShape
        >>> shape = TransformerShape(32, 4096, 32, 128256, 8192, key_heads=8, hidden=14336, gated=True)  # Llama 3.1 8B
        >>> plan = suggest_plan(shape, hardware=Hardware.of("h100", devices=8, nodes=8), batch_size=512)
        >>> f"{plan.preset}, {plan.tokens_per_second:,.0f} tokens/s, {plan.share_of_peak:.0%} of the peak"
        'hsdp_bf16, 378,743 tokens/s, 35% of the peak'

    References:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473.
    """
    check_type("model", model, TransformerShape)
    check_type("hardware", hardware, Hardware)
    check_range("margin", margin, 0.0, 1.0, below=True)
    check_count("batch_size", batch_size, optional=True)
    if hardware.kind is None:
        raise ValueError(
            f"hardware must have a kind, one of {', '.join(DEVICES)}, got {hardware}: use Hardware.of('h100', ...)."
        )
    found, failed = [], []
    for preset in _presets(model, hardware):
        if isinstance(optimizer, str) and refuses(optimizer, preset):
            continue
        settings: dict[str, Any] = {"devices": hardware.devices, "nodes": hardware.nodes, "optimizer": optimizer}
        estimate = estimate_memory(model.parameters, strategy=preset, **settings)
        tried = [_candidate(each, model, hardware, batch_size, margin) for each in (estimate, recomputed(estimate))]
        fitting = [each for each in tried if each is not None]
        if fitting:
            found.append(max(fitting, key=lambda each: each.step.tokens_per_second))
        else:
            failed.append(_with_samples(recomputed(estimate), model, hardware, 1))
    if not found:
        raise ValueError(_nothing_fits(failed, hardware, margin))
    found.sort(key=lambda each: -each.step.tokens_per_second)
    return TrainingPlan(model, hardware, tuple(found), tuple(failed))


def _presets(model: TransformerShape, hardware: Hardware) -> list[str]:
    """The presets for several devices that the hardware has use for."""
    names = ["ddp_bf16", "fsdp2_bf16"]
    if hardware.devices > 1 and hardware.nodes > 1:
        names.append("hsdp_bf16")
    if hardware.devices > 1 and model.heads % hardware.devices == 0:
        names.append("tp_bf16")
    return names


def _spread(preset: str, hardware: Hardware) -> Spread:
    """What a preset does: weights are gathered, and gradients summed, in fp32."""
    world, devices = hardware.world, hardware.devices
    shards = {"ddp_bf16": 1, "fsdp2_bf16": world, "hsdp_bf16": devices, "tp_bf16": hardware.nodes}[preset]
    tensor = devices if preset == "tp_bf16" else 1
    return Spread(world, per_node=devices, shards=shards, tensor=tensor, gather_bytes=4)


def _with_samples(
    estimate: MemoryEstimate, model: TransformerShape, hardware: Hardware, samples: int
) -> MemoryEstimate:
    """The memory with the activations of so many samples at a time."""
    tensor = hardware.devices if estimate.strategy == "tp_bf16" else 1
    sample = model.activations(tensor, recompute=estimate.recomputes)
    return replace(estimate, batch_size=samples, activations=round(samples * sample))


def _candidate(
    estimate: MemoryEstimate, model: TransformerShape, hardware: Hardware, batch_size: int | None, margin: float
) -> Candidate | None:
    """The preset of an estimate with as many samples at a time as fit; None if not even one does."""
    one = _with_samples(estimate, model, hardware, 1)
    if shortage(one, hardware, margin):
        return None
    free = hardware.device_memory * (1 - margin) - replace(one, activations=0, passing=0).total
    micro, accumulate = int(free // one.activations), 1
    if batch_size is not None:
        share = -(-batch_size // hardware.batches(estimate.strategy))
        micro = next(samples for samples in range(min(micro, share), 0, -1) if share % samples == 0)
        accumulate = share // micro
    device = DEVICES[str(hardware.kind)]
    spread = replace(
        _spread(estimate.strategy, hardware),
        micro_batch=micro,
        accumulate=accumulate,
        recompute="full" if estimate.recomputes else "none",
    )
    step = simulate_step(model, spread, device, links_of(device, hardware.devices, hardware.links))
    return Candidate(estimate.strategy, micro, accumulate, _with_samples(estimate, model, hardware, micro), step)


def _nothing_fits(failed: list[MemoryEstimate], hardware: Hardware, margin: float) -> str:
    nearest = min(failed, key=lambda each: each.total)
    (missing,) = shortage(nearest, hardware, margin).values()
    return (
        f"Nothing fits. Nearest is {nearest.strategy}, for which {readable(missing)} is missing on each device, even"
        " with one sample at a time and ActivationCheckpointing(). Use more devices, or a pipeline (docs/scaling.md)."
    )
