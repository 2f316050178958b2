"""The settings of an object as its user wrote them."""

from __future__ import annotations

import inspect
from typing import Any


def settings(thing: object, always: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments of an object that keeps them under their own names: the first, those of no default, and ``always``.

    >>> from lightning.pytorch.callbacks import LearningRateMonitor
    >>> settings(LearningRateMonitor(log_momentum=True))
    {'logging_interval': None, 'log_momentum': True}
    """
    found: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(inspect.signature(type(thing)).parameters.items()):
        value = getattr(thing, name, parameter.default)
        if place == 0 or name in always or value != parameter.default:
            found[name] = value
    return found


def described(thing: object) -> str:
    """An object as its user wrote it.

    >>> from lightning.pytorch.callbacks import LearningRateMonitor
    >>> described(LearningRateMonitor("step", log_momentum=True))
    "LearningRateMonitor(logging_interval='step', log_momentum=True)"
    """
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in settings(thing).items())})"
