"""The schedules as bare schedulers: ``lr_scheduler.cosine(optimizer)`` is the ``LRScheduler`` of ``cosine``.

For code that makes the dictionary itself, such as ``configure_optimizers`` of lightning-hydra-template, and for loops
without a Trainer. They take the arguments of the factories of the same name. Inside ``configure_optimizers(self)`` they
find the module by themselves, and a Trainer steps them as often as the factory would have it, whatever "interval" and
"frequency" they are returned with. Elsewhere call ``scheduler.step()`` after each ``optimizer.step()``, and pass
``total_steps``. A curve that was made there, in the module's ``__init__`` for example, is stepped by a Trainer with
each optimizer step, too, and one whose ``total_steps`` is the number of epochs is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

import lightning as L
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.core.call_stack import callers
from lightning_tricks.core.lightning.trainer import trainer_of
from lightning_tricks.schedules import factories, plateau, tail
from lightning_tricks.schedules.planned import Schedule
from lightning_tricks.schedules.scheduler import CurveLR

P = ParamSpec("P")


def _bare(factory: Callable[P, Schedule]) -> Callable[P, LRScheduler]:
    """The factory of the scheduler alone."""

    @wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> LRScheduler:
        given = signature(factory).bind(*args, **kwargs)
        if isinstance(before := given.arguments.get("schedule"), CurveLR):  # swa_tail goes after a bare one, too
            given.arguments["schedule"] = {"optimizer": before.optimizer, "lr_scheduler": {"scheduler": before}}
        if "module" in signature(factory).parameters and given.arguments.get("module") is None:
            given.arguments["module"] = _configured()
        config: Any = factory(*given.args, **given.kwargs)["lr_scheduler"]
        scheduler: Any = config["scheduler"]
        if isinstance(scheduler, CurveLR) or given.arguments.get("module") is not None:  # else validations are unknown
            scheduler.occasion = config["interval"], config["frequency"]
        return scheduler

    make.__module__ = __name__  # by which it is pickled, in hyperparameters for example
    # The example of a factory looks into the dictionary.
    make.__doc__ = (factory.__doc__ or "").replace('["lr_scheduler"]["scheduler"]', "")
    vars(make)["__signature__"] = signature(factory).replace(return_annotation="LRScheduler")
    return make


def _configured() -> L.LightningModule | None:
    """The module of a Trainer whose ``configure_optimizers``, or another hook, asks for a scheduler."""
    for caller in callers():
        if isinstance(caller, L.LightningModule) and trainer_of(caller) is not None:
            return caller
        if isinstance(caller, L.Trainer):  # a function that is no method of the module
            return caller.lightning_module
    return None


constant = _bare(factories.constant)
cosine = _bare(factories.cosine)
cosine_restarts = _bare(factories.cosine_restarts)
flat_cos = _bare(factories.flat_cos)
inverse_sqrt = _bare(factories.inverse_sqrt)
linear = _bare(factories.linear)
one_cycle = _bare(factories.one_cycle)
polynomial = _bare(factories.polynomial)
reduce_on_plateau = _bare(plateau.reduce_on_plateau)
step_decay = _bare(factories.step_decay)
swa_tail = _bare(tail.swa_tail)
wsd = _bare(factories.wsd)
