"""Activation checkpointing: the activations inside blocks are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.blocks import chosen_blocks
from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.recompute import recompute
from lightning_tricks.core.wrapping import wrap_method


@final
class ActivationCheckpointing(Callback):
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
        blocks: Names of submodules or of classes ("encoder", "BertLayer"), or a number of parameters, for the innermost
            submodules with at least so many. None for modules of one class that repeat in a ModuleList or Sequential.
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

    def __init__(
        self, blocks: str | int | Sequence[str] | None = None, *, policy: Literal["full", "selective"] = "full"
    ) -> None:
        if isinstance(blocks, int):
            check_count("blocks", blocks)
        elif blocks is not None and not all(isinstance(name, str) for name in blocks):
            raise TypeError(
                f"blocks must be names of submodules or classes, or a number of parameters, got {blocks!r}."
            )
        check_choice("policy", policy, ("full", "selective"))
        self.blocks = blocks
        self.policy = policy
        self._undo: list[Callable[[], None]] = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # after configure_model
        blocks = [self.blocks] if isinstance(self.blocks, str) else self.blocks
        try:
            found = chosen_blocks(pl_module, blocks)
        except ValueError as error:
            raise MisconfigurationException(
                f"ActivationCheckpointing(blocks={self.blocks!r}) finds nothing in {type(pl_module).__name__}: {error}"
            ) from None
        torch.compiler.reset()  # code that was compiled before would go on keeping activations
        for block in found.values():
            self._undo.append(wrap_method(block, "forward", partial(recompute, block, self.policy)))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()
