"""Cross-validation: a fresh module, Trainer and seed for every fold, resumable, with out-of-fold predictions."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.checks import check_bool, check_count, check_range
from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.report import table
from lightning_tricks.evaluation.fold_data import FoldData, MakeLoader
from lightning_tricks.evaluation.fold_runs import RESULTS, FoldRuns
from lightning_tricks.evaluation.folds import Fold, fingerprint, make_folds
from lightning_tricks.evaluation.plan import finite, require_lock, require_plan, write_json
from lightning_tricks.evaluation.predictions import out_of_fold
from lightning_tricks.evaluation.statistics import Interval, mean_and_interval

__all__ = ["CrossValidation", "cross_validate"]


@dataclass(frozen=True)
class CrossValidation:
    """The result of ``cross_validate``.

    Args:
        metrics: What the validation of each fold has logged, by name.
        predictions: ``predict_step``'s output for all samples, in the data set's order, each tensor (n, ...), from the
            module that was not trained with the sample; None with ``predict=False``.
        members: The checkpoints of each fold that its ModelCheckpoint has kept (``save_top_k``), the best first.
        folds: The positions of each fold's samples in the data set.

    Example:
        >>> folds = [Fold([1, 2], [0]), Fold([0, 2], [1]), Fold([0, 1], [2])]
        >>> print(CrossValidation([{"loss": 0.5}, {"loss": 0.7}, {"loss": 0.6}], None, [], folds))
        3 folds: loss 0.6 ± 0.1 (95%: 0.207 to 0.993)
    """

    metrics: list[dict[str, float]]
    predictions: Any
    members: list[list[Path]]
    folds: list[Fold]

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoint of each fold that was validated."""
        return [best for best, *_ in self.members]

    @property
    def overlap(self) -> float:
        """The size of a validation set by that of its training set, for ``mean_and_interval``."""
        return sum(len(fold.validation) / len(fold.train) for fold in self.folds) / len(self.folds)

    @property
    def intervals(self) -> dict[str, Interval]:
        """Mean, standard deviation and 95% interval of each metric over the folds; NaN if a fold lacks it.

        Folds share training data, so their results vary less than those of new data would: the interval is as much
        wider as Nadeau and Bengio found.
        """
        names = dict.fromkeys(name for row in self.metrics for name in row)
        return {
            name: mean_and_interval([row.get(name, math.nan) for row in self.metrics], overlap=self.overlap)
            for name in names
        }

    def table(self) -> str:
        """The metrics of each fold, their means, standard deviations and intervals, as text."""
        found = self.intervals
        rows = [[str(k), *(f"{row.get(name, math.nan):.4g}" for name in found)] for k, row in enumerate(self.metrics)]
        rows += [[part, *(f"{getattr(value, part):.4g}" for value in found.values())] for part in ("mean", "std")]
        rows += [["95%", *(f"{value.low:.4g} to {value.high:.4g}" for value in found.values())]]
        return table(["fold", *found], rows)

    def __str__(self) -> str:
        means = [
            f"{name} {each.mean:.4g} ± {each.std:.2g} (95%: {each.low:.3g} to {each.high:.3g})"
            for name, each in self.intervals.items()
        ]
        return f"{len(self.metrics)} folds: {', '.join(means)}"

    def plot(self, metric: str | None = None, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw a metric of each fold with mean and interval, into the given axes or a new figure.

        Args:
            metric: Name of the metric; None for the first.
            ax: The axes.

        Raises:
            ImportError: If matplotlib is missing.
            ValueError: If there is no such metric.
        """
        found = self.intervals
        name = next(iter(found), None) if metric is None else metric
        if name not in found:
            raise ValueError(f"metric must be one of {', '.join(found) or 'none'}, got {metric!r}.")
        figure, ax = figure_and_axes(ax)
        ax.plot([row.get(name, math.nan) for row in self.metrics], "o", label="fold")
        ax.axhline(found[name].mean, label=f"mean {found[name].mean:.4g}")
        ax.axhspan(found[name].low, found[name].high, alpha=0.15, label="95% interval")
        ax.set(xlabel="fold", ylabel=name, xticks=range(len(self.metrics)))
        ax.legend()
        return figure, ax

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the predictions; what is not finite is None."""
        return {
            "metrics": finite(self.metrics),
            "intervals": finite({name: each._asdict() for name, each in self.intervals.items()}),
            "checkpoints": [str(path) for path in self.checkpoints],
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_dict`` to a file, atomically."""
        write_json(Path(path), self.to_dict())


def cross_validate(
    make_module: Callable[[int], L.LightningModule],
    dataset: Any,
    make_trainer: Callable[[int, Path], L.Trainer],
    *,
    splitter: Any = 5,
    targets: Any = None,
    groups: Any = None,
    loader: MakeLoader | None = None,
    folder: str | os.PathLike[str],
    seed: int = 0,
    predict: bool = True,
    workers: int = 1,
) -> CrossValidation:
    """Train and validate a fresh module on each fold of a data set; each sample is predicted by one that never saw it.

    Fold k is ``seed_everything(seed + k)``, ``make_module(k)``, ``make_trainer(k, folder)``, ``fit``, then ``validate``
    and ``predict`` with its best checkpoint, or the last weights if no ModelCheckpoint monitors a metric. Finished
    folds are kept in ``folder``: started again, a run that was killed goes on with the fold in which it was, from its
    beginning, and ends bit for bit as an unbroken one. Random numbers of the caller stay as they are.

    Under DDP and sharding all ranks call it, as they call ``trainer.fit``, and get the same result.

    Args:
        make_module: Function of the fold's number that makes a new LightningModule.
        dataset: A data set with a length, or a LightningDataModule: its method ``fold_dataset(train)`` returns the data
            set with the transforms for training or for validation. Without it, both of its loaders must have Subsets of
            one data set, as ``random_split`` makes them, or of two views of it.
        make_trainer: Function of the fold's number and its folder that makes a new Trainer, whose files belong there:
            ``Trainer(default_root_dir=folder)``.
        splitter: Number of folds, shuffled by ``seed``, or any splitter of ``sklearn.model_selection``. Samples that
            are predicted several times get the mean, those that never are NaN.
        targets: Target of each sample (n,), for splitters that stratify.
        groups: Group of each sample (n,), for splitters that keep groups together.
        loader: Function of a subset and of whether it is for training that makes its DataLoader. None for batches of
            32, or the settings of the data module's own loaders.
        folder: Folder for plan, results and the folds' own files, ``fold0`` and so on; the same to go on, another one
            for another module or Trainer, which finished folds do not know. Only files of this function are replaced.
        seed: Seed of the first fold, and of an int's splits.
        predict: Whether to predict the samples by ``predict_step``.
        workers: Number of folds at a time, each in a process of its own; ``make_trainer`` chooses their devices. The
            functions must pickle.

    Returns:
        Metrics with means and intervals, predictions in the data set's order, and checkpoints.

    Raises:
        TypeError: For arguments of the wrong type, and functions that do not pickle with ``workers``.
        ValueError: For a folder with other folds or data, or in which another process trains, a splitter whose folds
            overlap or are empty, a validation loader in another order, and predictions that cannot be put together.
        OSError: For a file in place of a folder, files of others that have the names of results, and a folder that is
            removed meanwhile.
        MisconfigurationException: For a module, parameters, a Trainer or its callbacks that were used before, a Trainer
            that does not predict all samples, and metrics that differ between ranks.

    Example:
        >>> import tempfile
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = cross_validate(
        ...         lambda fold: BoringModel(), RandomDataset(32, 12),
        ...         lambda fold, folder: L.Trainer(
        ...             max_epochs=1, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet
        ...         ),
        ...         splitter=3, folder=folder,
        ...     )
        >>> len(result.metrics), result.predictions.shape
        (3, torch.Size([12, 2]))

    References:
        Nadeau and Bengio, Inference for the generalization error, Machine Learning 52 (2003).
    """
    path = folder_of("folder", folder)
    check_count("seed", seed, least=0)
    check_range("seed", seed, 0, 2**32 - 1)
    check_bool("predict", predict)
    check_count("workers", workers)
    data = FoldData(dataset, loader)
    folds = make_folds(splitter, len(data), targets, groups, seed)
    plan = {
        "data set": type(dataset).__name__,
        "samples": len(data),
        "splitter": type(splitter).__name__,
        "seed": seed,
        "targets": fingerprint(targets),
        "groups": fingerprint(groups),
        "folds": f"{len(folds)}, checksum {fingerprint([[*fold.train, -1, *fold.validation] for fold in folds])}",
        "predict": predict,
        "checksum of the first batch": data.checksum(folds[0]),
    }
    require_lock(path)
    require_plan(path / "folds.json", plan, RESULTS)
    run = FoldRuns(make_module, make_trainer, data, folds, path, seed, predict)
    run.all(workers)
    done = [run.read(k) for k in range(len(folds))]
    predictions = None
    if predict:
        outputs = [(fold.validation, each["predictions"]) for fold, each in zip(folds, done, strict=True)]
        predictions = out_of_fold(outputs, len(data))
    members = [[path / file for file in each["checkpoints"]] for each in done]
    return CrossValidation([each["metrics"] for each in done], predictions, members, folds)
