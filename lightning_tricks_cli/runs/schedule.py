"""A picture of a curve by its name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_tricks import schedules
from lightning_tricks.callbacks import LRSchedule
from lightning_tricks_cli.runs.picture import check_picture, picture


def draw(curve: str, output: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """Write the picture of a schedule of so many steps.

    Raises:
        ImportError: If matplotlib is missing.
        FileNotFoundError: If the folder of the output does not exist.
        ValueError: For a setting out of range, or an ending that is no picture's.
        TypeError: For a setting that the curve does not have.
    """
    check_picture(output)
    named = LRSchedule(curve, **settings)  # its errors name the settings that the curve has
    with picture(output) as axes:
        schedules.plot_schedule(partial(getattr(schedules, curve), **named.settings), steps, axes)
