"""Methods that are wrapped for a while; several wrappers of one method can be undone in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_tricks.core.lightning.patch_points import require_patch_point


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``wrapper(original, ...)`` until the returned function is called.

    Raises:
        LookupError: For a method that the table of patch points does not list.
    """
    require_patch_point(owner, name)
    before = original = getattr(owner, name)
    try:  # owner.__dict__ is avoided: before Python 3.13, attributes of an object are slower once it was read
        delattr(owner, name)
    except AttributeError:  # a method of the class
        before = None
    wrapped = _Wrapped(wrapper, original, before)
    setattr(owner, name, wrapped)

    def undo() -> None:
        wrapped.wrapper = None
        if getattr(owner, name, None) is not wrapped:
            return  # another wrapper was put over this one, and may still call it
        before = wrapped.before
        while isinstance(before, _Wrapped) and before.wrapper is None:  # undone while this one was over it
            before = before.before
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


class _Wrapped:
    """A method with a wrapper, or without it once that is undone; can be pickled, unlike a closure."""

    def __init__(self, wrapper: Callable[..., Any], original: Callable[..., Any], before: Any) -> None:
        self.wrapper: Callable[..., Any] | None = wrapper
        self.original = original
        # Lightning and inspect look for it. Lightning looks into one wrapper alone, so that it is the user's method.
        self.__wrapped__: Callable[..., Any] = original.__wrapped__ if isinstance(original, _Wrapped) else original
        self.before = before  # the attribute that stood in this place, such as another wrapper; None for the class's

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "wrapper": None}  # a copy of the owner is of no fit, and has the plain method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.wrapper is None else self.wrapper(self.original, *args, **kwargs)


@contextmanager
def timed_wrappers(call: Callable[..., Any]) -> Iterator[None]:
    """Within the block, every wrapper is called by ``call(wrapper, original, ...)``."""
    plain = _Wrapped.__call__

    def timed(self: _Wrapped, *args: Any, **kwargs: Any) -> Any:
        return (
            plain(self, *args, **kwargs) if self.wrapper is None else call(self.wrapper, self.original, *args, **kwargs)
        )

    _Wrapped.__call__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Wrapped.__call__ = plain  # type: ignore[method-assign]
