"""How often a step of a trick waits for the device, beyond a plain fit: never, but for these reasons.

A step that logs may wait once more, for the trick's own values. The first step of a fit may look at what it was given,
and the last one at what it ends with.
"""

from __future__ import annotations

WAITS = {
    "HardExampleFilter": (1, "whether a loss is NaN, so that guards must see the whole batch"),
    "RewindOnSpike": (1, "whether the loss is a spike"),
    "SkipNonFinite": (1, "whether the step is made"),
    "TerminateOnNonFinite": (2, "whether the loss is differentiated, and whether the step is made"),
}


def waits_of(row: str) -> tuple[int, str]:
    """The waits of each step of a trick, and what for."""
    return WAITS.get(row, (0, ""))
