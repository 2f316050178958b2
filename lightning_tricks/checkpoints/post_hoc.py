"""Averages of any length after training, from the snapshots of power-function averages."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_tricks.checkpoints.average import mean_tensor
from lightning_tricks.checkpoints.files import load, path_of
from lightning_tricks.core.checks import check_choice, check_count, check_range, check_type
from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.report import progress

__all__ = ["PostHocSweep", "post_hoc_average", "post_hoc_sweep"]

LONGEST = 12**-0.5  # The length of the mean over all steps, of exponent 0.
_NAME = re.compile(r"step=(\d+)-sigma_rel=([0-9.e-]+)\.pt")
_TOLERANCE = 0.2  # The largest relative error of an average's profile, above which it is another one.


class Snapshot(NamedTuple):
    """A file with the power-function average of relative length ``sigma_rel`` after ``step`` optimizer steps."""

    step: int
    sigma_rel: float
    path: Path


def snapshot_name(step: int, sigma_rel: float) -> str:
    """The name of a snapshot's file."""
    return f"step={step}-sigma_rel={sigma_rel!r}.pt"


def snapshots_in(folder: Path) -> list[Snapshot]:
    """The snapshots in the folder of a run, the oldest first; empty if there are none."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(Snapshot(int(name[1]), float(name[2]), path) for name, path in found if name)


@cache
def power_of(sigma_rel: float) -> float:
    """The exponent of a power-function average: ``sigma_rel**2 = (gamma+1) / ((gamma+2)**2 (gamma+3))``.

    >>> round(power_of(0.05), 2), round(power_of(0.10), 2)
    (16.97, 6.94)
    """
    low, high = 0.0, 1 / sigma_rel
    for _ in range(200):
        gamma = (low + high) / 2
        if math.sqrt(gamma + 1) / ((gamma + 2) * math.sqrt(gamma + 3)) > sigma_rel:
            low = gamma
        else:
            high = gamma
    return gamma


def combination(steps: Sequence[int], sigma_rels: Sequence[float], step: int, sigma_rel: float) -> tuple[Tensor, float]:
    """The least-squares weights of averages (n,), and the relative error of the combined profile.

    The profile of an average is how much the weights of every earlier step count in it. The combination is the one
    whose profile is nearest to that of the average of length ``sigma_rel`` after ``step`` steps.
    """
    t = torch.tensor([*steps, step], dtype=torch.float64)
    gamma = torch.tensor([power_of(length) for length in (*sigma_rels, sigma_rel)], dtype=torch.float64)
    later = torch.where(t[:, None] < t, gamma, -gamma[:, None])
    products = (gamma[:, None] + 1) * (gamma + 1) * (t[:, None] / t) ** later
    products = products / ((gamma[:, None] + gamma + 1) * torch.maximum(t[:, None], t))
    among, wanted, norm = products[:-1, :-1], products[:-1, -1], products[-1, -1]
    factors = torch.linalg.lstsq(among, wanted[:, None], driver="gelsd").solution[:, 0]
    error = (norm - 2 * wanted @ factors + factors @ among @ factors) / norm
    return factors, math.sqrt(max(float(error), 0.0))


def post_hoc_average(folder: str | os.PathLike[str], *, sigma_rel: float, step: int | None = None) -> dict[str, Tensor]:
    """An average of the weights over any length, chosen after training, from the snapshots of ``PostHocEMA``.

    ``sum(x_i * snapshot_i) / sum(x_i)``, where x solves ``A x = b`` with the inner products of the snapshots' profiles
    among themselves and with that of the wanted average. Some of the x are negative. With 32 snapshots of each of the
    default lengths the profile is within 2% for lengths from 0.03 to 0.2. Numbers are summed up in double precision.

    Args:
        folder: The folder of ``PostHocEMA``, or one of the runs in it; of several runs the newest is taken.
        sigma_rel: Length of the average: the standard deviation of its profile, as a share of training, above 0 and
            below 0.2887.
        step: The optimizer step at which the average ends, of which there is a snapshot; None for the last.

    Returns:
        The averaged weights by name in fp32 or more, and the buffers of that step, for
        ``module.load_state_dict(..., strict=False)``. Frozen weights are not among them.

    Raises:
        FileNotFoundError: If there are no snapshots, or none of that step.
        ValueError: For a length out of range, or one that these snapshots cannot give; for a damaged file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (1, 2):
        ...         weight = torch.tensor([2.0], dtype=torch.float16)
        ...         file = f"{folder}/{snapshot_name(step, 0.05)}"
        ...         torch.save({"state_dict": {"weight": weight}, "averaged": ["weight"]}, file)
        ...     post_hoc_average(folder, sigma_rel=0.05)
        {'weight': tensor([2.])}

    References:
        Karras et al. 2024, Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv 2312.02696.
    """
    check_length("sigma_rel", sigma_rel)
    return next(averages_of(folder, [sigma_rel], step))


@dataclass(frozen=True)
class PostHocSweep:
    """The result of ``post_hoc_sweep``.

    Args:
        sigma_rels: The lengths of the averages.
        scores: What ``evaluate`` returned of each.
        mode: "max" if the highest score is the best, "min" if the lowest is.

    Example:
        >>> PostHocSweep((0.05, 0.1, 0.2), (0.9, 0.7, 0.8), "min").best
        0.1
    """

    sigma_rels: tuple[float, ...]
    scores: tuple[float, ...]
    mode: Literal["max", "min"]

    @property
    def best(self) -> float:
        """The length with the best score; a score of NaN counts as the worst."""
        sign = 1 if self.mode == "max" else -1
        worth = [-math.inf if math.isnan(score) else sign * score for score in self.scores]
        return self.sigma_rels[worth.index(max(worth))]

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the scores over the lengths, into the given axes or a new figure.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure, ax = figure_and_axes(ax)
        lengths, scores = zip(*sorted(zip(self.sigma_rels, self.scores, strict=True)), strict=True)
        ax.plot(lengths, scores, marker=".")
        ax.axvline(self.best, linestyle="--", label=f"best: {self.best:g}")
        ax.set(xscale="log", xlabel="length of the average, as a share of training (sigma_rel)", ylabel="score")
        ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
        ax.minorticks_off()
        ax.legend()
        return figure, ax


def post_hoc_sweep(
    folder: str | os.PathLike[str],
    evaluate: Callable[[dict[str, Tensor]], float],
    *,
    sigma_rels: Sequence[float] = (0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13, 0.16, 0.2),
    step: int | None = None,
    mode: Literal["max", "min"] = "max",
) -> PostHocSweep:
    """Score averages of several lengths, ``score(average(sigma_rel))``, from the snapshots of ``PostHocEMA``.

    Choose the length on validation data. One average is in memory at a time.

    Args:
        folder: As in ``post_hoc_average``.
        evaluate: A function that returns the score of an average, the weights and buffers by name. It may keep or
            change the tensors.
        sigma_rels: Lengths, as in ``post_hoc_average``.
        step: As in ``post_hoc_average``.
        mode: "max" if the highest score is the best, "min" if the lowest is.

    Raises:
        TypeError: If ``evaluate`` does not return a number.
        FileNotFoundError, ValueError: As ``post_hoc_average``, before anything is scored.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (100, 200):
        ...         for length in (0.05, 0.1):
        ...             content = {"state_dict": {"w": torch.tensor([step * 1.0])}, "averaged": ["w"]}
        ...             torch.save(content, f"{folder}/{snapshot_name(step, length)}")
        ...     post_hoc_sweep(folder, lambda state: state["w"].item(), sigma_rels=[0.05, 0.1]).scores
        (200.0, 200.0)

    References:
        Karras et al. 2024, arXiv 2312.02696, figure 5.
    """
    check_choice("mode", mode, ("max", "min"))
    check_type("sigma_rels", sigma_rels, list, tuple)
    if not sigma_rels:
        raise ValueError("sigma_rels must have at least one length, got none.")
    for place, length in enumerate(sigma_rels):
        check_length(f"sigma_rels[{place}]", length)
    averages = progress(averages_of(folder, sigma_rels, step), "scoring averages", len(sigma_rels))
    return PostHocSweep(tuple(sigma_rels), tuple(float(evaluate(average)) for average in averages), mode)


def averages_of(
    folder: str | os.PathLike[str], sigma_rels: Sequence[float], step: int | None
) -> Iterator[dict[str, Tensor]]:
    """The averages of several lengths, of which one is in memory at a time; all are checked before the first."""
    used = _snapshots_until(path_of("folder", folder), step)
    of_lengths = [_factors(used, length) for length in sigma_rels]
    checkpoints = [load(snapshot.path) for snapshot in used]
    states = [_state_of(checkpoint, snapshot.path) for checkpoint, snapshot in zip(checkpoints, used, strict=True)]
    names = checkpoints[-1]["averaged"]
    buffers = {name: tensor for name, tensor in states[-1].items() if name not in names}
    for factors in of_lengths:
        result = {name: tensor.clone() for name, tensor in buffers.items()}
        for name in progress(names, "averaging", len(names)):
            # A weight that was unfrozen late had not changed before: as its first snapshot, nearly.
            first = next(state[name] for state in states if name in state)
            dtype = torch.promote_types(first.dtype, torch.float32)
            result[name] = mean_tensor([state.get(name, first) for state in states], factors, dtype)
        yield result


def check_length(name: str, sigma_rel: float) -> None:
    """Raise unless a number is the relative length of a power-function average."""
    check_range(name, sigma_rel, 0.0, LONGEST, below=True)
    if sigma_rel == 0:
        raise ValueError(f"{name} must be above 0, got {sigma_rel}.")


def _factors(used: Sequence[Snapshot], sigma_rel: float) -> list[float]:
    """The factors of the snapshots in an average of a length that ends with the last of them."""
    steps, lengths = [snapshot.step for snapshot in used], [snapshot.sigma_rel for snapshot in used]
    factors, error = combination(steps, lengths, steps[-1], sigma_rel)
    if error > _TOLERANCE:
        raise ValueError(
            f"sigma_rel={sigma_rel} is a length that the {len(used)} snapshots up to step {steps[-1]} cannot give: the"
            f" nearest combination of them is another average, by {error:.0%}. Choose a length nearer to"
            f" {', '.join(map(str, sorted(set(lengths))))}, or save more snapshots, PostHocEMA(every_n_steps=...)."
        )
    return factors.tolist()


def _snapshots_until(folder: Path, step: int | None) -> list[Snapshot]:
    """The snapshots of the newest run in a folder, up to a step that has one."""
    runs = sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    found = next((found for run in (folder, *reversed(runs)) if (found := snapshots_in(run))), [])
    if not found:
        raise FileNotFoundError(f"There are no snapshots of PostHocEMA in {folder}.")
    if step is None:
        return found
    check_count("step", step)
    steps = sorted({snapshot.step for snapshot in found})
    if step not in steps:
        near = ", ".join(map(str, sorted(sorted(steps, key=lambda other: abs(other - step))[:4])))
        raise FileNotFoundError(f"{found[0].path.parent} has no snapshot of step {step}; near it are {near}.")
    return [snapshot for snapshot in found if snapshot.step <= step]


def _state_of(checkpoint: dict[str, Any], path: Path) -> dict[str, Tensor]:
    state: Any = checkpoint.get("state_dict")
    averaged: Any = checkpoint.get("averaged")
    tensors = isinstance(state, dict) and all(isinstance(value, Tensor) for value in state.values())
    if not (tensors and isinstance(averaged, list) and all(name in state for name in averaged)):
        raise ValueError(f"{path} is no snapshot of PostHocEMA.")
    return state
