"""Training stops before a value that is not finite reaches the weights, and keeps the state and the batch."""

from __future__ import annotations

import copy
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, final

import lightning as L
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.trainer import grad_scaler, is_fitting
from lightning_tricks.core.nonfinite.finite import FiniteCheck
from lightning_tricks.core.nonfinite.step_guard import Window
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.trick import Trick

__all__ = ["TerminateOnNonFinite"]


@final
class TerminateOnNonFinite(Trick):
    """Stops at the first infinite or NaN loss or gradient, and saves the state before it and the batch.

    Weights, optimizers and buffers are those before the window of the bad batch. They are saved as ``last_good.ckpt``
    in a new folder ``non_finite-step=N``, to resume training or to try the batch again. ``batch-rank=R.pt`` holds the
    batch of rank R, for ``torch.load``. An existing folder is never changed: the new one is then called ``...-v1``,
    ``...-v2`` and so on. Then a FloatingPointError ends the fit on all ranks. ``find_non_finite`` repeats the step and
    finds the operation.

    With a GradScaler (fp16), which finds its scale by infinite gradients, and under DeepSpeed, which owns the
    gradients, only the losses are checked. Every batch waits for the device once.

    Args:
        dirpath: The directory for the new folder; None for that of the logger, or the Trainer's
            ``default_root_dir``.

    Raises:
        NotADirectoryError: If the directory is a file.
        FloatingPointError: At the first loss or gradient that is not finite, with the paths and the parameters' names.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[TerminateOnNonFinite("debug")], accelerator="cpu", logger=False)
    """

    needs_step_hooks = True

    def __init__(self, dirpath: str | None = None) -> None:
        if dirpath is not None:
            folder_of("dirpath", dirpath)
        super().__init__()
        self.dirpath = dirpath
        self._watch, self._window = FiniteCheck(), Window()
        self._batch: Any = None
        self._gradients = True  # whether gradients are checked

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._watch, self._window = FiniteCheck(), Window()
            scaled = grad_scaler(trainer) is not None
            self._gradients = not scaled and not engine_of(trainer).is_deepspeed

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._window.start(trainer, pl_module, self._undo)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # A module may take parts out of its batch.
        self._batch = copy.copy(batch) if type(batch) in (dict, list) else batch
        self._window.begin_batch(trainer, pl_module, batch_idx)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if not is_fitting(trainer):  # a step that adapts the module to a test set
            return
        self._watch.note(trainer, loss)
        if not self._watch.finite(trainer, []):
            self._stop(trainer, pl_module)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not is_fitting(trainer):
            return
        if self._gradients and not self._watch.finite(trainer, [optimizer]):
            self._stop(trainer, pl_module)
        self._window.end(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = None

    @override
    def _close(self) -> None:
        super()._close()
        self._batch = None

    def _stop(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        lost = self._window.restore()
        report = self._watch.report(trainer, pl_module)
        raise FloatingPointError(
            f"TerminateOnNonFinite has stopped training after step {trainer.global_step}, in batch"
            f" {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}; {report}. {self._keep(trainer)}"
            + (f" {some(lost)} are as the step has written them by itself." if lost else "")
        )

    def _keep(self, trainer: L.Trainer) -> str:
        """Write the state and the batch, and return where; a failure must not hide the reason to stop."""
        logged = trainer.log_dir if trainer.loggers else None  # all ranks take part in log_dir
        parent = Path(self.dirpath or logged or trainer.default_root_dir)
        folder = trainer.strategy.broadcast(_new_folder(parent, trainer.global_step) if trainer.is_global_zero else "")
        if isinstance(folder, str):
            return f"Nothing could be kept in {parent}: {folder}."
        try:
            trainer.save_checkpoint(folder / "last_good.ckpt")  # all ranks take part, so it comes first
            batch = apply_to_collection(self._batch, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
            with atomic_write(folder / f"batch-rank={trainer.global_rank}.pt") as path, path.open("xb") as file:
                torch.save(batch, file)  # given a path, torch 2.9 misses a disk that is full near the end
        except Exception as error:  # besides the file system, pickling the batch can fail
            why = str(error).partition("\n")[0]
            return f"The state before it and the batch are incomplete in {folder}: {why}"
        return f"The state before it and the batch are in {folder}: find_non_finite tells which operation it was."


def _new_folder(parent: Path, step: int) -> Path | str:
    """A new folder, or the reason why it could not be made."""
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
