"""Methods that are wrapped for a while; several wrappers of one method can be undone in any order.

What is wrapped or used of Lightning, torch and DeepSpeed besides their public names has a row in patch_points.md:
``wrap_method`` refuses what is not in ``WRAPPED``. ``tests/core/lightning/test_patch_points.py`` compares the rows with
the installed versions, names the tricks that would break, and finds private names that are missing there, but not those
inside strings: ``core/replay/recompute.py`` has names of torch's private operations in ``_KEPT``, and leaves out those
that the installed version lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


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


TABLE = Path(__file__).with_name("patch_points.md")


class PatchPoint(NamedTuple):
    """A method that is wrapped while a trick is active, or a private name that is used.

    Args:
        owner: The owner, as ``module`` or ``module.Class`` (for an attribute of the class or of its instances).
        name: The name, or its beginning if it ends in an underscore and is that of wrapped methods.
        parameters: The parameters that wrappers rely on, in order, without ``self``; None if it is not wrapped.
        users: The tricks that wrap or use it.
        reason: The purpose, and why there is no public way.
    """

    owner: str
    name: str
    parameters: str | None
    users: str
    reason: str


def _patch_point(place: str, users: str, reason: str) -> PatchPoint:
    path, call, parameters = place.strip("`").partition("(")
    owner, _, name = path.rpartition(".")
    return PatchPoint(owner, name, parameters.removesuffix(")") if call else None, users, reason)


def _rows(text: str) -> list[PatchPoint]:
    """The rows of the Markdown tables, whose first cells are code."""
    lines = [line.removeprefix("| ").removesuffix(" |") for line in text.splitlines() if line.startswith("| `")]
    return [_patch_point(*line.split(" | ")) for line in lines]


_ALL = _rows(TABLE.read_text(encoding="utf-8"))
WRAPPED = [point for point in _ALL if point.parameters is not None]
PRIVATE = [point for point in _ALL if point.parameters is None]


def require_patch_point(owner: Any, name: str) -> None:
    """Raise unless the table has a method of one of the owner's classes.

    Raises:
        LookupError: If the table does not list the method.
    """
    classes = {kind.__name__ for kind in type(owner).__mro__}
    for entry in WRAPPED:
        known = entry.name == name or (entry.name.endswith("_") and name.startswith(entry.name))
        if known and (entry.owner.rpartition(".")[2] in classes or entry.name in ("forward", "step")):
            return  # an optimizer, or something that is called as a module, may be of any class
    raise LookupError(f"{type(owner).__name__}.{name} is wrapped, but core/lightning/patch_points.md does not list it.")
