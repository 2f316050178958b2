"""Soup or ensemble: what the checkpoints of each fold are worth together, on the fold that none of them has seen."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_tricks.checkpoints.average import average_checkpoints
from lightning_tricks.core.report import Grid, Tabled, progress, table
from lightning_tricks.evaluation.cross_validate import CrossValidation
from lightning_tricks.evaluation.ensemble import Ensemble, restored
from lightning_tricks.evaluation.fold_data import FoldData, MakeLoader
from lightning_tricks.evaluation.mean_output import Mean
from lightning_tricks.evaluation.statistics import mean_and_interval, paired_difference

__all__ = ["SoupAndEnsemble", "soup_and_ensemble"]


@dataclass(frozen=True)
class SoupAndEnsemble(Tabled):
    """The result of ``soup_and_ensemble``.

    Args:
        metrics: Metrics of each fold, by "best" (the best checkpoint alone), "soup" and "ensemble".
        overlap: Size of a validation set by that of its training set.

    Example:
        >>> rows = {"best": [{"x": 1.0}, {"x": 2.0}], "soup": [{"x": 2.0}, {"x": 3.1}], "ensemble": [{"x": 1.0}] * 2}
        >>> "+1.0500 (+0.4147 to +1.6853)" in str(SoupAndEnsemble(rows, overlap=0.0))
        True
    """

    metrics: dict[str, list[dict[str, float]]]
    overlap: float

    @override
    def _grid(self) -> Grid:
        rows = []
        for metric in self.metrics["best"][0]:
            best = [fold.get(metric, math.nan) for fold in self.metrics["best"]]
            for name, folds in self.metrics.items():
                values = [fold.get(metric, math.nan) for fold in folds]
                gain = paired_difference(values, best, overlap=self.overlap)
                mean = mean_and_interval(values, overlap=self.overlap).mean
                told = "" if name == "best" else f"{gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})"
                rows.append([metric, name, f"{mean:.4f}", told])
        return Grid(["metric", "checkpoints", "mean", "over best"], rows)

    def table(self) -> str:
        """Means over the folds, and the paired differences from the best checkpoint with their 95% intervals."""
        grid = self._grid()
        return table(grid.columns, grid.rows)

    def __str__(self) -> str:
        return self.table()


def soup_and_ensemble(
    result: CrossValidation,
    kind: type[L.LightningModule],
    dataset: Any,
    make_trainer: Callable[[int, Path], L.Trainer],
    *,
    loader: MakeLoader | None = None,
    mean: Mean = "probabilities",
    output: str = "",
    dim: int | None = None,
    **settings: Any,
) -> SoupAndEnsemble:
    """Validate each fold's best checkpoint, the mean of its checkpoints' weights, and the mean of their outputs.

    The checkpoints are those that the folds' ``ModelCheckpoint(monitor=..., save_top_k=k)`` has kept. All three are
    validated on the samples of the fold, which none of them was trained with, but by which the best was chosen.

    Args:
        result: What ``cross_validate`` has returned.
        kind: Class of the modules.
        dataset: The data set or LightningDataModule, as for ``cross_validate``.
        make_trainer: Function that makes a Trainer, as for ``cross_validate``; for one device.
        loader: Function that makes a loader, as for ``cross_validate``.
        mean: What is averaged, as for ``Ensemble.from_checkpoints``.
        output: Name of the submodule whose outputs are averaged, as for ``Ensemble.from_checkpoints``.
        dim: Dimension of the classes, as for ``Ensemble.from_checkpoints``.
        **settings: Arguments of the class that the checkpoints lack, or that replace their hyperparameters.

    Returns:
        The metrics; printed, a table.

    Raises:
        ValueError: If a fold has one checkpoint only, the data are others, or hyperparameters name code, as for
            ``Ensemble.from_checkpoints``.
        MisconfigurationException: For a Trainer for several devices.

    Example:
        >>> one = CrossValidation([{"loss": 1.0}] * 2, None, [[Path("a.ckpt")], [Path("b.ckpt")]], [])
        >>> soup_and_ensemble(one, L.LightningModule, [], lambda fold, folder: L.Trainer())
        Traceback (most recent call last):
        ValueError: each fold must have several checkpoints, got one of fold 0: pass ModelCheckpoint(save_top_k=3).
    """
    if fewest := [k for k, members in enumerate(result.members) if len(members) < 2]:
        raise ValueError(
            f"each fold must have several checkpoints, got one of fold {fewest[0]}: pass ModelCheckpoint(save_top_k=3)."
        )
    data = FoldData(dataset, loader)
    if len(data) <= (last := max(sample for fold in result.folds for sample in fold.validation)):
        raise ValueError(
            f"dataset must be that of the cross-validation, got {len(data)} samples, and one is number {last}."
        )
    found: dict[str, list[dict[str, float]]] = {"best": [], "soup": [], "ensemble": []}
    with tempfile.TemporaryDirectory() as folder:
        for number, fold in enumerate(progress(result.folds, "soup and ensemble")):
            members, soup = result.members[number], Path(folder) / f"soup{number}.ckpt"
            average_checkpoints(members, soup)
            for name, file in {"best": members[0], "soup": soup}.items():
                module = restored(kind, file, settings)
                found[name].append(_validated(module, make_trainer(number, Path(folder)), data.of(fold)))
            module = Ensemble.from_checkpoints(members, kind, mean=mean, output=output, dim=dim, **settings)
            found["ensemble"].append(_validated(module, make_trainer(number, Path(folder)), data.of(fold)))
    return SoupAndEnsemble(found, result.overlap)


def _validated(module: L.LightningModule, trainer: L.Trainer, loaders: dict[str, Any]) -> dict[str, float]:
    if trainer.world_size > 1:
        raise MisconfigurationException(f"soup_and_ensemble runs on one device, got {trainer.world_size}: devices=1.")
    given = {"datamodule": loaders.get("datamodule"), "dataloaders": loaders.get("val_dataloaders")}
    (metrics,) = trainer.validate(module, verbose=False, **given)
    return {name: float(value) for name, value in metrics.items()}
