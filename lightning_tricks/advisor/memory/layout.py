"""Where a strategy keeps what: which parts are whole on every device, in slices, in host memory or on a disk."""

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
    """One strategy in one precision."""

    strategy: str
    precision: str
    engine: str = "single"
    stage: int = 0  # what is sliced: optimizer states (1), gradients too (2), weights too (3)
    offload: str = "none"
    bucket_view: bool = True  # gradients live in DDP's buckets and are not copied there

    @property
    def held(self) -> torch.dtype | None:
        """The floating-point type that weights are held in; None: each in its own."""
        if self.engine == "zero":
            return HALF.get(self.precision)
        return TRUE.get(self.precision)

    @property
    def computed(self) -> torch.dtype | None:
        """The type that weights come to the forward pass in; None: each in its own."""
        return HALF.get(self.precision) if self.engine in ("zero", "fsdp2") else self.held

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that matrix products are computed in, if another."""
        return HALF.get(self.precision)

    @property
    def casts(self) -> bool:
        """Whether 16-bit copies of wider weights live through the forward and backward pass."""
        return self.autocast is not None and self.computed is None

    def slices(self, part: int, world: int) -> int:
        """Into how many slices a part (1 optimizer, 2 gradients, 3 weights) is cut."""
        return world if self.stage >= part else 1


def layout_of(strategy: str | None, precision: str | None) -> Layout:
    """The layout of a preset, of "ddp", or of one device (None, "auto").

    Raises:
        ValueError: For an unknown name, or a precision that is not the preset's.
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
    )
