"""The base class of callbacks with a teacher: an average of the module that computes beside it, or another module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.coordinator import Averaging, coordinator_of
from lightning_tricks.core.averaging.decay import ema_decay
from lightning_tricks.core.averaging.state import callback_state, local_state
from lightning_tricks.core.checks import check_range, check_type, some
from lightning_tricks.core.lightning.engine import TORCH, require_engine
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.mixed_targets.target import MixedTarget, plain_tensor
from lightning_tricks.core.mixed_targets.unmixed import UnmixedPart
from lightning_tricks.core.replay.rerun import Start, undone
from lightning_tricks.core.report import Row
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.tensors import float_buffers, hidden_from_autograd


class Call(NamedTuple):
    """A call of a module: the module, and what it was given."""

    part: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class TeachingCallback(Averaging):
    """Has a teacher, which gives ``answers``: an average of the module's weights, or another module.

    The average is of all weights that train, or have trained, and of the floating-point buffers. It is exchanged with
    them while it computes, so that it has their shards, and nothing is copied but the average.

    Args:
        decay: Decay of the average per optimizer step, in [0, 1]; 1 for a copy that never changes.
        module: Another module that is the teacher; None for the average.
    """

    def __init__(self, decay: float, module: nn.Module | None) -> None:
        super().__init__()
        check_range("decay", decay, 0.0, 1.0)
        check_type("module", module, nn.Module, type(None))
        self.decay, self.module = decay, module
        self._average: Averages | None = None
        self._joined = 0  # the number of weights that trained when the average last looked for new ones

    @property
    def _name(self) -> str:
        return type(self).__name__

    def teacher_written(self) -> str:
        """The teacher as a word or two, for reports and errors."""
        return f"decay={self.decay}" if self.module is None else type(self.module).__name__

    @property
    @override
    def state_key(self) -> str:
        # Of another module nothing is saved: the key only tells callbacks apart.
        which = self.decay if self.module is None else f"{type(self.module).__name__} at {id(self.module)}"
        return f"{self._name}({which})"

    @override
    def written(self) -> str:  # a module would be printed with all of its layers
        return f"{self._name}({self.teacher_written()})"

    @override
    def row(self, trainer: L.Trainer) -> Row:
        name, given = super().row(trainer)
        hidden = ("decay", "module", "teacher")
        return name, {"teacher": self.teacher_written()} | {n: v for n, v in given.items() if n not in hidden}

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if self.module is None:
            require_engine(trainer, self._name, *TORCH)
        elif any(self.module is part for part in pl_module.modules()):
            raise MisconfigurationException(
                f"{self.written()}: this teacher is a part of {type(pl_module).__name__}, whose weights are trained"
                " and saved. Keep it out of the module, or pass Teacher(), which averages the module itself."
            )
        if not coordinator_of(trainer).join(self):
            self._begin_anew(trainer, pl_module)

    def _begin_anew(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = None if self.module is not None else local_weights(trainer, pl_module, self._name)
        self._average = None if weights is None else Averages(weights)

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if not is_fitting(trainer):
            return
        self._begin_anew(trainer, pl_module)
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if not saved or self._average is None:
            return
        known = {**dict(pl_module.named_parameters()), **dict(pl_module.named_buffers())}
        state = local_state(trainer, self._average, self._key, saved, checkpoint["global_step"])
        if unknown := state["averaged"].keys() - known.keys():
            raise MisconfigurationException(
                f"{self.written()}: the checkpoint has a teacher with {some(sorted(unknown))}, which"
                f" {type(pl_module).__name__} does not have. Resume with the module that was trained."
            )
        self._average.load_state_dict(state, state["averaged"])

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._joined = 0
        self._wrap(trainer.strategy, "training_step", self._before_step)
        places = set() if self.module is None else {weight.device for weight in self.module.parameters()}
        if self.module is not None and len(places) == 1:  # else it is spread over devices by its owner
            self._undo.callback(self.module.to, places.pop())
            self.module.to(pl_module.device)

    def _before_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin the average behind the last hook before a step, which may draw weights or let them train."""
        self._follow()
        return original(*args, **kwargs)

    def _follow(self) -> None:
        """Let weights that train for the first time join the average, before their first step."""
        average = self._average
        if average is None:
            return
        joined = sum(weight.requires_grad and not is_lazy(weight) for weight in average.module.parameters())
        if average.tracks and joined == self._joined:
            return
        self._joined = joined
        average.track({**average.weights.trainable(), **float_buffers(average.module)})
        average.updates = max(average.updates, 1)  # BatchNorm's statistics differ from the average before a step

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.catch_up(trainer)

    @override
    def catch_up(self, trainer: L.Trainer) -> bool:
        if self._average is None or not self._observer.stepped():
            return False
        self._follow()
        if self.decay < 1:
            self._average.lerp(1 - ema_decay(self._average.steps, self.decay))
        self._average.steps += 1
        return True

    @override
    def running(self) -> dict[str, Averages]:
        return {} if self._average is None else {self._key: self._average}

    @property
    def _key(self) -> str:
        """The key of the average, which is a folder's name where checkpoints are folders."""
        return f"{self._name}({self.decay})"

    @override
    def state_dict(self) -> dict[str, Any]:
        shared = self.coordinator
        if shared is None or self._average is None or self.is_foreign:
            return {}
        return callback_state(shared.trainer, self._average)

    def answers(self, pl_module: L.LightningModule, calls: Sequence[Call]) -> list[Any]:
        """What the teacher returns for the inputs of calls in a training step, which leaves no trace.

        Args:
            pl_module: The module in training.
            calls: The calls of the module, or of parts of it, in place of which the teacher is called.
        """
        teacher: nn.Module = pl_module if self.module is None else self.module
        with ExitStack() as stack:
            if self.module is None:
                stack.callback(wrap_method(pl_module, "log", lambda *_, **__: None))  # forward may log, for itself
            if self._average is not None and self.coordinator is not None:
                self._follow()
                # All of these are as before when the block ends, and the graph of the step may hold each of them.
                held = [each for part in pl_module.modules() for each in vars(part).values() if type(each) is Tensor]
                changed = [*self._average.parts(), *self._average.weights.model_copies(), *pl_module.buffers(), *held]
                stack.enter_context(hidden_from_autograd(changed))
                stack.enter_context(self.coordinator.showing_only(self._average))
            start = Start.here(teacher, pl_module.device)
            stack.enter_context(undone(start))
            stack.enter_context(_in_eval_mode(teacher))
            stack.enter_context(_without_cached_casts(pl_module.device))
            stack.enter_context(torch.no_grad())
            given = tree_map_only(Tensor, partial(_given, self.module), [(call.args, call.kwargs) for call in calls])
            answers = [self._called(call, *both) for call, both in zip(calls, given, strict=True)]
            if self.module is None:
                self._require_undone(start)
            return answers

    def _require_undone(self, start: Start) -> None:
        """Raise if the teacher has changed what the module in training has, too, and ``undone`` cannot set back."""
        try:
            start.state.refuse_writes()
            start.state.refuse_counts()
        except MisconfigurationException as error:
            raise MisconfigurationException(f"{self.written()} runs the module a second time: {error}") from None

    def _called(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.module is None:
            return call.part(*args, **kwargs)
        try:
            return self.module(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            shapes = [tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            raise MisconfigurationException(
                f"{self.written()}: this teacher cannot be called with the inputs of the student, {shapes}:"
                f" {type(error).__name__}: {error}. Both get the same inputs: put what makes them fit into the teacher."
            ) from error


def _given(teacher: nn.Module | None, value: Tensor) -> Tensor:
    """A tensor as the teacher gets it: labels as plain ones, and numbers in the precision of another module."""
    value = plain_tensor(value) if isinstance(value, MixedTarget | UnmixedPart) else value
    if teacher is None or not value.is_floating_point():
        return value
    return value.to(next((p.dtype for p in teacher.parameters() if p.is_floating_point()), value.dtype))


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module and all of its parts into eval mode inside the block, without their own ``eval()``."""
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def _without_cached_casts(device: torch.device) -> AbstractContextManager[Any]:
    """Let autocast cast weights anew inside the block: it keeps casts of weights, whose values are others there."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)
