"""The table of docs/conflicts.md, from what the classes of the package declare; ``make tables`` writes it."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from tables import placed

from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.modules.grad_cache.mixin import GradCacheHooks
from lightning_tricks.modules.sam.trainer_hooks import MixinHooks

KINDS = (
    *("advisor", "callbacks", "checkpoints", "data", "evaluation", "losses", "modules", "optimizers"),
    *("schedules", "strategies"),
)
PAGE = Path(__file__).parent.parent / "docs" / "conflicts.md"
MARKS = ("<!-- conflicts: make tables -->", "<!-- end of conflicts -->")


def public() -> dict[str, str]:
    """Every public name and the sub-package that exports it."""
    packages = {kind: importlib.import_module(f"lightning_tricks.{kind}") for kind in KINDS}
    return {name: kind for kind, package in packages.items() for name in package.__all__}


def declared() -> dict[Conflict, list[str]]:
    """Each conflict, and the public names of the classes that declare it."""
    found: dict[Conflict, list[str]] = {}
    for name, kind in public().items():
        thing = getattr(importlib.import_module(f"lightning_tricks.{kind}"), name)
        declaring = {"SAMMixin": MixinHooks, "GradCacheMixin": GradCacheHooks}.get(name, thing)
        for conflict in getattr(declaring, "conflicts", ()) if inspect.isclass(declaring) else ():
            found.setdefault(conflict, []).append(name)
    return found


def markdown() -> str:
    """The table."""
    lines = ["| this, and what it is with | what is wrong | remedy |", "|---|---|---|"]
    for conflict, names in declared().items():
        verb = "warns" if conflict.warns else "raises"
        pair = f"{_code(names)} with {_code(others(conflict))} {verb}"
        lines.append(f"| {pair} | {conflict.rule} | {conflict.remedy} |")
    return "\n".join(lines)


def others(conflict: Conflict) -> list[str]:
    """The public names that a conflict is with."""
    return [name for other in conflict.others for name in _public(other)]


def _public(other: str) -> list[str]:
    """The public names for a class that conflicts name."""
    names = {
        "Averaging": ["EMA", "SWA", "PostHocEMA", "Teacher", "Distill"],
        "GradCacheHooks": ["GradCacheMixin"],
        "AveragingCallback": ["EMA", "SWA"],
        "TeachingCallback": ["Teacher", "Distill"],
        "MixingCallback": ["Mixup", "CutMix", "HiddenMixup"],
        "SAMHooks": ["SAMMixin", "SAMCallback"],
        "GradientCallback": ["AdaptiveClip", "AutoClip", "GradientStats", "InspectTraining"],
    }
    return names.get(other, [other])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    """docs/conflicts.md with the table between its markers."""
    return placed(PAGE.read_text(), MARKS[0], markdown(), MARKS[1])
