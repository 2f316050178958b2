"""DataWait: the share of training that waits for data loading."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, final

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.core.checks import check_range
from lightning_tricks.core.lightning.loaders import available_cores, train_loader
from lightning_tricks.core.lightning.trainer import is_fitting, log_every_n_steps, will_step
from lightning_tricks.core.trick import Trick

__all__ = ["DataWait"]


class Moment(NamedTuple):
    """What has passed since training began.

    Args:
        time: Seconds, without validation.
        wait: Seconds of them in which training waited for data.
        cpu: Seconds in which this process had a core, with all of its threads, also in validation.
    """

    time: float
    wait: float
    cpu: float

    def share_since(self, before: Moment) -> float:
        """The share of the time since another moment that was spent waiting."""
        return min(1.0, (self.wait - before.wait) / max(self.time - before.time, 1e-9))


def useful_workers(wait: float, work: float, cpu: float, workers: int, cores: int) -> tuple[int, float]:
    """The fewest loader workers with nearly the shortest step that any number of them gives, and the speed-up.

    ``step(n) = max(work, load / n, cpu / cores)``: n workers load n batches at a time while training works. Without
    workers a batch takes ``load = wait``; workers that cannot keep up are busy all the time, so that
    ``load = workers * (wait + work)``. There are at most as many workers as cores, beyond which those that compute
    only wait for each other.

    Args:
        wait: Seconds that a step waits for its batch.
        work: Seconds of a step in which training does not wait.
        cpu: Seconds in a step in which the training process, which loads if there are no workers, has a core.
        workers: The present number of workers.
        cores: The number of cores.

    Example:
        >>> workers, speedup = useful_workers(wait=0.3, work=0.1, cpu=0.2, workers=0, cores=8)
        >>> workers, round(speedup, 2)
        (3, 4.0)
        >>> useful_workers(wait=0.3, work=0.1, cpu=0.4, workers=0, cores=1)  # loading and training share the core
        (0, 1.0)
    """
    step, load = wait + work, wait if workers == 0 else workers * (wait + work)
    steps = {n: max(work, load / n, cpu / cores) for n in range(workers + 1, cores + 1)} | {workers: step}
    best = min(n for n, seconds in steps.items() if seconds <= 1.05 * min(steps.values()))
    return best, step / steps[best]


@final
class DataWait(Trick):
    """Measures how long training waits for data loading, and says what would help.

    ``share = time in the loader's next() / time`` since the last logged value, without validation, is logged as
    ``tricks/data_wait``; before a first value is logged, ``trainer.callback_metrics`` has that of the first epoch. On
    CUDA, where the device works on while Python waits, the time counts in which the device had nothing to do. At the
    end of the first epoch of a fit one warning says what to change, and what that should bring, if training has waited
    for more than ``warn`` of the epoch. It changes nothing. On several devices each process measures itself, and the
    first one logs.

    Args:
        warn: The share of an epoch above which to warn, in [0, 1].

    Raises:
        TypeError: If ``warn`` is no number.
        ValueError: If ``warn`` is out of range.

    Example:
        >>> trainer = L.Trainer(callbacks=[DataWait(warn=0.2)], accelerator="cpu", logger=False)
    """

    def __init__(self, *, warn: float = 0.1) -> None:
        check_range("warn", warn, 0.0, 1.0)
        super().__init__()
        self.warn = warn
        self._reset()

    def _reset(self) -> None:
        self._wait = self._pause = 0.0  # seconds of waiting, and of validation
        self._asked = self._paused = 0.0  # when the present wait or validation began
        self._events: list[torch.cuda.Event] = []  # before and after waits that the device has not reached yet
        self._logged: Moment | None = None
        self._epoch: tuple[Moment, int] | None = None  # the beginning of the first epoch, and the batches before it

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._reset()
        if is_fitting(trainer):
            cuda, loop = trainer.strategy.root_device.type == "cuda", trainer.fit_loop.epoch_loop
            self._wrap(loop, "_on_before_fetch", self._mark if cuda else self._before_fetch)
            self._wrap(loop, "_on_after_fetch", self._mark if cuda else self._after_fetch)

    def _before_fetch(self, original: Callable[[], None]) -> None:
        original()
        self._asked = time.perf_counter()

    def _after_fetch(self, original: Callable[[], None]) -> None:
        self._wait += time.perf_counter() - self._asked
        original()

    def _mark(self, original: Callable[[], None]) -> None:
        """Put an event after all that the device has to do: it idles between the events around a wait."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._add_waits()  # here, so that no more events are kept than the device has batches to do
        original()

    def _add_waits(self) -> None:
        while len(self._events) > 1 and self._events[1].query():
            self._wait += self._events[0].elapsed_time(self._events[1]) / 1000
            del self._events[:2]

    def _moment(self) -> Moment:
        self._add_waits()
        return Moment(time.perf_counter() - self._pause, self._wait, time.process_time())

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._logged = self._moment()
        self._epoch = self._logged, trainer.fit_loop.total_batch_idx

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if will_step(trainer):
            log_every_n_steps(trainer, self._values)

    def _values(self) -> dict[str, float]:
        assert self._logged is not None, "training has begun"
        before, self._logged = self._logged, self._moment()
        return {"tricks/data_wait": self._logged.share_since(before)}

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = time.perf_counter()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause += time.perf_counter() - self._paused

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epoch is None:
            return
        (before, batches), now, self._epoch = self._epoch, self._moment(), None
        share, steps = now.share_since(before), max(trainer.fit_loop.total_batch_idx - batches, 1)
        trainer.callback_metrics.setdefault("tricks/data_wait", torch.tensor(share))
        if share > self.warn:
            wait, cpu = (now.wait - before.wait) / steps, (now.cpu - before.cpu) / steps
            work = (now.time - before.time) / steps - wait
            rank_zero_warn(f"Training waits for data {share:.0%} of the time. {self._remedy(trainer, wait, work, cpu)}")

    def _remedy(self, trainer: L.Trainer, wait: float, work: float, cpu: float) -> str:
        loaders = train_loader(trainer).flattened
        if len(loaders) > 1:
            return "lightning_tricks.find_num_workers(loader) says how many workers each of the loaders needs."
        if not isinstance(loaders[0], DataLoader):
            return "Load in other processes, as a DataLoader(num_workers=...) does."
        workers, cores = loaders[0].num_workers, max(1, available_cores() // trainer.num_devices)
        best, speedup = useful_workers(wait, work, cpu, workers, cores)
        if best == workers:
            return (
                f"More workers than num_workers={workers} would not help on {cores} cores for each device: make"
                " samples cheaper (decode and resize them once and save that, transform batches on the device)."
            )
        return (
            f"With num_workers={best} instead of {workers} an epoch should be {speedup:.1f} times faster;"
            " lightning_tricks.find_num_workers(loader) measures it."
        )
