"""Methods wrapped for a while, by several at a time and undone in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_tricks.core.lightning.patch_points import require_patch_point


def wrap_method(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Make ``owner.name(...)`` call ``wrapper(original, ...)`` until the returned function is called.

    Raises:
        LookupError: For a method that the table of patch points does not list.
    """
    require_patch_point(owner, name)
    before = original = getattr(owner, name)
    try:  # never owner.__dict__: before 3.13 Python finds everything in an object slower once that was asked for
        delattr(owner, name)
    except AttributeError:  # it is the class's
        before = None
    wrapped = _Wrapped(wrapper, original, before)
    setattr(owner, name, wrapped)

    def undo() -> None:
        wrapped.wrapper = None
        if getattr(owner, name, None) is not wrapped:
            return  # somebody has wrapped it again since, and may call it
        before = wrapped.before
        while isinstance(before, _Wrapped) and before.wrapper is None:  # undone, when this one stood before it
            before = before.before
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


class _Wrapped:
    """A method with a wrapper, or without when that is undone; unlike a closure it can be pickled."""

    def __init__(self, wrapper: Callable[..., Any], original: Callable[..., Any], before: Any) -> None:
        self.wrapper: Callable[..., Any] | None = wrapper
        self.original = self.__wrapped__ = original  # Lightning and inspect look for the latter
        self.before = before  # somebody else's wrapper in the place of this one, if there was one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.wrapper is None else self.wrapper(self.original, *args, **kwargs)
