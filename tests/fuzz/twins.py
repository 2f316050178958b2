"""The same module in another way, in which it must train to the same: a twin for each trick at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.fuzz.hooks import BEFORE_STEPS, act_of
from tests.fuzz.layers import IN_PYTHON
from tests.fuzz.migrations import MIGRATIONS
from tests.fuzz.modules import Spec
from tests.fuzz.runs import alike, run
from tests.fuzz.tricks import AT_WORK, known, suited_to, together


def draws(spec: Spec) -> bool:
    """Whether a module draws weights once, before its first step and in no later hook."""
    acts = [(hook, act) for hook, act in filter(None, map(act_of, spec.hooks)) if act == "draws weights once"]
    return bool(acts) and "pruning" not in spec.callbacks and all(hook in BEFORE_STEPS for hook, _ in acts)


def is_migrated(spec: Spec) -> bool:
    """Whether a module computes what it did before its class has changed; the noise of a weight is of its shape."""
    same = spec.migration != "" and MIGRATIONS[spec.migration].same
    return same and not ("noise on gradients" in spec.hooks and "reshaped" in spec.migration)


def is_scripted(spec: Spec) -> bool:
    """Whether a module has TorchScript that rounds as Python does; its fused layers do not in 16 bits."""
    return spec.net in IN_PYTHON and spec.trainer != "bf16"


@dataclass(frozen=True)
class Twin:
    """Another way to have the same module.

    Args:
        has: Whether a description has a twin.
        attributes: Those of the twin's class.
        tolerance: By how much its numbers may differ.
    """

    has: Callable[[Spec], Any]
    attributes: dict[str, Any]
    tolerance: float = 0.0


TWINS = {
    "weights that are there from the first": Twin(draws, {"is_drawn": True}),
    "layers without TorchScript": Twin(is_scripted, {"in_python": True}, 1e-5),
    "a class that has not changed": Twin(is_migrated, {"is_old": True}, 1e-6),
}


def twins(spec: Spec, name: str, twin: str) -> bool:
    """Whether a module with a trick at work trains as its twin does; False if it has none, or is refused in time."""
    spec, other = suited_to(spec, name), TWINS[twin]
    if not other.has(spec) or known(spec, name, "on"):
        return False
    trained = partial(run, spec, together((AT_WORK[name], "on")))
    return alike(spec, (name,), partial(trained, **other.attributes), trained, tolerance=other.tolerance)
