"""Figures to draw into; matplotlib is imported only for a new one, and its absence names the extra to install."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_tricks.core.install import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any

__all__ = ["Axes", "Figure", "figure_and_axes", "pyplot"]


def pyplot() -> Any:
    """``matplotlib.pyplot``.

    Raises:
        ImportError: If matplotlib is missing; the message names the extra.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"Plots are drawn with matplotlib: {pip_install('plot')}.") from error
    return plt


def figure_and_axes(ax: Axes | None) -> tuple[Figure, Axes]:
    """The given axes with their figure, or a new figure with axes."""
    if ax is None:
        figure, ax = pyplot().subplots()
        return figure, ax
    found = ax.get_figure(root=True)
    assert found is not None, "axes belong to a figure"
    return found, ax
