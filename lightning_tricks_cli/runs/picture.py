"""Pictures in files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_tricks.core.safe_load.atomic_file import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_picture(path: Path) -> None:
    """Raise unless matplotlib can write there.

    Raises:
        ImportError: If matplotlib is missing.
        FileNotFoundError: If the folder does not exist.
        ValueError: For an ending that is no picture's.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'lightning-tricks[plot]'") from error
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for the plot.")
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in endings:
        raise ValueError(f"the name of the plot must end in .{', .'.join(endings)}, got {path.name}.")


@contextmanager
def picture(path: Path) -> Iterator[Axes]:
    """Axes to draw into, written to a file afterwards."""
    from matplotlib.figure import Figure  # not of pyplot, which may ask for a screen

    figure = Figure(layout="constrained")
    yield figure.subplots()
    with atomic_write(path) as file:
        figure.savefig(file)
