"""Estimating the memory that training takes, without training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from typing_extensions import override

from lightning_tricks.advisor.memory.activations import Activations, Regime, batch_samples, measure
from lightning_tricks.advisor.memory.layout import Layout, layout_of
from lightning_tricks.advisor.memory.parameters import Parameters, parameters_of, with_adapters
from lightning_tricks.advisor.memory.parts import Parts, parts_of
from lightning_tricks.advisor.memory.states import SETTINGS, OptimizerLike, States, states_of
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.core.checks import check_choice, check_count, check_type
from lightning_tricks.core.install import required
from lightning_tricks.core.report import Grid, Tabled, readable
from lightning_tricks.optimizers.by_name import optimizer as optimizer_by_name
from lightning_tricks.optimizers.table import row_of
from lightning_tricks.strategies.fsdp2.plan import planned_layers

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MemoryEstimate", "estimate_memory"]


# The parts of a device's memory, with their names in tables.
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states, masters",
    "extras": "copies of the weights",
    "buffers": "buffers",
    "casts": "16-bit weights",
    "gathered": "gathered weights",
    "communication": "gradient buckets",
    "activations": "activations",
    "passing": "or, while the optimizer steps",
}
# The parts that stay while the optimizer steps.
LASTING = ("weights", "gradients", "optimizer", "extras", "buffers")


@final
@dataclass(frozen=True)
class MemoryEstimate(Tabled):
    """The bytes that training takes on each device, by part; the result of ``estimate_memory``.

    ``total = lasting + max(casts + gathered + communication + activations, passing)``, where lasting is the sum of
    weights, gradients, optimizer, extras and buffers: activations are freed before the optimizer steps.

    Args:
        strategy: The name of the strategy.
        precision: Lightning's name of the precision.
        world: The number of devices on all nodes.
        batch_size: The number of samples on each device; None if activations were not measured.
        weights: Bytes of the parameters.
        gradients: Bytes of the gradients of trainable parameters.
        optimizer: Bytes of the optimizer states and, under ZeRO, of the fp32 master weights.
        extras: Bytes of the copies of the weights that ``extras=`` names.
        buffers: Bytes of buffers, such as BatchNorm's statistics.
        casts: Bytes of 16-bit copies of fp32 weights under autocast.
        gathered: Bytes of full layers gathered from shards.
        communication: Bytes of gradient buckets.
        activations: Bytes of everything else at the peak of the forward and backward pass, including the batch.
        passing: Bytes of temporary tensors while the optimizer steps.
        host: Bytes in the memory of each node.
        nvme: Bytes on the disk of each node.
        largest_layer: Bytes of the layer with the most weights, in the dtype of the forward pass.
        recomputes: Whether ``casts`` are those with activation checkpointing, which frees them block by block.
        measured: The measured activations by batch size; None if they were not measured.

    Example:
        >>> from lightning_tricks.advisor import estimate_memory
        >>> estimate_memory(7_000_000_000, strategy="zero3_bf16", devices=8).weights  # 2 bytes each, in 8 shards
        1750000000
    """

    strategy: str
    precision: str
    world: int
    batch_size: int | None
    weights: int
    gradients: int
    optimizer: int
    extras: int
    buffers: int
    casts: int
    gathered: int
    communication: int
    activations: int
    passing: int
    host: int
    nvme: int
    largest_layer: int
    recomputes: bool = False
    measured: Activations | None = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """Bytes on each device at the peak."""
        lasting = sum(getattr(self, part) for part in LASTING)
        return lasting + max(self.casts + self.gathered + self.communication + self.activations, self.passing)

    def with_batch(self, batch_size: int) -> MemoryEstimate:
        """The estimate for another batch size on each device, from the same measurement.

        Raises:
            ValueError: If activations were not measured.
        """
        check_count("batch_size", batch_size)
        if self.measured is None:
            raise ValueError("activations for another batch size need batch=: estimate_memory(model, batch=...).")
        return replace(self, batch_size=batch_size, activations=self.measured.at(batch_size))

    def largest_batch(self, device_memory: float) -> int:
        """The largest batch size with ``total <= device_memory``, in bytes; 0 if not even one sample fits."""
        low, high = 0, 1
        while self.with_batch(high).total <= device_memory and high < 2**24:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.with_batch(middle).total <= device_memory else (low, middle)
        return low

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "measured"}
        return {**values, "total": self.total}

    def rows(self) -> list[tuple[str, int]]:
        """The names and bytes of the parts that take memory."""
        return [(text, getattr(self, part)) for part, text in PARTS.items() if getattr(self, part)]

    @override
    def _grid(self) -> Grid:
        rows = [(name, readable(size)) for name, size in self.rows()]
        return Grid(("part", "bytes"), [*rows, *self._sums()], above=[self._title()])

    def __str__(self) -> str:
        lines = [self._title(), *(f"{readable(size):>10}  {name}" for name, size in self.rows())]
        return "\n".join([*lines, *(f"{size:>10}  {name}" for name, size in self._sums())])

    def table(self) -> Table:
        """The parts as a rich table with bars.

        Raises:
            ImportError: If rich is missing.
        """
        with required("the table needs rich", "cli"):
            from rich.bar import Bar
            from rich.table import Table
        table = Table("part", "bytes", "", title=self._title())
        table.columns[1].justify = "right"
        largest = max((size for _, size in self.rows()), default=1)
        for name, size in self.rows():
            table.add_row(name, readable(size), Bar(largest, 0, size, width=30))
        table.add_section()
        for name, text in self._sums():
            table.add_row(name, text)
        return table

    def _title(self) -> str:
        batch = "activations not measured" if self.batch_size is None else f"batch {self.batch_size} per device"
        return f"{self.strategy}, {self.precision}, {self.world} device{'s' * (self.world > 1)}, {batch}"

    def _sums(self) -> list[tuple[str, str]]:
        sums = [("on each device at the peak", self.total)]
        sums += [("in the memory of each node", self.host)] if self.host else []
        sums += [("on the disk of each node", self.nvme)] if self.nvme else []
        return [(name, readable(size)) for name, size in sums]


BUCKET = 200_000_000  # Elements that DeepSpeed sends at a time, as set by the presets.

# The last elements of the forward pass, which DeepSpeed keeps gathered because the backward pass uses them within its
# max_reuse_distance of 10**9 elements.
REUSED = 500_000_000

EXTRAS = ("ema", "swa", "sam")


def estimate_memory(
    model: nn.Module | int,
    *,
    optimizer: OptimizerLike = "adamw",
    precision: str | None = None,
    strategy: str | None = None,
    devices: int = 1,
    nodes: int = 1,
    batch: Any = None,
    batch_size: int | None = None,
    extras: Collection[str] = (),
    lora: LoRA | None = None,
    device: str = "cuda",
) -> MemoryEstimate:
    """Estimate the bytes that training takes on each device; activations are measured without allocating memory.

    Weights, gradients and optimizer states are counted, in bytes per parameter: ``4 + 4 + states`` for fp32 and mixed
    precision, and 2 more for the 16-bit copies of mixed precision; FSDP2 shards ``4 + 4 + states``. ZeRO in 16 bits
    takes ``2 + 2 + (4 + states)``: stage 1 shards the last term, stage 2 the last two, stage 3 all. The states of AdamW
    take 8.

    Activations are measured in a training step on fake tensors in this precision, with a batch of ``batch_size``, for
    which the estimate is exact, and with twice as many samples, from which other sizes follow: see
    ``MemoryEstimate.with_batch``. Not included are the workspace of kernels and libraries (oneDNN's LSTM on a CPU takes
    as much again) and the allocator's fragmentation.

    Args:
        model: A LightningModule, whose ``training_step`` runs; or another module, which is called with the batch, and
            whose outputs are summed to a loss. It may be on any device, including "meta", and stays unchanged. Or a
            number of parameters.
        optimizer: A name of ``optimizers()``, "sgd_momentum" or "amsgrad"; or a torch optimizer, its class, or a
            function from parameters to it, whose states are counted.
        precision: Lightning's name of the precision, by default the preset's, or "bf16-mixed".
        strategy: A name of ``presets()``, "ddp", or None for a full model on each device without buckets.
        devices: The number of devices per node, at least 1.
        nodes: The number of nodes, at least 1.
        batch: An example batch to measure activations with. For a module that is not a LightningModule it starts with
            the inputs.
        batch_size: The number of samples on each device, by default those of ``batch``.
        extras: Tricks that keep a copy of the weights: "ema", "swa", "sam".
        lora: The adapters to train with: ``LoRA("q_proj", base="nf4")``. Those of a module are there while it is
            measured, with the frozen weights as they are; of a number of parameters, all matrices are adapted.
        device: The type of device to train on, "cuda" or "cpu", which decides what autocast computes in fp32.

    Raises:
        ValueError: If a name is unknown, the precision is not the preset's, or the step fails without a Trainer.
        MisconfigurationException: Under "tp_bf16", for a module without a plan of its own (see ``FSDP2Preset``).
        TypeError: If an argument has the wrong type.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
        >>> estimate = estimate_memory(net, precision="32-true", batch=torch.zeros(8, 100))
        >>> estimate.weights == estimate.gradients == 4 * (100 * 100 + 100 + 100 * 10 + 10)
        True
        >>> estimate.with_batch(64).activations > estimate.activations
        True

    References:
        Rajbhandari et al., ZeRO, arXiv 1910.02054.
    """
    check_count("devices", devices)
    check_count("nodes", nodes)
    check_choice("device", device, ("cuda", "cpu"))
    check_type("extras", extras, list, tuple, set, frozenset)
    for extra in extras:
        check_choice("extras", extra, EXTRAS)
    if not isinstance(model, nn.Module):
        check_count("model", model)
    check_type("lora", lora, LoRA, NoneType)
    layout = layout_of(strategy, precision)
    if lora is not None and lora.base != "keep" and layout.engine not in ("single", "ddp"):
        raise ValueError(f"LoRA(base={lora.base!r}) trains on a single device or under DDP, got strategy={strategy!r}.")
    if lora is not None and layout.splits_layers:
        raise ValueError(f"strategy={strategy!r} splits no layer with an adapter, got lora={lora}: leave one out.")
    with with_adapters(model, lora) as parameters:
        trainable = [weight for weight in parameters.weights if weight.trainable]
        dtype = torch.float32 if layout.engine == "zero" else layout.weight_dtype
        if isinstance(model, nn.Module) and isinstance(optimizer, str):
            optimizer = _of_shapes(optimizer, model)
        states = states_of(optimizer, trainable, dtype, foreach=device == "cuda")
        parts = Parts()
        if layout.splits_layers:
            whole = parameters.bytes(trainable=True)
            if isinstance(model, nn.Module):
                parts = parts_of(planned_layers(model, None, devices), devices)
                parameters = parameters_of(model, shapes=parts.shapes)
            else:
                parameters = parameters_of(_shard(model, devices))
            states = states.scaled(parameters.bytes(trainable=True) / max(whole, 1))
        measured = _measure_activations(model, batch, batch_size, layout, device, parts)
    samples = None if measured is None else batch_size or measured.samples
    return MemoryEstimate(
        strategy=layout.strategy,
        precision=layout.precision,
        world=devices * nodes,
        batch_size=samples,
        activations=0 if measured is None or samples is None else measured.at(samples),
        recomputes=False,
        measured=measured,
        **_parts(layout, parameters, states, devices * nodes, nodes, extras, measured),
    )


def _of_shapes(name: str, module: nn.Module) -> OptimizerLike:
    """The optimizer itself if its bytes depend on the shapes of the weights, or else its name."""
    row = None if name in SETTINGS else row_of(name)
    return name if row is None or row.is_lookahead or not row.by_shape else optimizer_by_name(name, module, 0.1)


def _measure_activations(
    model: nn.Module | int, batch: Any, batch_size: int | None, layout: Layout, device: str, parts: Parts
) -> Activations | None:
    check_count("batch_size", batch_size, optional=True)
    if batch is None:
        if batch_size is not None:
            raise ValueError(f"batch_size={batch_size} needs batch=, an example batch of any size.")
        return None
    if not isinstance(model, nn.Module):
        raise ValueError(
            "batch= needs a module, got a number of parameters, which has no activations: leave batch= out."
        )
    regime = Regime(
        dtype=layout.compute_dtype,
        autocast=layout.autocast,
        keeps_gradients=layout.engine != "single",
        cuda=device == "cuda",
        parts=parts,
    )
    return measure(model, batch, batch_size or batch_samples(batch), regime)


def _parts(
    layout: Layout,
    parameters: Parameters,
    states: States,
    world: int,
    nodes: int,
    extras: Collection[str],
    measured: Activations | None,
) -> dict[str, int]:
    """Bytes on each device, in each node's memory and on its disk, by the fields of ``MemoryEstimate``."""
    dtype, offloaded = layout.weight_dtype, layout.offload != "none"
    masters = parameters.bytes(torch.float32, trainable=True) if layout.engine == "zero" else 0
    weights = _shard(parameters.bytes(dtype), layout.shards(3, world, nodes))
    gradients = _shard(parameters.bytes(dtype, trainable=True), layout.shards(2, world, nodes))
    optimizer = _shard(masters + states.persistent, layout.shards(1, world, nodes))
    passing = _shard(states.temporary, layout.shards(1, world, nodes))
    if layout.outer_optimizer and world > 1:
        optimizer += 2 * gradients  # the weights of the last synchronisation and the momentum
        passing = max(passing, 2 * gradients)  # the distance to the mean, and that with momentum
    copies = masters or parameters.bytes(dtype, trainable=True)
    return {
        "weights": 0 if offloaded and layout.stage == 3 else weights,
        "gradients": 0 if offloaded else gradients,
        "optimizer": 0 if offloaded else optimizer,
        "extras": _shard(len(extras) * copies, layout.shards(1, world, nodes)),
        "buffers": parameters.buffer_bytes,
        "casts": _casts(layout, parameters, measured),
        "passing": 0 if offloaded else passing,
        "largest_layer": _forward_bytes(layout, parameters, parameters.largest_layer),
        **_communicated(layout, parameters),
        **_offloaded(layout, parameters, masters + states.persistent, nodes),
    }


def _communicated(layout: Layout, parameters: Parameters) -> dict[str, int]:
    """Bytes of gathered weights and of gradient buckets."""
    gathered = communication = 0
    if layout.engine == "ddp" and not layout.bucket_view:
        communication = parameters.bytes(layout.weight_dtype, trainable=True)
    if layout.engine == "fsdp2":
        # Gathered are the running group, the next one and the root. The gradients of a group exist twice: as they are
        # computed and in the buffer of the reduction.
        gathered = _forward_bytes(layout, parameters, 2 * parameters.largest_group + parameters.outside_groups)
        communication = 2 * _forward_bytes(layout, parameters, parameters.largest_group)
    if layout.engine == "zero" and layout.stage == 3:
        gathered = _forward_bytes(layout, parameters, parameters.largest_layer + REUSED)
    if layout.engine == "zero":
        buckets = 1 if layout.stage == 3 else 2  # Below stage 3 one bucket is filled while the other is sent.
        communication = buckets * BUCKET * (layout.weight_dtype or torch.float32).itemsize
    return {"gathered": gathered, "communication": communication}


def _forward_bytes(layout: Layout, parameters: Parameters, numel: int) -> int:
    """Bytes of ``numel`` parameters, or of all if there are fewer, in the dtype of the forward pass."""
    total = parameters.numel()
    return -(-parameters.bytes(layout.compute_dtype) * min(numel, total) // total)


def _casts(layout: Layout, parameters: Parameters, measured: Activations | None) -> int:
    """Bytes of 16-bit copies of the weights."""
    if measured is not None:
        return measured.casts
    if not layout.casts:
        return 0
    return sum(weight.bytes(layout.autocast) for weight in parameters.weights if weight.dtype == torch.float32)


def _offloaded(layout: Layout, parameters: Parameters, states: int, nodes: int) -> dict[str, int]:
    """Bytes that are offloaded to the memory and the disk of each node."""
    if layout.offload == "none":
        return {"host": 0, "nvme": 0}
    weights = parameters.bytes(layout.weight_dtype) if layout.stage == 3 else 0
    dtype = torch.float32 if layout.engine == "zero" else layout.weight_dtype  # DeepSpeed steps on fp32 gradients.
    gradients = parameters.bytes(dtype, trainable=True)
    if layout.offload == "nvme":
        return {"host": _shard(gradients, nodes), "nvme": _shard(weights + states, nodes)}
    return {"host": _shard(weights + gradients + states, nodes), "nvme": 0}


def _shard(size: int, shards: int) -> int:
    """The bytes of one of several shards, rounded up."""
    return -(-size // shards)
