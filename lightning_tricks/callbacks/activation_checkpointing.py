"""Activation checkpointing: the activations inside blocks are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.replay.recompute import recompute
from lightning_tricks.core.selection import check_patterns, select_blocks
from lightning_tricks.core.trick import Conflict, Trick

__all__ = ["ActivationCheckpointing"]


@final
class ActivationCheckpointing(Trick):
    """Blocks keep only their inputs: activations inside are computed again in the backward pass, gradients are equal.

    For L blocks with activations of A bytes and inputs of I bytes, a step keeps ``L*I + A`` instead of ``L*A`` and runs
    each block's forward twice. Random numbers (torch, Python, NumPy) and the block's state are those of the first run,
    so dropout is the same and BatchNorm statistics are updated once. The module is any: its blocks are wrapped while
    training, under the same names, and are as before when the fit ends or fails. Validation is left alone. It works
    under DDP, FSDP2 and DeepSpeed, and inside code that the module compiles.

    ``policy="selective"`` keeps the results of matrix products, convolutions and attention, and computes again what is
    between them. It keeps more and computes less, which pays where those products are long; torch takes its time to
    sort the operations, unless they are compiled. ``benchmarks/cost/speed.py`` measures both. A layer that writes into
    such a result (an in-place activation right behind a convolution) makes torch raise in the backward pass: make it
    ``inplace=False``, or use "full". So does a second backward pass through one graph. With both policies torch raises
    for a block that writes into its own input, and for ``torch.func.grad``.

    Args:
        modules: Regular expressions searched in submodules' names, or names of classes ("BertLayer"); one or a
            sequence. Of selected modules within each other the outer ones are taken. Or a number of parameters, for
            the innermost submodules with at least so many. None for modules of one class that repeat in a ModuleList
            or Sequential.
        policy: "full" or "selective".

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, if no block is found.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[ActivationCheckpointing()], accelerator="cpu", logger=False)

    References:
        Chen et al., arXiv 1604.06174; for "selective" Korthikanti et al., arXiv 2205.05198.
    """

    conflicts = (
        Conflict(
            ("ActivationCheckpointing",),
            "both wrap the same blocks, which then run forward three times",
            "Leave one of them out, or name other modules",
            lambda one, other: one.modules == other.modules,
        ),
    )

    def __init__(
        self, modules: str | int | Sequence[str] | None = None, *, policy: Literal["full", "selective"] = "full"
    ) -> None:
        if isinstance(modules, int):
            check_count("modules", modules)
        elif modules is not None:
            check_patterns("modules", modules)
        check_choice("policy", policy, ("full", "selective"))
        super().__init__()
        self.modules = modules
        self.policy = policy

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # after configure_model
        try:
            found = select_blocks(pl_module, self.modules)
        except ValueError as error:
            raise MisconfigurationException(
                f"ActivationCheckpointing(modules={self.modules!r}) selects nothing in {type(pl_module).__name__}:"
                f" {error}"
            ) from None
        torch.compiler.reset()  # code that was compiled before would go on keeping activations
        for block in found.values():
            self._wrap(block, "forward", partial(recompute, block, self.policy))
