"""What is wrapped or used of Lightning, torch and DeepSpeed besides their public names: the rows of patch_points.md.

``wrap_method`` refuses what is not in ``WRAPPED``. ``tests/core/lightning/test_patch_points.py`` compares both tables
with the installed versions, names the tricks that would break, and finds private names that are missing here,
but not those inside strings: ``core/replay/recompute.py`` has names of torch's private operations in ``_KEPT``, and
leaves out those that the installed version lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

TABLE = Path(__file__).with_suffix(".md")


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
