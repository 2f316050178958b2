"""Training stops before something that is not finite reaches the weights, and leaves what is needed to find out why."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import NoneType
from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_type
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.trainer import grad_scaler, is_fitting
from lightning_tricks.core.nonfinite.finite import FiniteCheck
from lightning_tricks.core.nonfinite.step_guard import Window
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.trick import Trick

__all__ = ["TerminateOnNonFinite"]


@final
class TerminateOnNonFinite(Trick):
    """Stops at the first infinite or undefined loss or gradient, with a checkpoint of the state before it.

    The weights, the optimizer and the buffers are those before the window of the bad batch. A new folder
    ``non_finite-step=N`` gets ``last_good.ckpt``, from which training can be resumed or the batch be tried again, and
    ``batch-rank=R.pt`` with the batch of each rank, in host memory, as ``torch.load`` reads it. An existing folder is
    never touched; the next gets ``-v1``, ``-v2`` behind its name. Then a FloatingPointError ends the fit on all ranks.

    With a GradScaler (fp16) infinite gradients are part of its search for a scale, and under DeepSpeed gradients are
    its own; there only the losses are looked at. Every batch waits for the device once.

    Args:
        dirpath: Where the folder is made; None for the directory of the logger, or the Trainer's
            ``default_root_dir``.

    Raises:
        FloatingPointError: At the first loss or gradient that is not finite, with the paths and the parameters' names.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[TerminateOnNonFinite("debug")], accelerator="cpu", logger=False)
    """

    needs_step_hooks = True

    def __init__(self, dirpath: str | None = None) -> None:
        check_type("dirpath", dirpath, str, os.PathLike, NoneType)
        super().__init__()
        self.dirpath = dirpath
        self._watch, self._window = FiniteCheck(), Window()
        self._batch: Any = None
        self._gradients = True  # whether they are looked at

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._watch, self._window = FiniteCheck(), Window()
            scaled = grad_scaler(trainer) is not None
            self._gradients = not scaled and not engine_of(trainer).is_deepspeed

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        self._window.begin_batch(trainer, pl_module, batch_idx)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._watch.note(trainer, loss)
        if not self._watch.finite(trainer, []):
            self._stop(trainer, pl_module)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._gradients and not self._watch.finite(trainer, [optimizer]):
            self._stop(trainer, pl_module)
        self._window.end(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None

    @override
    def _close(self) -> None:
        super()._close()
        self._batch = None

    def _stop(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._window.restore()
        said = self._watch.report(trainer, pl_module)
        raise FloatingPointError(
            f"TerminateOnNonFinite has stopped training after step {trainer.global_step}, in batch"
            f" {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}; {said}. {self._keep(trainer)}"
        )

    def _keep(self, trainer: pl.Trainer) -> str:
        """Write the state and the batch, and say where; what cannot be written shall not hide the reason to stop."""
        logged = trainer.log_dir if trainer.loggers else None  # for which all ranks ask
        parent = Path(self.dirpath or logged or trainer.default_root_dir)
        folder = trainer.strategy.broadcast(_new_folder(parent, trainer.global_step) if trainer.is_global_zero else "")
        if isinstance(folder, str):
            return f"Nothing could be kept in {parent}: {folder}."
        try:
            trainer.save_checkpoint(folder / "last_good.ckpt")  # in which all ranks take part, so before anything else
            batch = apply_to_collection(self._batch, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
            with atomic_write(folder / f"batch-rank={trainer.global_rank}.pt") as path, path.open("xb") as file:
                torch.save(batch, file)  # by its name torch 2.9 says nothing of a disk that is full near its end
        except Exception as error:  # what is no file system's, of a batch that cannot be pickled
            why = str(error).partition("\n")[0]
            return f"Not all of the state before it and the batch is in {folder}: {why}"
        return f"The state before it and the batch are in {folder}."


def _new_folder(parent: Path, step: int) -> Path | str:
    """A folder that was not there, or why there is none."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for version in count():
            folder = parent / (f"non_finite-step={step}" + (f"-v{version}" if version else ""))
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        return str(error)
    raise AssertionError("versions do not end")
