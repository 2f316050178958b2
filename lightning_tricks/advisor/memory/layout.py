"""What a strategy replicates, shards or offloads; apart from the estimate, which is the same for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_tricks.core.checks import check_choice
from lightning_tricks.strategies import presets

HALF = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
TRUE = {"16-true": torch.float16, "bf16-true": torch.bfloat16, "64-true": torch.float64}
PRECISIONS = ("32-true", *HALF, *TRUE)
ENGINES = {"SinglePreset": "single", "DDPPreset": "ddp", "FSDP2Preset": "fsdp2", "ZeROPreset": "zero"}


@dataclass(frozen=True)
class Layout:
    """The memory layout of a strategy in a precision.

    Args:
        strategy: The name of the strategy.
        precision: Lightning's name of the precision.
        engine: "single", "ddp", "fsdp2" or "zero".
        stage: The sharded parts: none (0), optimizer states (1), gradients too (2), weights too (3).
        offload: The place of sharded parts: "none" (the device), "cpu" or "nvme".
        bucket_view: Whether gradients are views into DDP's buckets, rather than copied there.
        within_nodes: Whether each node has a copy of its own of what is sharded (HSDP).
        splits_layers: Whether the devices of a node share each layer (tensor parallelism), of which they have parts
            that are sharded among nodes.
        outer_optimizer: Whether there are the weights and the momentum of an outer optimizer (DiLoCo).
    """

    strategy: str
    precision: str
    engine: str = "single"
    stage: int = 0
    offload: str = "none"
    bucket_view: bool = True
    within_nodes: bool = False
    splits_layers: bool = False
    outer_optimizer: bool = False

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The dtype of stored floating-point weights; None if they keep their own."""
        if self.engine == "zero":
            return HALF.get(self.precision)
        return TRUE.get(self.precision)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of floating-point weights in the forward pass; None if they keep their own."""
        return HALF.get(self.precision) if self.engine == "zero" else self.weight_dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matrix products under autocast; None without autocast."""
        return HALF.get(self.precision)

    @property
    def casts(self) -> bool:
        """Whether autocast keeps 16-bit copies of the weights during the forward and backward pass.

        Under FSDP2, too: the gathered weights of a block are freed, and their copies are kept for its backward pass.
        """
        return self.autocast is not None and self.compute_dtype is None

    def shards(self, stage: int, world: int, nodes: int) -> int:
        """The number of shards of what ZeRO shards from ``stage`` on, with ``world`` devices on all nodes."""
        if self.stage < stage:
            return 1
        if self.splits_layers:
            return nodes
        return world // nodes if self.within_nodes else world


def layout_of(strategy: str | None, precision: str | None) -> Layout:
    """Look up the layout of a preset, of "ddp", or of a single device (None or "auto").

    Raises:
        ValueError: If a name is unknown, or the precision is not that of the preset.
    """
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    rows = {row["name"]: row for row in presets()}
    name = "auto" if strategy is None else strategy
    check_choice("strategy", name, ("auto", "ddp", *rows))
    if name not in rows:
        engine = "ddp" if name == "ddp" else "single"
        return Layout(name, precision or "bf16-mixed", engine, bucket_view=False)
    row = rows[name]
    if precision is not None and precision != row["precision"]:
        raise ValueError(
            f"strategy={name!r} trains in {row['precision']!r}, got precision={precision!r}. Leave precision= out, or"
            " choose another strategy."
        )
    engine, arguments = ENGINES[row["strategy"]], row["arguments"]
    offload = arguments.get("offload", False)
    return Layout(
        name,
        row["precision"],
        engine,
        stage={"zero": arguments.get("stage", 3), "fsdp2": 3}.get(engine, 0),
        offload={True: "cpu", False: "none"}.get(offload, offload),
        within_nodes=arguments.get("replicas") == "nodes",
        splits_layers=arguments.get("tensor_parallel") == "node",
        outer_optimizer="outer_lr" in arguments,
    )
