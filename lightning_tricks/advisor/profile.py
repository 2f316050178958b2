"""What the active tricks cost: the time of a training step that is spent in each of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.lightning.patching import timed_wrappers
from lightning_tricks.core.lightning.trainer import callbacks_of, is_fitting
from lightning_tricks.core.report import Grid, Tabled, table
from lightning_tricks.core.trick import Trick

__all__ = ["TricksProfile", "profile_tricks"]

UNSEEN = (
    "Not seen: what mixins do in backward() (the second pass of SAM), optimizers, losses and compiled code of this"
    " package, and hooks of modules and optimizers. Compare the step's time with and without them."
)


class TricksProfile(Tabled):
    """The result of ``profile_tricks``: seconds in each hook of each trick, and those of the training steps.

    Args:
        seconds: Seconds by the name of a trick and of its hook or of the method that it wraps, in all steps together.
        steps: The number of training batches.
        total: The seconds from the first batch to the end of the last one, without validation.

    Example:
        >>> profile = TricksProfile({("EMA", "on_train_batch_end"): 0.001}, steps=10, total=0.5)
        >>> profile.per_step()
        {'EMA': 0.0001}
    """

    def __init__(self, seconds: dict[tuple[str, str], float] | None = None, steps: int = 0, total: float = 0.0) -> None:
        self.seconds = defaultdict(float, seconds or {})
        self.steps = steps
        self.total = total

    def per_step(self) -> dict[str, float]:
        """Seconds of a training step by the name of a trick, the most expensive first."""
        found: dict[str, float] = defaultdict(float)
        for (trick, _), seconds in self.seconds.items():
            found[trick] += seconds / max(self.steps, 1)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @override
    def _grid(self) -> Grid:
        found = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = [*found, (("all tricks", ""), sum(self.seconds.values())), (("the step", ""), self.total)]
        steps, total = max(self.steps, 1), max(self.total, 1e-9)
        rows = [(*names, f"{spent / steps * 1e6:.0f}", f"{spent / total:.1%}") for names, spent in parts]
        return Grid(("trick", "in", "us per step", "of the step"), rows, below=[UNSEEN])

    def __str__(self) -> str:
        grid = self._grid()
        return "\n".join([table(grid.columns, grid.rows), *grid.below])


class _Profiler(Callback):
    """Times the tricks of a fit, from a place in front of all of them.

    Seconds in a call are those of its own: without the calls of other tricks inside it, and without what the
    wrapped method does.
    """

    def __init__(self, profile: TricksProfile) -> None:
        self.profile = profile
        self._undo = ExitStack()
        self._owners: dict[Callable[..., Any], str] = {}  # the trick that a wrapper is of
        self._inside: list[float] = []  # for each running call, the seconds of calls inside it
        self._training = False  # from the first batch of an epoch on
        self._device = torch.device("cpu")
        self._began = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._undo.close()
        self._training = False
        if not is_fitting(trainer):
            return
        self._device = trainer.strategy.root_device
        self._undo.enter_context(timed_wrappers(self._timed_wrapper))
        for trick in callbacks_of(trainer, Trick):
            for method in methods_of(trick):
                key = type(trick).__name__, "batches" if method == "_change" else method
                self._replace(trick, method, partial(self._timed, key, getattr(trick, method)))
            self._replace(trick, "_wrap", partial(self._wrap, type(trick).__name__, trick._wrap))

    def _replace(self, trick: Trick, method: str, function: Callable[..., Any]) -> None:
        setattr(trick, method, function)
        self._undo.callback(delattr, trick, method)

    def _wrap(self, name: str, wrap: Callable[..., None], owner: Any, method: str, wrapper: Callable[..., Any]) -> None:
        """Note whose wrapper it is, which may be a function of another module."""
        self._owners[wrapper] = name
        wrap(owner, method, wrapper)

    def _timed_wrapper(self, wrapper: Callable[..., Any], original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """Call the wrapper of a method, and time it without the method."""
        name = getattr(original, "__name__", "a wrapper inside")  # of a method that is wrapped twice
        if name == "forward":  # may be compiled, clocks and all
            return wrapper(original, *args, **kw)
        key = self._owners.get(wrapper) or owner_of(wrapper), name
        return self._timed(key, wrapper, partial(self._timed, None, original), *args, **kw)

    def _timed(self, key: tuple[str, str] | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = self._now()
        self._inside.append(0.0)
        try:
            return function(*args, **kwargs)
        finally:
            seconds, inside = self._now() - began, self._inside.pop()
            if self._inside:
                self._inside[-1] += seconds
            if key is not None and self._training:
                self.profile.seconds[key] += seconds - inside

    def _now(self) -> float:
        torch.get_device_module(self._device).synchronize()
        return time.perf_counter()

    def _end(self) -> None:
        if self._training:
            self._training, self.profile.total = False, self.profile.total + self._now() - self._began

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._training, self._began = True, self._now()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.on_train_epoch_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.profile.steps += 1

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._undo.close()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end()
        self._undo.close()


def methods_of(trick: Trick) -> list[str]:
    """The hooks that a trick implements, and what a trick of batches does to one."""
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    own = [name for name in hooks if getattr(type(trick), name) is not getattr(Callback, name)]
    return [*own, *(["_change"] if isinstance(trick, BatchCallback) else [])]


def owner_of(wrapper: Any) -> str:
    """The name of the class that a wrapper is a method of, or of the function that it is in."""
    wrapper = wrapper.func if isinstance(wrapper, partial) else wrapper
    if hasattr(wrapper, "__self__"):
        return type(wrapper.__self__).__name__
    return getattr(wrapper, "__qualname__", type(wrapper).__name__).split(".")[0]


@contextmanager
def profile_tricks(trainer: L.Trainer) -> Iterator[TricksProfile]:
    """Measure the time of a training step that each active trick takes, in the fits within a ``with`` block.

    Hooks of callbacks of this package are timed, what they do to batches, and methods of Lightning that they wrap, each
    without the time of what it calls of others. Every measurement waits for the device, so that the step takes longer
    on a GPU, and a trick has the time that its own work takes there. Outside of the block nothing is timed, and nothing
    is left. Printing the result gives a table, and says what is not seen.

    Args:
        trainer: The Trainer that fits within the block.

    Raises:
        TypeError: If ``trainer`` is none.

    Example:
        >>> trainer = L.Trainer(accelerator="cpu", logger=False)
        >>> with profile_tricks(trainer) as profile:
        ...     pass  # trainer.fit(...)
        >>> profile.steps
        0
    """
    if not isinstance(trainer, L.Trainer):
        raise TypeError(f"trainer must be a lightning.pytorch Trainer, got {type(trainer).__name__}.")
    profiler = _Profiler(TricksProfile())
    trainer.callbacks.insert(0, profiler)  # type: ignore[attr-defined]
    try:
        yield profiler.profile
    finally:
        profiler.teardown(trainer, trainer.lightning_module, "fit")
        trainer.callbacks = [one for one in trainer.callbacks if one is not profiler]  # type: ignore[attr-defined]
