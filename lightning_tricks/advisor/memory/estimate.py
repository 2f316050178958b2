"""How much memory training takes, without training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from lightning_tricks.advisor.memory.activations import Activations, Regime, batch_samples, measure
from lightning_tricks.advisor.memory.layout import Layout, layout_of
from lightning_tricks.advisor.memory.parameters import Parameters, parameters_of
from lightning_tricks.advisor.memory.states import OptimizerLike, States, states_of
from lightning_tricks.core.checks import check_choice, check_count, check_type

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["MemoryEstimate", "estimate_memory"]


# The parts of a device's memory, and what they are.
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states, masters",
    "extras": "copies of the weights",
    "buffers": "buffers",
    "casts": "16-bit weights",
    "gathered": "gathered weights",
    "communication": "gradients on their way",
    "activations": "activations",
    "passing": "or, in the optimizer's step",
}
# Those that are there while the optimizer steps, as well.
LASTING = ("weights", "gradients", "optimizer", "extras", "buffers")


@final
@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training takes on each device, part by part; made by ``estimate_memory``.

    ``total = lasting + max(casts + gathered + communication + activations, passing)``, where lasting are weights,
    gradients, optimizer, extras and buffers: the step of the optimizer comes when activations are gone.

    Args:
        strategy: Name of the strategy.
        precision: Lightning's name of the precision.
        world: Devices in all.
        batch_size: Samples on each device; None if activations were not measured.
        weights: Parameters.
        gradients: Of the trained parameters.
        optimizer: Optimizer states and, under ZeRO, the fp32 masters.
        extras: What ``extras=`` names.
        buffers: Such as BatchNorm's statistics.
        casts: 16-bit copies of fp32 weights under autocast.
        gathered: Whole layers put together from the slices.
        communication: Buckets of gradients.
        activations: All else that a forward and backward pass holds at its peak, the batch included.
        passing: What comes and goes while the optimizer steps.
        host: Bytes in the memory of each node.
        nvme: Bytes on the disk of each node.
        largest_layer: Bytes of the layer with the most weights, as it is computed with.
        measured: How activations depend on the batch size; None if they were not measured.

    Example:
        >>> from lightning_tricks.advisor import estimate_memory
        >>> estimate_memory(7_000_000_000, strategy="zero3_bf16", devices=8).weights  # 2 bytes each, in 8 slices
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
    measured: Activations | None = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """Bytes on each device at the peak."""
        lasting = sum(getattr(self, part) for part in LASTING)
        return lasting + max(self.casts + self.gathered + self.communication + self.activations, self.passing)

    def with_batch(self, batch_size: int) -> MemoryEstimate:
        """The estimate for another batch size on each device; nothing runs again.

        Raises:
            ValueError: If activations were not measured.
        """
        check_count("batch_size", batch_size)
        if self.measured is None:
            raise ValueError("activations of another batch size need a batch: estimate_memory(model, batch=...).")
        return replace(self, batch_size=batch_size, activations=self.measured.at(batch_size))

    def largest_batch(self, device_memory: float) -> int:
        """The most samples with which ``total`` stays within so many bytes; 0 if not even one fits."""
        low, high = 0, 1
        while self.with_batch(high).total <= device_memory and high < 2**24:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.with_batch(middle).total <= device_memory else (low, middle)
        return low

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        numbers = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "measured"}
        return {**numbers, "total": self.total}

    def rows(self) -> list[tuple[str, int]]:
        """The parts that take something, and their bytes."""
        return [(text, getattr(self, part)) for part, text in PARTS.items() if getattr(self, part)]

    def __str__(self) -> str:
        lines = [self._title(), *(f"{readable(size):>10}  {name}" for name, size in self.rows())]
        return "\n".join([*lines, *(f"{size:>10}  {name}" for name, size in self._sums())])

    def table(self) -> Table:
        """The parts as a table of rich, with bars.

        Raises:
            ImportError: If rich is missing.
        """
        try:
            from rich.bar import Bar
            from rich.table import Table
        except ImportError as error:
            raise ImportError("the table needs rich: pip install 'lightning-tricks[cli]'") from error
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
        batch = "activations not measured" if self.batch_size is None else f"batch {self.batch_size} a device"
        return f"{self.strategy}, {self.precision}, {self.world} device{'s' * (self.world > 1)}, {batch}"

    def _sums(self) -> list[tuple[str, str]]:
        sums = [("on each device at the peak", self.total)]
        sums += [("in the memory of each node", self.host)] if self.host else []
        sums += [("on the disk of each node", self.nvme)] if self.nvme else []
        return [(name, readable(size)) for name, size in sums]


def readable(size: float) -> str:
    """Bytes as people say them.

    >>> readable(0), readable(2_340_000), readable(80e9)
    ('0 B', '2.34 MB', '80 GB')
    """
    power = 0
    while size >= 999.5 and power < 4:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


# Elements that DeepSpeed sends at a time, as the presets set it, and that it keeps gathered since they are used again
# within max_reuse_distance: the last ones of the forward pass.
BUCKET = 200_000_000
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
    device: str = "cuda",
) -> MemoryEstimate:
    """The bytes that training a model takes on each device, with activations measured and nothing allocated.

    Weights, gradients and optimizer states are counted: fp32 or mixed precision takes ``4 + 4 + states`` bytes a
    parameter, and 2 more for 16-bit copies in mixed; ZeRO in 16 bits ``2 + 2 + (4 + states)``, of which stage 1
    slices the last, 2 the last two, 3 all; FSDP2 slices ``4 + 4 + states``. States are 8 for AdamW. Activations are
    those of a training step on tensors without memory, in this precision, on a batch of the size asked for (that one
    exactly) and on twice as many samples, which together give any other: see ``MemoryEstimate.with_batch``. What
    kernels and libraries take inside of them (as much again in an LSTM of oneDNN, on the CPU), and what an allocator
    leaves in pieces, is not seen.

    Args:
        model: A LightningModule, of which ``training_step`` runs; another module, called with the batch (a loss is
            made of its outputs); on any device, "meta" too. Or a plain count of parameters. It stays as it is.
        optimizer: A name: "sgd", "sgd_momentum", "adam", "adamw", "adamw_8bit", "adafactor", "lion", "muon" and more;
            or a torch optimizer, its class, or a function from parameters to it, of which states are counted.
        precision: Lightning's name, for example "bf16-mixed"; None: the preset's, or "bf16-mixed".
        strategy: One of ``presets()``, "ddp", or None for one whole model on each device without buckets.
        devices: Of each node.
        nodes: Machines.
        batch: An example batch for activations. A batch of a module that is no LightningModule has its inputs first.
        batch_size: Samples on each device; None: those of ``batch``.
        extras: What keeps a copy of the weights: "ema", "swa", "sam".
        device: Where training is to run, "cuda" or "cpu": which functions autocast computes in fp32.

    Raises:
        ValueError: If a name is unknown, a precision is not the preset's, or the step does not run without a Trainer.
        TypeError: If an argument is of another kind.

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
    layout = layout_of(strategy, precision)
    parameters = parameters_of(model)
    trained = [weight for weight in parameters.weights if weight.trained]
    kept_in = torch.float32 if layout.engine == "zero" else layout.held
    states = states_of(optimizer, trained, kept_in, foreach=device == "cuda")
    measured = _measured(model, batch, batch_size, layout, device)
    samples = None if measured is None else batch_size or measured.samples
    return MemoryEstimate(
        strategy=layout.strategy,
        precision=layout.precision,
        world=devices * nodes,
        batch_size=samples,
        activations=0 if measured is None or samples is None else measured.at(samples),
        measured=measured,
        **_parts(layout, parameters, states, devices * nodes, nodes, extras, measured),
    )


def _measured(
    model: nn.Module | int, batch: Any, batch_size: int | None, layout: Layout, device: str
) -> Activations | None:
    if batch_size is not None:
        check_count("batch_size", batch_size)
    if batch is None:
        if batch_size is not None:
            raise ValueError(f"batch_size={batch_size} needs batch=: an example batch, of any size.")
        return None
    if not isinstance(model, nn.Module):
        raise ValueError("batch= needs a module: a plain count of parameters has no activations.")
    regime = Regime(layout.computed, layout.autocast, layout.engine != "single", device == "cuda")
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
    """Bytes on each device, in each node's memory and on its disk."""
    zero, away = layout.engine == "zero", layout.offload != "none"
    masters = parameters.bytes(torch.float32, trained=True) if zero else 0
    weights = _share(parameters.bytes(layout.held), layout.slices(3, world))
    gradients = _share(parameters.bytes(layout.held, trained=True), layout.slices(2, world))
    optimizer = _share(masters + states.held, layout.slices(1, world))
    copies = masters or parameters.bytes(layout.held, trained=True)
    here = {
        "weights": 0 if away and layout.stage == 3 else weights,
        "gradients": 0 if away else gradients,
        "optimizer": 0 if away else optimizer,
        "extras": _share(len(extras) * copies, layout.slices(1, world)),
        "buffers": parameters.buffer_bytes,
        "casts": _casts(layout, parameters, measured),
        "passing": 0 if away else _share(states.passing, layout.slices(1, world)),
        "largest_layer": _computed(layout, parameters, parameters.largest_layer),
        **_on_the_way(layout, parameters),
    }
    return {**here, **_elsewhere(layout, parameters, masters + states.held, nodes)}


def _on_the_way(layout: Layout, parameters: Parameters) -> dict[str, int]:
    """Gathered weights, and gradients that are being sent."""
    gathered = communication = 0
    if layout.engine == "ddp" and not layout.bucket_view:
        communication = parameters.bytes(layout.held, trained=True)
    if layout.engine == "fsdp2":  # a group that computes, the next one, and what is in none; a group's gradients
        gathered = _computed(layout, parameters, 2 * parameters.largest_group + parameters.outside_groups)
        communication = 2 * _computed(layout, parameters, parameters.largest_group)
    if layout.engine == "zero" and layout.stage == 3:
        gathered = _computed(layout, parameters, parameters.largest_layer + REUSED)
    if layout.engine == "zero":  # two buckets, to fill one while the other is sent, below stage 3
        communication = (1 if layout.stage == 3 else 2) * BUCKET * (layout.held or torch.float32).itemsize
    return {"gathered": gathered, "communication": communication}


def _computed(layout: Layout, parameters: Parameters, numel: int) -> int:
    """Bytes of so many parameters, no more than there are, in the type that they are computed with."""
    everything = parameters.numel()
    return -(-parameters.bytes(layout.computed) * min(numel, everything) // everything)


def _casts(layout: Layout, parameters: Parameters, measured: Activations | None) -> int:
    if measured is not None:
        return measured.casts
    wide = [weight for weight in parameters.weights if weight.dtype == torch.float32]
    return sum(weight.bytes(layout.autocast) for weight in wide) if layout.casts else 0


def _elsewhere(layout: Layout, parameters: Parameters, states: int, nodes: int) -> dict[str, int]:
    """In the memory of each node and on its disk: what is offloaded, in slices over the nodes."""
    if layout.offload == "none":
        return {"host": 0, "nvme": 0}
    weights = parameters.bytes(layout.held) if layout.stage == 3 else 0
    # DeepSpeed's optimizer steps on fp32 gradients
    gradients = parameters.bytes(torch.float32 if layout.engine == "zero" else layout.held, trained=True)
    if layout.offload == "nvme":
        return {"host": _share(gradients, nodes), "nvme": _share(weights + states, nodes)}
    return {"host": _share(weights + gradients + states, nodes), "nvme": 0}


def _share(size: int, slices: int) -> int:
    return -(-size // slices)
