"""Drawing a learning-rate curve by its name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_tricks import schedules
from lightning_tricks.callbacks import LRSchedule
from lightning_tricks.schedules.by_name import CURVES
from lightning_tricks_cli.runs.picture import check_picture, picture


def draw(curve: str, output: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """Write a picture of a schedule.

    Args:
        curve: The name of the curve, a function of ``lightning_tricks.schedules``.
        output: The picture to write.
        steps: The number of optimizer steps, at least 1.
        settings: Arguments of the curve.

    Raises:
        ImportError: If matplotlib is missing.
        FileNotFoundError: If the folder of the output does not exist.
        ValueError: If a setting is out of range, or matplotlib does not know the suffix.
        TypeError: If the curve does not have a setting.
    """
    check_picture(output)
    named = LRSchedule(curve, **settings)  # Checks the settings; its errors list those of the curve.
    with picture(output) as axes:
        schedules.plot_schedule(partial(CURVES[curve], **named.settings), steps, axes)
