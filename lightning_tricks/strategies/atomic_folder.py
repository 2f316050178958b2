"""Sharded checkpoints, which are folders, saved atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import FolderParts, saves_folder
from lightning_tricks.core.safe_load.atomic_folder import discard, hidden, put_in_place, restore, sweep, sync_tree
from lightning_tricks.core.safe_load.damage import unfinished
from lightning_tricks.core.safe_load.own_folder import is_ours, mark, remove, remove_file, require_own
from lightning_tricks.strategies.async_save import AsyncSaves, error_of, reason_of, staged

Group = dist.ProcessGroup | None


class AtomicFolders(AsyncSaves, ParallelStrategy, FolderParts):
    """Base of a strategy whose checkpoints are folders: a folder with its final name is always complete.

    All ranks write to a hidden folder beside the final one. When they have finished and the files are on the disk,
    rank 0 exchanges the names. A killed process or a full disk therefore leaves the previous checkpoint under its
    name, and nothing that ``ckpt_path="last"`` or ``*.ckpt`` finds. Leftovers are removed when that name is saved
    again. The disk must be the same for all ranks and has to hold both checkpoints for a moment. If one rank fails to
    write, all ranks raise.

    A checkpoint that rank 0 saves as one file is left to Lightning.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        assert self.lightning_module is not None
        # Lightning refuses storage_options for a folder.
        if not saves_folder(self.lightning_module.trainer) or storage_options is not None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.finish_saving()
        path = _local_path(self.broadcast(filepath))
        new = hidden(path, self.broadcast(secrets.token_hex(4)), "saving")
        parts = {name: tensors for part in self.parts for name, tensors in part().items()}
        if self._saving is None or not self._saving.later:
            self._save_folder(checkpoint, parts, path, new, None)
            return
        checkpoint, parts = staged((checkpoint, parts))
        save = partial(self._save_folder, checkpoint, parts, path, new, self._saving.group)
        self._saving.submit(filepath, True, save)

    def _save_folder(
        self, checkpoint: dict[str, Any], parts: Mapping[str, Any], path: Path, new: Path, group: Group
    ) -> None:
        """Write a checkpoint into a new folder, and give it its name; ranks talk in a group, None for training's."""
        agree = partial(self._raise_on_all_ranks, path, group)
        on_rank_zero = partial(self._run_on_rank_zero, path, group)
        try:
            on_rank_zero(partial(_make_folder, new, path))
            agree(error_of(partial(_require_visible, new)))
            agree(self._write(checkpoint, new, group))
            for name, tensors in parts.items():
                agree(error_of(partial(_write_part, tensors, new / name, group)))
            agree(error_of(partial(sync_tree, new)) if self.local_rank == 0 else None)
            on_rank_zero(partial(put_in_place, new, path))
        except OSError:
            if self.is_global_zero and is_ours(new, "checkpoint"):
                remove(new)
            raise

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.require_complete(Path(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def require_complete(self, path: Path) -> None:
        """Raise if the folder is incomplete; first ``restore`` it if it had lost its name."""
        if self.is_global_zero:
            with suppress(OSError):  # A folder that does not exist raises below.
                restore(Path(os.path.realpath(path)))  # last.ckpt may be a link to the folder.
        self.barrier("AtomicFolders.load_checkpoint")
        if path.is_dir() and (reason := unfinished(path)):
            raise MisconfigurationException(f"{path} is not a complete checkpoint: {reason}. Resume from another one.")

    @override
    def _remove(self, filepath: str | Path) -> None:
        path = Path(filepath)
        if not path.is_dir() or path.is_symlink():
            super()._remove(filepath)
        elif self.is_global_zero and (unfinished(path) is None or is_ours(path, "checkpoint")):
            discard(path)
        elif self.is_global_zero:
            rank_zero_warn(f"{path} is not removed: it is no checkpoint.")

    def _write(self, checkpoint: dict[str, Any], folder: Path, group: Group) -> BaseException | None:
        """Save with Lightning's strategy; return the error of this rank."""
        assert group is None, "Lightning's strategies save in the group of training"
        save = partial(super().save_checkpoint, checkpoint, folder)
        if isinstance(self, DeepSpeedStrategy):
            return _first_write_error(self.deepspeed_engine.checkpoint_engine, save)
        return error_of(save)

    def _run_on_rank_zero(self, path: Path, group: Group, action: Callable[[], None]) -> None:
        self._raise_on_all_ranks(path, group, error_of(action) if self.is_global_zero else None)

    def _raise_on_all_ranks(self, path: Path, group: Group, error: BaseException | None) -> None:
        """Raise on all ranks if there is an error on one."""
        if self.reduce_boolean_decision(error is None) if group is None else _all(error is None, group):
            return
        reason = "another rank failed" if error is None else reason_of(error)
        raise OSError(f"{path} was not saved ({reason}). Any earlier checkpoint of that name is unchanged.") from error


def _all(decision: bool, group: dist.ProcessGroup) -> bool:
    vote = torch.tensor(decision, dtype=torch.int, device="cpu")
    dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
    return bool(vote)


def _write_part(tensors: dict[str, Any], folder: Path, group: Group) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=folder, process_group=group)


def _local_path(filepath: str | Path) -> Path:
    if "://" in str(filepath):
        raise ValueError(
            f"A sharded checkpoint is a folder on a disk that all ranks see, got {str(filepath)!r}. Save to such a disk"
            " and copy the folder, or save one file."
        )
    return Path(filepath)


def _make_folder(new: Path, final: Path) -> None:
    sweep(final)
    if final.is_dir() and not final.is_symlink() and unfinished(final):
        require_own(final, "checkpoint")  # what is no checkpoint would be lost
    new.mkdir(parents=True)
    mark(new, "checkpoint")


def _require_visible(new: Path) -> None:
    if not new.is_dir():
        raise FileNotFoundError(f"rank 0 has made {new}, which this rank does not see: all ranks need the same disk")


def _first_write_error(writer: Any, action: Callable[[], None]) -> BaseException | None:
    """Run ``action`` to its end although its writer may fail; return the first error of the writer.

    DeepSpeed's other ranks wait for this one until the end. A partly written file is removed at once, so that the
    small files that DeepSpeed still writes find space on a full disk. If they do not, the error is raised on this rank
    alone, and the other ranks end with it, as they would without this class.

    Args:
        writer: DeepSpeed's checkpoint engine.
        action: Saves the checkpoint through ``writer``.
    """
    errors: list[BaseException] = []

    def save(original: Callable[..., Any], state_dict: Any, path: str) -> None:
        if error := error_of(partial(original, state_dict, path)):
            errors.append(error)
            remove_file(Path(path))

    with ExitStack() as undo:
        undo.callback(wrap_method(writer, "save", save))
        action()
    return errors[0] if errors else None
