"""A machine that is taken away: all processes save and end at the same step, and the next start goes on from there."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import lightning as L
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.checkpoints.newest import newest_checkpoint
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.exact.reading import follow_reading
from lightning_tricks.core.lightning.trainer import extremes, later_extremes, will_step
from lightning_tricks.core.safe_load.own_folder import unused
from lightning_tricks.core.trick import Trick

__all__ = ["Preemption"]

_END, _REQUEUE = 1, 2  # what a signal asks for; 0 for nothing
_NAME = re.compile(r"preempted-step=(\d+)(-v\d+)?\.ckpt")


@final
class Preemption(Trick):
    """Saves and ends all processes at the same step when the job is preempted; ``ckpt_path="newest"`` resumes there.

    Schedulers and clouds send SIGTERM before they take a machine away. After it, or SIGUSR1, on any process, all of
    them finish the optimizer step that they are in (on several GPUs, which no process waits for, the next one as well),
    save ``preempted-step=N.ckpt``, and raise Lightning's ``SIGTERMException``: the program ends with exit status 143. A
    validation is left before its next batch, and runs again in full after the resume. After the last step training ends
    as if there were no signal.

    In a SLURM job SIGUSR1 (``#SBATCH --signal=SIGUSR1@120``) also queues the job again, once; ``SLURMEnvironment``'s
    ``requeue_signal`` and ``auto_requeue=False`` are respected. Lightning's own handlers, which save and broadcast amid
    a step, where processes wait for one another forever, are left out during the fit. Handlers of others are put back
    after it. Workers of data loaders outlive the signals, too.

    Amid an epoch the fit goes on as with ``ExactResume``, with the samples and the random numbers that it would have
    had. A loader whose position cannot be known begins its order again then, with a warning.

    ``trainer.fit(..., ckpt_path="newest")`` goes on from what ``newest_checkpoint(folder)`` finds on the first process,
    and starts from the beginning if that is nothing. For machines that fail without a signal let a ``ModelCheckpoint``
    save in the same folder. Of the files that it saves, the next one replaces the last; no others are removed.

    Args:
        folder: The folder of this run's checkpoints, on a disk that all machines share.

    Raises:
        TypeError: If the folder is not a path.
        NotADirectoryError: If the folder is a file.
        MisconfigurationException: If ``fit`` does not run in the main thread, the only thread in which Python
            runs signal handlers; or with ``ckpt_path="newest"``, if a process does not see what the first one has
            found.

    Example:
        >>> trainer = L.Trainer(callbacks=[Preemption("runs/a")], accelerator="cpu", logger=False)
        >>> # trainer.fit(module, data, ckpt_path="newest") begins, or goes on with what is in runs/a

    References:
        SLURM, sbatch --signal and scontrol requeue: https://slurm.schedmd.com/sbatch.html.
    """

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(("Preemption",), "both would answer the same signal", "Keep the one with the folder of this run"),
    )

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = str(folder_of("folder", folder))
        self._saved: list[str] = []  # names of the checkpoints that this run has saved, in earlier lives too
        self._wish = 0  # what this process was asked for
        self._validated = False  # after the present batch
        self._compares = False  # in the present validation, which has the same number of batches on all ranks
        self._asked: Callable[[], tuple[int, int]] = lambda: (0, 0)  # gives the wishes of the ranks at the last call
        super().__init__()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if threading.current_thread() is not threading.main_thread():
            raise MisconfigurationException(
                "Preemption needs a fit in the main thread, since Python tells no other of signals: leave it out in"
                " workers of Ray, which restarts them itself, and resume with ckpt_path=newest_checkpoint(folder)."
            )
        self._wish, self._asked, self._saved = 0, lambda: (0, 0), []
        follow_reading(trainer, None)
        wishes = _wishes(trainer)
        self._wrap(trainer._signal_connector, "register_signal_handlers", lambda original: None)
        for number, wish in wishes.items():
            self._undo.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
            signal.signal(number, partial(self._receive, wish))
        self._wrap(trainer._checkpoint_connector, "resume_start", partial(self._resume, trainer))
        self._wrap(trainer.strategy, "process_dataloader", partial(self._shield, trainer, [*wishes]))
        self._wrap(trainer.fit_loop.epoch_loop, "on_advance_end", partial(self._after_batch, trainer))

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._saved and "callbacks" in checkpoint:  # Lightning would refuse a second one with a state before we do
            checkpoint["callbacks"][self.state_key] = {"saved": [*self._saved]}

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        saved = checkpoint.get("callbacks", {}).get(self.state_key, {}).get("saved", [])
        self._saved = [name for name in saved if _NAME.fullmatch(name) and os.path.lexists(Path(self.folder) / name)]

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True
        batches = sum(trainer.num_val_batches)
        fewest, most = extremes(trainer, -1 if math.isinf(batches) else int(batches))
        self._compares = fewest == most != -1 and not trainer.sanity_checking

    @override
    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._compares and (wish := self._agreed(trainer)):
            # Lightning would go on after the batches that are done, with their part of the metrics lost. It runs all
            # of a validation that was interrupted in its first batch.
            progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
            done = progress.total.completed - progress.current.completed
            progress.load_state_dict(
                {"total": _in_first_batch(done), "current": _in_first_batch(0), "is_last_batch": False}
            )
            follow_reading(trainer, None).repeats_validation = True
            self._stop(trainer, wish)

    def _receive(self, wish: int, *_: Any) -> None:
        self._wish = max(self._wish, wish)

    def _agreed(self, trainer: L.Trainer) -> int:
        """What any rank was asked for; all ranks take part. A device that computes ahead tells it one call later."""
        before, self._asked = self._asked, later_extremes(trainer, self._wish)
        at_once = trainer.world_size == 1 or trainer.strategy.root_device.type == "cpu"
        return (self._asked if at_once else before)()[1]

    def _after_batch(self, trainer: L.Trainer, original: Callable[..., None], *args: Any) -> None:
        self._validated = False
        original(*args)
        # No checkpoint holds accumulated gradients, and Lightning loses count of one made between the last batch of
        # an epoch, or a validation that is over, and what follows.
        done = trainer.fit_loop.epoch_loop._is_training_done or trainer.should_stop
        if not done and not self._validated and will_step(trainer) and (wish := self._agreed(trainer)):
            self._stop(trainer, wish)

    def _stop(self, trainer: L.Trainer, wish: int) -> None:
        """Save, queue the job again if that was asked for, and end."""
        # Even the newest checkpoint could be lost while another was written over it.
        free = unused(Path(self.folder), f"preempted-step={trainer.global_step}", ".ckpt")
        path = trainer.strategy.broadcast(str(free))
        earlier, self._saved = self._saved, [*self._saved, Path(path).name]
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            if wish == _REQUEUE:
                _requeue()
            for old in (Path(self.folder) / name for name in earlier):
                known = _NAME.fullmatch(old.name)
                if known and int(known[1]) <= trainer.global_step and old.exists() and not old.is_symlink():
                    trainer.strategy.remove_checkpoint(old)
        trainer.strategy.barrier("Preemption")  # SLURM may kill all tasks when the first one ends
        rank_zero_info(f'Preemption: saved {path} after a signal. Resume with ckpt_path="newest".')
        cluster = trainer._accelerator_connector.cluster_environment
        # Lightning kills the main process if one that it has started ends with another status than 0.
        started = type(cluster) is LightningEnvironment and trainer.local_rank > 0
        raise SIGTERMException(0 if started else 128 + signal.SIGTERM)

    def _resume(
        self,
        trainer: L.Trainer,
        original: Callable[..., None],
        checkpoint_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        if checkpoint_path == "newest":
            found = newest_checkpoint(self.folder) if trainer.is_global_zero else None
            checkpoint_path = trainer.strategy.broadcast(found)
            seen = checkpoint_path is None or Path(checkpoint_path).exists()
            if not trainer.strategy.reduce_boolean_decision(seen):
                raise MisconfigurationException(
                    f"Preemption(folder={self.folder!r}): the first process has found {checkpoint_path}, which another"
                    " one does not see. Let folder= be on a disk that all machines share."
                )
        original(checkpoint_path, weights_only=weights_only)

    def _shield(
        self, trainer: L.Trainer, signals: Collection[int], original: Callable[..., Any], dataloader: Any
    ) -> Any:
        """Let the workers of a loader outlive the signals, which a scheduler may send to all processes of a machine."""
        loader = original(dataloader)
        if isinstance(loader, DataLoader) and loader.num_workers and hasattr(signal, "sigwaitinfo"):
            self._undo.callback(setattr, loader, "worker_init_fn", loader.worker_init_fn)
            _auto_add_worker_init_fn(loader, trainer.global_rank)  # which leaves loaders with another function alone
            loader.worker_init_fn = partial(_outlive, signals, loader.worker_init_fn)
        return loader


def _wishes(trainer: L.Trainer) -> dict[int, int]:
    """The signals, and what they ask for."""
    cluster = trainer._accelerator_connector.cluster_environment
    if not isinstance(cluster, SLURMEnvironment) or cluster.requeue_signal is None:
        return {signal.SIGTERM: _END, signal.SIGUSR1: _END}
    return {signal.SIGTERM: _END, cluster.requeue_signal: _REQUEUE if cluster.auto_requeue else _END}


def _in_first_batch(before: int) -> dict[str, int]:
    """Lightning's progress in the first batch of a loop, after ``before`` batches of earlier runs."""
    return {"ready": before + 1, "started": before + 1, "processed": before, "completed": before}


def _requeue() -> None:
    """Queue this job, or this task of a job array, again; with a warning if SLURM refuses."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        rank_zero_warn(f"The job was not queued again, and must be started by hand: {error}")


def _outlive(signals: Collection[int], original: Callable[[int], None] | None, worker: int) -> None:
    """``worker_init_fn`` of a worker that ends with its parent, and at no other's signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    threading.Thread(target=_end_with_parent, args=(signals,), daemon=True).start()
    if original is not None:
        original(worker)


def _end_with_parent(signals: Collection[int]) -> None:
    while signal.sigwaitinfo(signals).si_pid != os.getppid():
        pass
    os._exit(0)
