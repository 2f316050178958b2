"""A teacher that the module calls: an average of its own weights, or another module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_tricks.core.averaging.teaching import Call, TeachingCallback
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.trainer import is_fitting

__all__ = ["Teacher"]


@final
class Teacher(TeachingCallback):
    """A teacher that the module calls, ``self.teacher(x)``: ``teacher += (1-d) * (weight - teacher)``.

    d is ``min(decay, (1+n)/(10+n))`` after n optimizer steps, as in ``EMA``, and 1 for ``decay=1``: a copy of the
    module as training begins. The teacher is in eval mode, computes without gradients, and leaves no trace in the
    module and in its random numbers. It is neither in ``parameters()`` nor in the ``state_dict`` nor in an optimizer. A
    copy of the module has no teacher, and says so when it asks.
    BatchNorm's statistics and other floating-point buffers that are saved are averaged as the weights are; everything
    else is the module's own.

    In a training step ``self.teacher(...)`` returns what ``self(...)`` would with the teacher's weights. For a loss
    without a line in the module pass this object to ``Distill``, and put it among the callbacks only to call it, too.

    The average is in memory in fp32, once, and while it computes it is exchanged with the weights. Under FSDP2 a rank
    has its own shard of it. The callback's state in a checkpoint holds it, so that a fit resumes exactly. Another
    ``module`` is on every device in full, and in no checkpoint.

    Args:
        decay: Decay per optimizer step, in [0, 1]; 1 for a copy that never changes.
        module: Another module that is the teacher, and never changes whatever the decay; None for the average.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, for a module that has an attribute ``teacher``, an average under DeepSpeed,
            or another module that is a part of the one in training; on resume, for a teacher with other weights.

    Example:
        >>> trainer = L.Trainer(callbacks=[Teacher(decay=0.999)], accelerator="cpu", logger=False)

    References:
        Tarvainen and Valpola, Mean teachers are better role models, arXiv 1703.01780.
    """

    conflicts = (
        Conflict(("Teacher",), "both would be the module's self.teacher", "Pass one of them to Distill alone"),
    )

    def __init__(self, decay: float = 0.999, *, module: nn.Module | None = None) -> None:
        super().__init__(decay, module)

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if not isinstance(getattr(pl_module, "teacher", _Asked()), _Asked):
            raise MisconfigurationException(
                f"{self.written()} is called as self.teacher, and {type(pl_module).__name__} has such an attribute"
                " already: give that another name, or pass the teacher to Distill alone."
            )
        vars(pl_module)["teacher"] = _Asked(partial(self._answer, pl_module))
        self._undo.callback(delattr, pl_module, "teacher")

    def _answer(self, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> Any:
        return self.answers(pl_module, [Call(pl_module, args, kwargs)])[0]


class _Asked:
    """The attribute ``teacher`` of a module in a fit; in a copy of that module, which is in none, it says so."""

    def __init__(self, answer: Callable[..., Any] | None = None) -> None:
        self._answer = answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._answer is None:
            raise MisconfigurationException(
                "self.teacher answers the module that Teacher() trains, and this is a copy of it: call that of the"
                " module itself, or fit the copy with a Teacher() of its own."
            )
        return self._answer(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _Asked, ()
