"""The answer of ``estimate_memory``: bytes, part by part."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, final

from lightning_tricks.advisor.activations import Activations
from lightning_tricks.core.checks import check_count

if TYPE_CHECKING:
    from rich.table import Table

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
