"""Which labels of a data set are probably wrong, by how a network took to them while it trained."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_tricks.checkpoints.files import path_of
from lightning_tricks.core.checks import check_range, check_type
from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.report import Grid, Tabled, plain_table
from lightning_tricks.evaluation.plan import write_json

__all__ = ["LabelReport", "label_report"]

_SHOWN = 20  # rows of the table


@dataclass(frozen=True, eq=False)
class LabelReport(Tabled):
    """What ``LabelErrors`` and ``label_report`` have found of n samples; one tensor (n,) a column.

    Args:
        sample: The numbers of the samples in the data set, ascending.
        label: The labels; -1 where a sample has no class or several.
        other: The class that the network takes for the most likely one besides the label, when it saw the sample last;
            -1 as above.
        epochs: How often the samples were seen.
        loss: Mean losses over the epochs.
        margin: Mean margins over the epochs, the area under the margin: the logit of the label minus the largest other
            one; NaN where a loss has no logits.
        confidence: Mean probabilities of the labels over the epochs, one axis of a data map; NaN as above.
        variability: Their standard deviations, the other axis.

    Example:
        >>> report = label_report(torch.tensor([[2.0, 0.0], [0.5, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 1]))
        >>> report.suspects(), report.suspects(1 / 3)
        ([2, 1], [2])
    """

    sample: Tensor
    label: Tensor
    other: Tensor
    epochs: Tensor
    loss: Tensor
    margin: Tensor
    confidence: Tensor
    variability: Tensor

    @property
    def order(self) -> Tensor:
        """The rows (n,) from the most suspect one on: by their margins, or by their losses where any margin is NaN."""
        by_margin = not self.margin.isnan().any()
        return self.margin.argsort(stable=True) if by_margin else (-self.loss).argsort(stable=True)

    def suspects(self, share: float | None = None) -> list[int]:
        """The numbers of the samples whose labels are probably wrong, the most suspect one first.

        Args:
            share: Share of the samples, in [0, 1]; None for those with a mean margin below 0, which the network takes
                for something else on average.

        Raises:
            ValueError: For a share out of range, or none where there are no margins.
        """
        if share is not None:
            check_range("share", share, 0.0, 1.0)
            return self.sample[self.order[: round(share * len(self.sample))]].tolist()
        if self.margin.isnan().any():
            raise ValueError("share must be a number where the loss has no logits, and so no margins, got None.")
        return self.sample[self.order[: int((self.margin < 0).sum())]].tolist()

    @override
    def _grid(self) -> Grid:
        columns = ("sample", "label", "rather", "margin", "loss", "confidence", "epochs")
        rows = [
            (
                *(str(int(column[row])) for column in (self.sample, self.label, self.other)),
                *(f"{float(column[row]):.3g}" for column in (self.margin, self.loss, self.confidence)),
                str(int(self.epochs[row])),
            )
            for row in self.order[:_SHOWN].tolist()
        ]
        below = int((self.margin < 0).sum())
        title = f"{len(self.sample)} samples, {below} of them with a mean margin below 0; the most suspect ones:"
        return Grid(columns, rows, above=[title])

    def __str__(self) -> str:
        grid = self._grid()
        return "\n".join([*grid.above, plain_table(grid.columns, grid.rows, 1000)])

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the data map, the confidence over its variability in the color of the margin, or a histogram of losses.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure, ax = figure_and_axes(ax)
        if self.margin.isnan().any():
            ax.hist(self.loss.tolist(), bins=50)
            ax.set(xlabel="mean loss", ylabel="samples")
            return figure, ax
        limit = max(float(self.margin.abs().max()), 1e-9)
        columns = (self.variability.tolist(), self.confidence.tolist())
        points = ax.scatter(*columns, c=self.margin.tolist(), s=4, cmap="coolwarm_r", vmin=-limit, vmax=limit)
        figure.colorbar(points, ax=ax, label="mean margin")
        ax.set(xlabel="variability of the label's probability", ylabel="its mean", ylim=(-0.02, 1.02))
        return figure, ax

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the columns to a file, from the most suspect sample on; NaN is null.

        Raises:
            OSError: If the file cannot be written.
        """
        order, columns = self.order, {}
        for name, column in vars(self).items():
            values = column[order].tolist()
            columns[name] = [None if value != value else value for value in values]
        write_json(path_of("path", path), columns)


def label_report(predictions: Tensor, labels: Tensor) -> LabelReport:
    """Find labels that are probably wrong from predictions of modules that were not trained with the samples.

    ``margin = logit[label] - max(other logits)``, as in ``LabelErrors``, of one prediction for each sample; such are
    the ``predictions`` of ``cross_validate``.

    Args:
        predictions: Logits (n, C), or logarithms of probabilities.
        labels: Classes (n,), integers.

    Raises:
        TypeError: For labels or predictions of another type.
        ValueError: For other shapes, or a class that is not there.

    Example:
        >>> print(label_report(torch.tensor([[2.0, 0.0], [0.5, 1.0]]), torch.tensor([0, 0])))
        2 samples, 1 of them with a mean margin below 0; the most suspect ones:
        sample  label  rather  margin  loss   confidence  epochs
        1       0      1       -0.5    0.974  0.378       1
        0       0      1       2       0.127  0.881       1

    References:
        Pleiss et al. 2020, Identifying Mislabeled Data using the Area Under the Margin Ranking, arXiv 2001.10528;
        Northcutt et al. 2021, Confident Learning, arXiv 1911.00068.
    """
    check_type("predictions", predictions, Tensor)
    check_type("labels", labels, Tensor)
    if labels.is_floating_point() or not predictions.is_floating_point():
        raise TypeError(f"labels must be integers and predictions logits, got {labels.dtype} and {predictions.dtype}.")
    if predictions.ndim != 2 or labels.shape != predictions.shape[:1] or predictions.shape[1] < 2:
        shapes = f"{tuple(predictions.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"predictions (n, C) and labels (n,) must be of the same samples, C at least 2, got {shapes}.")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < predictions.shape[1]:
        raise ValueError(
            f"labels must be in [0, {predictions.shape[1]}), got {int(labels.min())} to {int(labels.max())}."
        )
    margin, confidence, other = label_margins(predictions.detach().cpu(), labels.cpu())
    return LabelReport(
        sample=torch.arange(len(labels), device="cpu"),
        label=labels.cpu(),
        other=other,
        epochs=torch.ones_like(other),
        loss=-confidence.log(),
        margin=margin,
        confidence=confidence,
        variability=torch.zeros_like(confidence),
    )


def label_margins(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The margins of labels (n,), their probabilities (n,), and the most likely other classes (n,) by logits (n, C)."""
    logits, column = logits.float(), labels[:, None]
    best, other = logits.scatter(1, column, -torch.inf).max(1)
    margin = logits.gather(1, column)[:, 0] - best
    return margin, logits.log_softmax(1).gather(1, column)[:, 0].exp(), other
