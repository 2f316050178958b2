"""Validation metrics of the averaged and of the raw weights, by optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_tricks.core.figures import figure_and_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class History:
    """The metrics that were logged as ``name`` for the averaged weights and as ``name + suffix`` for the raw ones."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, float, float]]] = {}

    def record(self, step: int, metrics: Mapping[str, Tensor], suffix: str) -> None:
        """Record every metric that was logged for both."""
        for name, value in metrics.items():
            raw = metrics.get(_with(suffix, name), metrics.get(name + suffix))  # a module's own name may end in _step
            if raw is not None:
                self._rows.setdefault(name, []).append((step, float(value), float(raw)))

    def plot(self, metric: str | None, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw a metric of both; None for the first one."""
        if metric not in self._rows and (metric is not None or not self._rows):
            known = ", ".join(map(repr, self._rows)) or 'nothing (validate="both" records both)'
            raise ValueError(f"There is no history of {metric!r} of averaged and raw weights; recorded: {known}.")
        figure, ax = figure_and_axes(ax)
        name = metric or next(iter(self._rows))
        steps, averaged, raw = zip(*self._rows[name], strict=True)
        ax.plot(steps, averaged, label="averaged weights")
        ax.plot(steps, raw, label="raw weights", linestyle="--")
        ax.set_xlabel("optimizer step")
        ax.set_ylabel(name)
        ax.legend()
        return figure, ax

    def state_dict(self) -> dict[str, Any]:
        """The metrics as plain data."""
        return {name: list(rows) for name, rows in self._rows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the metrics from a state, in which a checkpoint of XLA has lists in place of tuples."""
        self._rows = {name: [tuple(row) for row in rows] for name, rows in state.items()}


def _with(suffix: str, name: str) -> str:
    """A name of Lightning with a suffix behind the name that the module logged, before ``/dataloader_idx_1``."""
    base, separator, dataloader = name.partition("/dataloader_idx_")
    for fork in ("_epoch", "_step"):
        if base.endswith(fork):
            return f"{base.removesuffix(fork)}{suffix}{fork}{separator}{dataloader}"
    return f"{base}{suffix}{separator}{dataloader}"
