"""Validation of raw weights before averaged ones; apart from the callback, which knows nothing of metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.lightning.trainer import monitors, validate_again

RAW = "_raw"  # The suffix of the raw weights' metrics.
_FORKS = re.compile(r"(_epoch|_step)?(/dataloader_idx_\d+)?$")  # Suffixes of metrics by Lightning.


class RawMetrics:
    """The metrics of the raw weights, logged as ``name_raw`` beside ``name`` of the averaged weights."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # as the module logged them in the last validation, with the suffix
        self._rows: dict[str, list[tuple[int, float, float]]] = {}  # step, averaged and raw value, by metric

    def validate(self, trainer: L.Trainer, run: Callable[[], Any]) -> Any:
        """Validate the raw weights first, so that their metrics are there when the main validation ends."""
        if not trainer.sanity_checking:
            self._names = validate_again(trainer, run, RAW)
        return run()

    def chose(self, trainer: L.Trainer, filepath: str | Path) -> bool:
        """Whether a ModelCheckpoint saves this file for a metric of the raw weights."""
        return _FORKS.sub("", monitors(trainer, str(filepath)) or "") in self._names

    def record(self, step: int, metrics: Mapping[str, Tensor]) -> None:
        """Record every metric that was logged for both."""
        for name, value in metrics.items():
            suffixed = _FORKS.sub(rf"{RAW}\g<0>", name, count=1)  # before what Lightning appends to a name
            raw = metrics.get(suffixed, metrics.get(name + RAW))  # a module's own name may end in _step
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
        """The recorded metrics as plain data."""
        return {name: list(rows) for name, rows in self._rows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the metrics from a state, in which a checkpoint of XLA has lists in place of tuples."""
        self._rows = {name: [tuple(row) for row in rows] for name, rows in state.items()}
