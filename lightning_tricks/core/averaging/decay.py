"""The decay of an exponential moving average, with a warm-up."""

from __future__ import annotations

from typing import Literal

from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_range

__all__ = ["ema_decay"]

Warmup = bool | Literal["power"]


def ema_decay(updates: int, decay: float, *, warmup: Warmup = True, every_n_steps: int = 1) -> float:
    """The decay of an update: ``d = min(decay**every_n_steps, w)``, with a warm-up w for young averages.

    w is ``(1+updates)/(10+updates)`` for True, ``1 - (1+updates)**(-2/3)`` for "power" and 1 for False.

    Args:
        updates: Number of updates before this one.
        decay: Decay per optimizer step, in [0, 1).
        warmup: True, "power" (reaches 0.999 after 31,600 updates, where True takes 9,000) or False.
        every_n_steps: Optimizer steps between updates.

    Returns:
        d of ``average = d * average + (1-d) * weight``.

    Example:
        >>> ema_decay(0, 0.999), ema_decay(10**6, 0.999)
        (0.1, 0.999)
    """
    check_count("updates", updates, 0)
    check_decay(decay, warmup, every_n_steps)
    corrected = decay**every_n_steps
    if warmup == "power":
        return min(corrected, 1 - (1 + updates) ** (-2 / 3))
    return min(corrected, (1 + updates) / (10 + updates)) if warmup else corrected


def check_decay(decay: float, warmup: Warmup, every_n_steps: int) -> None:
    """Raise unless these are a decay and its settings."""
    check_range("decay", decay, 0.0, 1.0, below=True)
    if isinstance(warmup, str):
        check_choice("warmup", warmup, ("power",))
    else:
        check_bool("warmup", warmup)
    check_count("every_n_steps", every_n_steps)
