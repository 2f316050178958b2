"""Checkpoints that are written in a thread while training goes on."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import callbacks_of, is_fitting
from lightning_tricks.core.safe_load.atomic_folder import put_link
from lightning_tricks.core.safe_load.damage import folder_error

Job = Callable[[], None]


class Saving:
    """What one fit writes in a thread: jobs in their order, and none after one that has failed.

    Args:
        device: The device of this process, which a new thread does not know.
    """

    def __init__(self, device: torch.device) -> None:
        self.later = False  # whether the present save may be written while training goes on
        self.undo = ExitStack()
        staged(())  # imports now what the first save would wait for
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None
        self._exists: dict[str, bool] = {}  # what there is of a name once the jobs are done
        self._group: dist.ProcessGroup | None = None

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copy of the strategy writes nothing

    @property
    def group(self) -> dist.ProcessGroup:
        """The group in which the threads of all ranks talk: in the others they would disturb training."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def submit(self, path: str | Path, exists: bool, job: Job | None) -> None:
        """Do a job after the others; then there is something at a path or not. None if other ranks do it."""
        self._exists[str(path)] = exists
        if job is not None:
            self._thread = self._thread or ThreadPoolExecutor(1, "lightning_tricks_save", self._use_device)
            self._jobs.append(self._thread.submit(self._run, job))

    def will_exist(self, path: str | Path) -> bool | None:
        """Whether there is something at a path once the jobs are done; None if none of them is about it."""
        return self._exists.get(str(path))

    def finish(self) -> BaseException | None:
        """Wait for the jobs of this rank; return the error of the one that failed."""
        wait(self._jobs)
        error, self._error = self._error, None
        self._jobs, self._exists = [], {}
        return error

    def close(self) -> BaseException | None:
        """``finish``, for the last time."""
        error = self.finish()
        self.undo.close()
        if self._thread is not None:
            self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        return error

    def _use_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)

    def _run(self, job: Job) -> None:
        if self._error is None:
            self._error = error_of(job)


class AsyncSaves(Strategy):
    """Base of a strategy with ``async_save``: a fit goes on while the checkpoints of ``ModelCheckpoint`` are written.

    What is to be saved is copied to host memory first, and a thread writes it. What the callback does after a save,
    which is to remove older checkpoints and to link ``last.ckpt``, is done after it in the same thread, and not at all
    if it fails. So there is at most one copy, and the older checkpoint stays until the new one is there. The error of
    a write is raised by the next save, or when training ends.

    A save that is no ModelCheckpoint's, such as ``trainer.save_checkpoint`` in a hook, has ended when it returns: its
    file may be read then.
    """

    # Lightning's AsyncCheckpointIO copies on the device, and weights that share memory one by one. It removes the older
    # checkpoint while the new one is written, accepts any number of copies, and raises an error in every later save.
    # torch's async_save writes one folder, of which a checkpoint here has one for each average: these are its halves.

    async_save = False
    _saving: Saving | None = None  # while a fit runs

    def finish_saving(self) -> None:
        """Wait until all checkpoints so far are on the disk; all ranks take part.

        Raises:
            OSError: If one could not be written, on all ranks.
        """
        if self._saving is not None:
            error = self._saving.finish()
            if not self.reduce_boolean_decision(error is None):
                raise error or OSError("A checkpoint was not saved: another rank has failed.")

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        if self.async_save and module is not None and is_fitting(module.trainer):
            self._begin(module.trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise MisconfigurationException(
                "async_save=True writes checkpoints while training goes on, got the plugin AsyncCheckpointIO, which"
                " does so, too, and removes older ones before. Leave the plugin out."
            )
        checkpoints = callbacks_of(trainer, ModelCheckpoint)
        every = any(callback.save_top_k == -1 for callback in checkpoints)
        for logger in trainer.loggers:
            if _reads_every_checkpoint(logger, every):
                raise MisconfigurationException(
                    f"{type(logger).__name__} uploads every checkpoint as soon as it is saved (log_model=..., or an"
                    " after_save_checkpoint of its own), got async_save=True, with which it is not there yet. Leave one"
                    " of them out, or pass log_model=True and ModelCheckpoint(save_top_k=1), of which the best are"
                    " uploaded at the end."
                )
        self._saving = Saving(self.root_device)
        wrap = self._saving.undo.callback
        # Before the hooks on_train_end, which may read checkpoints.
        wrap(wrap_method(trainer.fit_loop, "on_run_end", self._finish_first))
        for callback in checkpoints:
            wrap(wrap_method(callback, "_save_checkpoint", self._save_later))
            wrap(wrap_method(callback, "_link_checkpoint", self._link_later))
            wrap(wrap_method(callback, "file_exists", self._will_exist))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self.finish_saving()
        if self._saving is None or not self._saving.later:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        write = None
        if self.is_global_zero:
            write = partial(_write_file, self.checkpoint_io, staged(checkpoint), filepath, storage_options)
        self._saving.submit(filepath, True, write)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.finish_saving()
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self._saving is None:
            self._remove(filepath)
        else:
            self._saving.submit(filepath, False, partial(self._remove, filepath))

    def _remove(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_saving()

    @override
    def teardown(self) -> None:
        saving, self._saving = self._saving, None
        # Every rank for itself, since others may have failed.
        error = None if saving is None else saving.close()
        super().teardown()
        if error is not None:
            raise error

    # -- instead of ModelCheckpoint's methods --------------------------------------------------------------------------

    def _save_later(self, original: Callable[..., None], trainer: L.Trainer, filepath: str) -> None:
        assert self._saving is not None
        self._saving.later = True
        try:
            original(trainer, filepath)
        finally:
            self._saving.later = False

    def _link_later(self, original: Callable[..., None], trainer: L.Trainer, filepath: str, linkpath: str) -> None:
        assert self._saving is not None
        self._saving.submit(linkpath, True, partial(_link, filepath, linkpath) if trainer.is_global_zero else None)

    def _will_exist(self, original: Callable[..., bool], filepath: str | Path, trainer: L.Trainer) -> bool:
        assert self._saving is not None
        known = self._saving.will_exist(filepath)
        return original(filepath, trainer) if known is None else known

    def _finish_first(self, original: Job) -> None:
        self.finish_saving()
        original()


def _reads_every_checkpoint(logger: Logger, every_is_kept: bool) -> bool:
    """Whether a logger reads checkpoints when they are saved; of one with a hook of its own nobody knows."""
    log_model = getattr(logger, "_log_model", None)
    if log_model is not None:
        return log_model == "all" or (log_model is True and every_is_kept)
    hook, own = type(logger).after_save_checkpoint.__module__, Logger.after_save_checkpoint.__module__
    return hook.partition(".")[0] != own.partition(".")[0]


def staged(state: Any) -> Any:
    """A copy of a checkpoint's values; the tensors of its dictionaries and lists are copied to host memory.

    What shares memory in these shares it in the copy.

    Raises:
        MisconfigurationException: For a tensor that cannot be copied.
    """
    # Importing it takes a tenth of a second.
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    stager = DefaultStager(StagingOptions(False, False, False, False))
    tensors: dict[Any, Tensor] = {id(tensor): tensor for tensor in _plain_tensors(state)}
    try:
        copies: Any = stager.stage(tensors)
        for key, tensor in tensors.items():
            copies[key].requires_grad_(tensor.requires_grad)
        return copy.deepcopy(state, copies)
    except RuntimeError as error:  # of a subclass of Tensor, such as a state of torchao's optimizers
        raise MisconfigurationException(
            f"async_save=True writes a copy of the checkpoint, got a tensor that cannot be copied: {error}. Leave"
            " async_save out, or take the optimizer from lightning_tricks.optimizer(), whose states are plain tensors."
        ) from error
    finally:
        stager.close()  # It would hold the copy until Python collects cycles.


def _plain_tensors(state: Any) -> Iterator[Tensor]:
    """Tensors that torch's stager copies right: a Parameter would lose its class, and a conjugate its sign."""
    if type(state) in (Tensor, DTensor):
        if state.layout == torch.strided and not (state.is_conj() or state.is_neg()):
            yield state
    elif isinstance(state, Mapping | list | tuple):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _plain_tensors(value)


def error_of(action: Job) -> BaseException | None:
    """What an action raises; torch's error for checkpoint folders included, which is no ``Exception``."""
    try:
        action()
    except (Exception, folder_error()) as error:
        return error
    return None


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _write_file(
    plugin: CheckpointIO, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None
) -> None:
    try:
        plugin.save_checkpoint(checkpoint, path, storage_options=storage_options)
    except Exception as error:  # a plugin may raise anything
        raise OSError(f"{path} was not saved ({reason_of(error)}).") from error


def _link(filepath: str, linkpath: str) -> None:
    """Let a link stand for a checkpoint, in place of what had its name."""
    if os.path.abspath(filepath) != os.path.abspath(linkpath):
        put_link(Path(filepath), Path(linkpath))
