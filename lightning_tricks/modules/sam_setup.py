"""What SAM needs of a Trainer: checks at setup, recorded steps, checkpoints with unperturbed weights, a logged norm."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.active import Row, Trick
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.recorder import StepRecorder
from lightning_tricks.core.settings import settings
from lightning_tricks.core.trainer import (
    is_fitting,
    log_now_and_then,
    require_whole_weights,
    weights_held,
)
from lightning_tricks.core.weights import copy_, unnoticed
from lightning_tricks.core.wrapping import wrap_method
from lightning_tricks.modules.sam_rules import SAM, chosen


class SharpModule(Protocol):
    """What the callback sees of a module with the mixin."""

    sam: SAM
    automatic_optimization: bool
    _sam_recorder: StepRecorder | None
    _sam_aside: tuple[list[Tensor], list[Tensor]] | None
    _sam_norm: Tensor | None


class SAMCallback(Trick):
    """Checks the Trainer, and records its training steps for the module."""

    def __init__(self) -> None:
        self._recorder = StepRecorder()
        self._undo = ExitStack()
        self._ran = self._batches = False  # whether SAM did, and whether there was anything to do it with

    @override
    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer) or not hasattr(pl_module, "_sam_recorder"):
            return
        _check(trainer, pl_module)
        pl_module._sam_recorder, pl_module._sam_calls = self._recorder, {}
        pl_module._sam_held = weights_held(trainer, pl_module, "SAM")
        if pl_module.automatic_optimization:
            whole = pl_module.sam.micro_batch_size is None
            self._recorder.start(trainer, pl_module, partial(_perturbs, trainer, pl_module.sam), gradients=whole)
            self._undo.callback(self._recorder.stop)
        self._undo.callback(wrap_method(trainer, "save_checkpoint", partial(_save, pl_module)))

    @override
    def row(self, trainer: pl.Trainer) -> Row | None:
        module: Any = trainer.lightning_module
        return ("SAM", settings(module.sam)) if hasattr(module, "_sam_recorder") else None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._ran = self._batches = False
        if not hasattr(pl_module, "_sam_recorder"):
            return
        for name, weight in pl_module.named_parameters():
            if weight.requires_grad and weight.dtype not in (torch.float32, torch.float64):
                raise MisconfigurationException(
                    f"SAM needs fp32 weights, since 16-bit ones round its perturbation away; {name} is {weight.dtype}."
                    " Use precision='bf16-mixed' or '16-mixed'."
                )
        if pl_module.sam.params is not None and not chosen(pl_module, pl_module.sam.params):
            names = ", ".join([name for name, _ in pl_module.named_parameters()][:5])
            raise MisconfigurationException(
                f"SAM(params={pl_module.sam.params!r}) is found in no parameter's name; the first are {names}."
            )

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._recorder.step is not None:
            raise MisconfigurationException(
                f"{type(pl_module).__name__}.backward must call super().backward(loss): SAM works inside it."
            )

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._batches = True
        norm = getattr(pl_module, "_sam_norm", None)
        if norm is not None:
            self._ran = True
            log_now_and_then(trainer, lambda: {"tricks/sam_grad_norm": float(norm)})

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        manual = hasattr(pl_module, "_sam_recorder") and not pl_module.automatic_optimization
        if manual and self._batches and not self._ran:
            raise MisconfigurationException(
                f"{type(pl_module).__name__} optimizes manually and never called self.sam_backward(closure) or"
                " self.sam_step(closure): call one of them in training_step, or leave SAMMixin out."
            )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self._undo.close()
        if hasattr(pl_module, "_sam_recorder"):
            pl_module._sam_recorder = pl_module._sam_norm = pl_module._sam_held = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def require_manual(module: SharpModule, method: str) -> None:
    """Raise unless the module is in a fit with manual optimization."""
    if module.automatic_optimization or module._sam_recorder is None:
        raise MisconfigurationException(
            f"{method} belongs into the training_step of a fit with automatic_optimization=False; with automatic"
            " optimization SAM works by itself."
        )


def check_window(accumulate: int, clip_norm: float | None) -> None:
    """Raise for what ``sam_step`` cannot work with."""
    check_count("accumulate", accumulate)
    if clip_norm is None:
        return
    check_range("clip_norm", clip_norm, 0.0)
    if clip_norm == 0:  # which Lightning takes for no clipping
        raise ValueError(f"clip_norm must be above 0, got {clip_norm}: leave it out for no clipping.")


def _perturbs(trainer: pl.Trainer, sam: SAM) -> bool:
    """Whether the optimizer step that this batch belongs to is one with a perturbation."""
    return trainer.global_step % sam.every_n_steps == 0


def _save(module: SharpModule, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save a checkpoint with the module's own weights, also when it is asked for at perturbed ones."""
    if module._sam_aside is None:
        return original(*args, **kwargs)
    weights, ours = module._sam_aside
    perturbed = [weight.detach().clone() for weight in weights]
    with unnoticed(weights):
        try:
            copy_(weights, ours)
            return original(*args, **kwargs)
        finally:
            copy_(weights, perturbed)


def _check(trainer: pl.Trainer, pl_module: Any) -> None:
    name, sam = type(pl_module).__name__, pl_module.sam
    if not isinstance(sam, SAM):
        raise MisconfigurationException(f"{name}.sam must be a SAM(rho=...), got {sam!r}.")
    if pl_module.automatic_optimization:
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise MisconfigurationException(f"SAM needs the batch: {name}.training_step must not take dataloader_iter.")
    elif sam.every_n_steps > 1 or sam.micro_batch_size is not None:
        raise MisconfigurationException(
            f"With automatic_optimization=False {name} decides itself which steps and samples are perturbed, got {sam}:"
            " leave out every_n_steps and micro_batch_size, and call manual_backward where SAM is not wanted."
        )
    if not isinstance(trainer.strategy, ModelParallelStrategy):
        require_whole_weights(trainer, "SAM")
    elif not pl_module.automatic_optimization or sam.micro_batch_size is not None:
        raise MisconfigurationException(
            "Under ModelParallelStrategy SAM has one perturbation for the batches of all devices and works inside"
            f" automatic optimization, got automatic_optimization={pl_module.automatic_optimization} and {sam}: leave"
            " out micro_batch_size, or use another strategy."
        )
