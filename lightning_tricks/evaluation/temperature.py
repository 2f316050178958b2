"""Calibration: one temperature for the logits, so that a probability of 80% is right in 80 of 100 cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.replay.rerun import modes_kept
from lightning_tricks.evaluation.mean_output import require_logits

__all__ = ["Temperature", "fit_temperature"]

BINS = 15


@dataclass(frozen=True)
class Temperature:
    """The result of ``fit_temperature``; ``logits / temperature`` are calibrated.

    Args:
        temperature: Number by which logits are divided; above 1 for a network that is too sure.
        nll: Mean negative log likelihood before and after.
        ece: Expected calibration error before and after.
        reliability: Before and after: mean confidence, accuracy and number of samples of each bin that has some.

    Example:
        >>> Temperature(2.0, (0.5, 0.4), (0.1, 0.02), ([], [])).scale(torch.tensor([4.0, 2.0]))
        tensor([2., 1.])
    """

    temperature: float
    nll: tuple[float, float]
    ece: tuple[float, float]
    reliability: tuple[list[tuple[float, float, int]], list[tuple[float, float, int]]]

    def scale(self, logits: Tensor) -> Tensor:
        """The calibrated logits."""
        return logits / self.temperature

    def apply(self, module: nn.Module) -> RemovableHandle:
        """Let a module return calibrated logits from now on; ``.remove()`` of what this returns ends it.

        Checkpoints of the module do not have the temperature: apply it again after loading.
        """
        return module.register_forward_hook(_Scale(self.temperature))

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:.3f}: NLL {self.nll[0]:.4f} -> {self.nll[1]:.4f}, ECE {self.ece[0]:.4f} ->"
            f" {self.ece[1]:.4f}"
        )

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw accuracy against confidence before and after, into the given axes or a new figure.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure, ax = figure_and_axes(ax)
        ax.plot([0, 1], [0, 1], color="0.7", label="calibrated")
        for name, bins, error in zip(("before", "after"), self.reliability, self.ece, strict=True):
            ax.plot([each[0] for each in bins], [each[1] for each in bins], "o-", label=f"{name}, ECE {error:.3f}")
        ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        ax.legend()
        return figure, ax


class _Scale:
    """A forward hook that divides the output; an object of a class, which pickles."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not isinstance(output, Tensor):
            raise TypeError(
                f"Temperature divides logits, got {type(output).__name__} from {type(module).__name__}: apply it to the"
                " submodule that returns them."
            )
        return output / self.temperature


def best_temperature(logits: Tensor, targets: Tensor) -> float:
    """The T with the lowest ``cross_entropy(logits / T, targets)``, which is convex in ``1 / T``.

    Args:
        logits: Logits (N, C), not probabilities.
        targets: Classes (N,).

    Raises:
        ValueError: If there is no such T above 0, or what should be logits and classes are not.

    Example:
        >>> logits = torch.tensor([[8.0, 0.0]] * 4)  # very sure, and right in 3 of 4
        >>> round(best_temperature(logits, torch.tensor([0, 0, 0, 1])), 3)  # 8 / log(3)
        7.282
    """
    _check(logits, targets)
    logits = logits.double()
    right = logits.gather(1, targets[:, None]).squeeze(1)
    if (right == logits.amax(1)).all():
        raise ValueError(
            "calibration needs samples that are misclassified, got none: the likelihood grows without end as T falls to"
            " 0. Use data that the network was not trained with."
        )
    if (right - logits.mean(1)).mean() <= 0:
        raise ValueError(
            "calibration needs logits that say something of the targets, got none: the likelihood grows without end as"
            " T rises. Check that logits and targets belong together."
        )
    scale = logits.std()
    log_inverse = torch.zeros((), dtype=torch.double, device=logits.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_inverse], max_iter=200, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / scale * log_inverse.exp(), targets)
        loss.backward()
        return loss

    with torch.inference_mode(False), torch.enable_grad():
        optimizer.step(closure)
    return (scale / log_inverse.detach().exp()).item()


def _check(logits: Tensor, targets: Tensor) -> None:
    require_logits(logits)
    if targets.shape != logits.shape[:1] or targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(
            f"targets must be classes (N,) of logits (N, C), got {targets.dtype} {tuple(targets.shape)} and"
            f" {tuple(logits.shape)}."
        )
    if not logits.isfinite().all():
        raise ValueError("logits must be finite, got inf or NaN among them.")
    if targets.min() < 0 or targets.max() >= logits.shape[1]:
        raise ValueError(
            f"targets must be in [0, {logits.shape[1]}), got {int(targets.min())} to {int(targets.max())}: leave out"
            " samples without a class."
        )


def fit_temperature(
    module: nn.Module, loader: Iterable[Any], predict: Callable[[Any, Any], tuple[Tensor, Tensor]] | None = None
) -> Temperature:
    """Fit the temperature of a classifier on held-out data: ``softmax(logits / T)`` with the lowest ``-log p(target)``.

    The predicted class never changes, nor does the accuracy. Weights and mode of the module stay as they are.

    Args:
        module: A trained module with logits (N, C), such as a LightningModule or an Ensemble.
        loader: Batches that it was not trained with.
        predict: Function of module and batch that returns logits (N, C) and classes (N,); None for batches
            ``(inputs, classes)`` and the logits ``module(inputs)``.

    Returns:
        The temperature with likelihood and calibration error before and after; ``.scale()`` and ``.apply()`` use it.

    Raises:
        TypeError: If batches are no pairs and ``predict`` is None.
        ValueError: For no batches, probabilities in place of logits, other targets than classes, and data from which no
            temperature can be told.

    Example:
        >>> inputs, classes = torch.tensor([[8.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1])
        >>> print(fit_temperature(nn.Identity(), [(inputs, classes)]))
        temperature 7.282: NLL 2.0003 -> 0.5623, ECE 0.2497 -> 0.0000

    References:
        Guo et al., On calibration of modern neural networks, arXiv 1706.04599.
    """
    from torchmetrics.functional.classification import multiclass_calibration_error

    tensor = next(iter([*module.parameters(), *module.buffers()]), torch.zeros(()))
    with modes_kept(module), torch.no_grad():
        module.eval()
        batches = [(predict or _pair)(module, move_data_to_device(batch, tensor.device)) for batch in loader]
    if not batches:
        raise ValueError("loader must yield batches, got none.")
    logits, targets = (torch.cat([batch[part].detach().cpu() for batch in batches]) for part in (0, 1))
    temperature = best_temperature(logits, targets)
    before, after = logits.double(), logits.double() / temperature
    return Temperature(
        temperature,
        (F.cross_entropy(before, targets).item(), F.cross_entropy(after, targets).item()),
        tuple(
            multiclass_calibration_error(each.softmax(1), targets, logits.shape[1], n_bins=BINS).item()
            for each in (before, after)
        ),
        (_reliability(before, targets), _reliability(after, targets)),
    )


def _pair(module: Any, batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise TypeError(
            f"batches must be pairs (inputs, classes), got {type(batch).__name__}: pass predict=, a function of module"
            " and batch that returns logits and classes."
        )
    return module(batch[0]), batch[1]


def _reliability(logits: Tensor, targets: Tensor) -> list[tuple[float, float, int]]:
    confidence, guess = logits.softmax(1).max(1)
    right = (guess == targets).double()
    bins = (confidence * BINS).ceil().long().clamp(1, BINS)  # (0, 1/15], ..., as torchmetrics'
    inside = [bins == number for number in range(1, BINS + 1) if (bins == number).any()]
    return [(confidence[each].mean().item(), right[each].mean().item(), int(each.sum())) for each in inside]
