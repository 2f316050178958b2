"""The base class of every callback: it undoes its changes, and knows its durations in steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_tricks.core.conflicts import Participant
from lightning_tricks.core.fit_start import announce
from lightning_tricks.core.lightning.fit import steps_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import callbacks_of
from lightning_tricks.core.report import described
from lightning_tricks.core.safe_load.damage import require_undamaged_file


class Trick(Participant, Callback):
    """A callback of this package.

    It undoes every change that it makes outside of itself through one stack, which is closed when the fit ends, fails
    or is followed by another. A subclass that overrides one of the hooks below calls ``super()``'s hook.
    """

    changes_network: ClassVar[bool] = False  # whether a fit without it trains another network, as a trial would
    compiles: ClassVar[bool] = False  # whether inputs of a new size are compiled for

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._steps: dict[str, Any] = {}  # the durations in steps of the plan, once training has started

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        require_same_lightning(trainer, self.written())
        self._close()
        announce(trainer)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if callbacks_of(trainer, Trick)[0] is self:  # the file is read once
            require_undamaged_file(trainer.ckpt_path)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = {name: self._in_steps(trainer, name, getattr(self, name)) for name in self.durations}

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        try:
            self._on_failure(trainer)
        except Exception as error:  # must not hide the original exception
            note = f"{type(self).__name__} could not undo everything that it had changed: {error}"
            exception.add_note(note) if hasattr(exception, "add_note") else rank_zero_warn(note)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap a method until this trick is closed."""
        self._undo.callback(wrap_method(owner, name, wrapper))

    def _on_failure(self, trainer: L.Trainer) -> None:
        """Restore the module and the Trainer after an exception."""
        self._close()

    def _close(self) -> None:
        """Undo everything that this trick has changed outside of itself."""
        self._undo.close()

    def _in_steps(self, trainer: L.Trainer, name: str, duration: Any) -> Any:
        """A duration in steps of the plan, not rounded; a ``stop`` of 1.0 is never reached."""
        if name == "stop" and isinstance(duration, float) and duration == 1:
            return math.inf
        return steps_of(trainer, duration, type(self).__name__, name)

    @override
    def written(self) -> str:
        return described(self, self._arguments())

    def __repr__(self) -> str:
        return self.written()

    def _arguments(self) -> dict[str, Any]:
        """The arguments that this trick was made with, which are stored under their own names."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __reduce__(self) -> Any:
        """Make a new trick with the same arguments of a copy or a pickle, which is of no fit, Trainer or module."""
        return _made, (type(self), self._arguments())


def _made(kind: type[Trick], arguments: dict[str, Any]) -> Trick:
    return kind(**arguments)
