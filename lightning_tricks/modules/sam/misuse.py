"""Steps by hand that SAM would take once more are refused; apart from the engine, which takes the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.step_watch import holds_parameters

_RIGHT = {
    "sam_step": """
    def training_step(self, batch, batch_idx):
        def closure():  # computes the loss, and is called twice
            return self.loss(batch)
        loss = self.sam_step(closure, accumulate=1, clip_norm=None)  # steps optimizer and schedules
        self.log("train_loss", loss)
        return loss""",
    "sam_backward": """
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.sam_backward(lambda: self.loss(batch))  # in place of manual_backward; called twice
        optimizer.step()
        self.lr_schedulers().step()""",
    "lbfgs": """
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        def closure():  # called several times
            optimizer.zero_grad()
            return self.sam_backward(lambda: self.loss(batch))
        optimizer.step(closure)""",
}


def misuse(module: L.LightningModule, rule: str, method: str) -> MisconfigurationException:
    """The error for a step by hand, with the lines that are right."""
    return MisconfigurationException(f"{type(module).__name__}: {rule}. {write_it_so(method)}")


def write_it_so(method: str) -> str:
    """The lines that are right, as the end of an error message."""
    return f"Write it so:\n{_RIGHT[method]}"


class ClosureGuard:
    """Refuses a closure that does more than compute the loss.

    Args:
        module: The module in a fit.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.method = ""  # the one that calls the closure now

    @contextmanager
    def watching(self, method: str) -> Iterator[None]:
        """Watch a call of the closure of ``sam_step`` or ``sam_backward``.

        Raises:
            MisconfigurationException: If the closure steps an optimizer, or has put gradients into ``.grad``.
        """
        before = _gradients(self.module)
        self.method = method
        hook = register_optimizer_step_pre_hook(self._refuse_step)
        try:
            yield
        finally:
            hook.remove()
            self.method = ""
        written = [weight.grad for weight, state in _gradients(self.module).items() if before.get(weight) != state]
        if any(gradient is not None and gradient.count_nonzero() for gradient in written):  # not by zero_grad
            raise misuse(self.module, f"the closure of {method} calls backward, which {method} does", method)

    def refuse_backward(self) -> None:
        """Raise if a closure is running, which calls ``manual_backward``."""
        if self.method:
            rule = f"the closure of {self.method} calls manual_backward, which {self.method} does"
            raise misuse(self.module, rule, self.method)

    def _refuse_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not holds_parameters(optimizer, self.module):
            return  # an inner optimizer, such as that of adversarial samples
        rule = f"the closure of {self.method} steps {type(optimizer).__name__}, which comes after it"
        raise misuse(self.module, rule, self.method)


def _gradients(module: nn.Module) -> dict[Tensor, tuple[int, int]]:
    """The id and the version of the gradient of every weight that has one."""
    # A backward pass adds to a gradient in place, or puts another tensor there: one of the two changes.
    return {
        weight: (id(weight.grad), weight.grad._version) for weight in module.parameters() if weight.grad is not None
    }


class StepWatch:
    """Refuses optimizer steps and gradients that would be counted twice, or dropped, beside ``sam_step``.

    Args:
        module: The module in a fit.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self.calls: dict[Optimizer, int] = {}  # the calls of sam_step since it last stepped an optimizer
        self._methods: dict[Tensor, str] = {}  # of weights with a gradient that is not stepped, the method it is of
        # Of weights that were stepped by hand, the gradient of that step, which is still there, and its version.
        self._spent: dict[Tensor, tuple[ref[Tensor], int]] = {}
        self._steps = False  # whether sam_step steps an optimizer now

    @contextmanager
    def adding(self, method: str) -> Iterator[None]:
        """Watch a call of ``sam_step`` or ``sam_backward`` that adds to gradients.

        Raises:
            MisconfigurationException: If the other method has left gradients there.
        """
        before = _gradients(self.module)
        others = {weight for weight, by in self._methods.items() if by != method and _has_gradient(weight)}
        yield
        added = [weight for weight, state in _gradients(self.module).items() if before.get(weight) != state]
        if not others.isdisjoint(added):
            rule = "sam_backward and sam_step before one optimizer step add both gradients: call one of them"
            raise misuse(self.module, rule, method)
        self._methods.update(dict.fromkeys(added, method))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let ``sam_step`` step its optimizer."""
        self._steps = True
        try:
            yield
        finally:
            self._steps = False

    def require_kept(self, optimizer: Optimizer) -> None:
        """Raise if the gradients of earlier calls of ``sam_step`` were cleared before the optimizer stepped.

        Raises:
            MisconfigurationException: If gradients were cleared too early.
        """
        kept = [weight.grad is not None for weight in weights_of(optimizer) if self._methods.get(weight) == "sam_step"]
        if self.calls.get(optimizer) and not all(kept):
            rule = f"the gradients that sam_step accumulates for {type(optimizer).__name__} are cleared: leave that out"
            raise misuse(self.module, rule, "sam_step")

    def before_step(self, optimizer: Optimizer) -> None:
        """Look at the gradients of an optimizer that is about to step.

        Raises:
            MisconfigurationException: If ``sam_step`` accumulates for it, or has stepped it, and nothing came since.
        """
        if not self._steps and optimizer in self.calls:
            name = type(optimizer).__name__
            if self.calls[optimizer]:
                rule = f"{name} is stepped by hand while sam_step accumulates for it, and steps it: leave that out"
                raise misuse(self.module, rule, "sam_step")
            if not any(map(_has_gradient, weights_of(optimizer))):
                rule = f"{name} is stepped by hand after sam_step, which has stepped it: leave that out"
                raise misuse(self.module, rule, "sam_step")
        for weight in weights_of(optimizer):
            self._methods.pop(weight, None)
            if weight.grad is not None and not self._steps:
                self._spent[weight] = ref(weight.grad), weight.grad._version

    def clear_spent(self, optimizer: Optimizer) -> None:
        """Clear the gradients of the last step by hand, as the ``zero_grad`` at the start of the next one would."""
        for weight in weights_of(optimizer):
            spent, version = self._spent.pop(weight, (None, 0))
            # What was added since that step belongs to the next one, and clearing it would lose a gradient silently.
            if spent is not None and weight.grad is spent() and weight.grad is not None:
                weight.grad = None if weight.grad._version == version else weight.grad


def _has_gradient(weight: Tensor) -> bool:
    return weight.grad is not None and bool(weight.grad.count_nonzero())


class ScheduleWatch:
    """Notices schedules that are stepped by hand beside ``sam_step``, which steps them.

    Args:
        module: The module in a fit.
    """

    def __init__(self, module: L.LightningModule) -> None:
        self.module = module
        self._counts: dict[Any, int] = {}  # the schedules' steps at the start of the batch, or after sam_step
        self._stepped: set[Optimizer] = set()  # the optimizers that sam_step had in this batch

    def check_batch(self) -> None:
        """Look at what was done since the last batch began."""
        for optimizer in self._stepped:
            self.check(optimizer)

    def begin_batch(self) -> None:
        """Look at what was done since the last batch began, and begin another."""
        self.check_batch()
        self._stepped.clear()
        schedules = [config.scheduler for config in self.module.trainer.lr_scheduler_configs]
        self._counts = {schedule: _count(schedule) for schedule in schedules}

    def check(self, optimizer: Optimizer) -> None:
        """Raise if a schedule of the optimizer was stepped by hand in a batch with ``sam_step``.

        Raises:
            MisconfigurationException: If one was.
        """
        for schedule, count in self._counts.items():
            if schedule.optimizer is optimizer and _count(schedule) > count:
                rule = f"{type(schedule).__name__} is stepped by hand beside sam_step, which steps it: leave that out"
                raise misuse(self.module, rule, "sam_step")

    def stepped(self, optimizer: Optimizer) -> None:
        """Remember that ``sam_step`` was called for an optimizer and may have stepped its schedules."""
        self._stepped.add(optimizer)
        own = [schedule for schedule in self._counts if schedule.optimizer is optimizer]
        self._counts.update({schedule: _count(schedule) for schedule in own})


def _count(schedule: Any) -> int:
    """The steps that a schedule has made, as far as it tells; 0 for one on a plateau, which is stepped by hand."""
    return 0 if isinstance(schedule, ReduceLROnPlateau) else getattr(schedule, "last_epoch", 0)
