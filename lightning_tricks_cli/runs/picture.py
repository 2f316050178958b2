"""Writing pictures to files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_tricks.core.figures import Axes
from lightning_tricks.core.install import required
from lightning_tricks.core.safe_load.atomic_file import atomic_write, require_file


def check_picture(path: Path) -> None:
    """Check that matplotlib can write the picture.

    Raises:
        ImportError: If matplotlib is missing.
        FileNotFoundError: If the folder does not exist.
        FileExistsError: If the path has something that is no file.
        ValueError: If matplotlib does not know the suffix.
    """
    with required("the plot needs matplotlib", "plot"):
        from matplotlib.backend_bases import FigureCanvasBase
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for the plot.")
    require_file(path)
    suffixes = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in suffixes:
        raise ValueError(f"the name of the plot must end in .{', .'.join(suffixes)}, got {path.name}.")


@contextmanager
def picture(path: Path) -> Iterator[Axes]:
    """Provide axes to draw into, and write them to a file afterwards."""
    from matplotlib.figure import Figure  # pyplot may need a screen.

    figure = Figure(layout="constrained")
    yield figure.subplots()
    with atomic_write(path) as file:
        figure.savefig(file)
