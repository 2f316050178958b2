"""What has led to a call: the only place that reads stack frames.

A sampler is not told who reads it, a function that changes a network not whether a fit runs, and a strategy not what
the Trainer was given. Nothing that is handed over, or kept in an attribute, says so either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

__all__ = ["callers", "locals_of"]


def callers() -> Iterator[object]:
    """The ``self`` of each method that has led to this call, from the one that called the asking function outwards.

    None stands for a function that has no ``self``.

    Example:
        >>> class Reader:
        ...     def read(self):
        ...         return asked()
        >>> def asked():
        ...     return type(next(callers())).__name__
        >>> Reader().read()
        'Reader'
    """
    return (frame.f_locals.get("self") for frame in _frames(sys._getframe(1).f_back))


def locals_of(function: Callable[..., Any]) -> Mapping[str, Any] | None:
    """The local variables of the innermost running call of a function of Python; None if none is running."""
    code = function.__code__
    return next((frame.f_locals for frame in _frames(sys._getframe(1)) if frame.f_code is code), None)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
