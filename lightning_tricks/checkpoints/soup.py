"""Greedy model soups: averages of the checkpoints that improve a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from lightning_tricks.checkpoints.average import average_checkpoints, list_paths, mean_state, states_of_one_model
from lightning_tricks.checkpoints.files import PathLike, check_output, load
from lightning_tricks.core.checks import check_choice, some
from lightning_tricks.core.report import progress

__all__ = ["greedy_soup"]


def greedy_soup(
    paths: Iterable[PathLike],
    evaluate: Callable[[dict[str, Any]], float],
    output: PathLike,
    *,
    mode: Literal["max", "min"] = "max",
    force: bool = False,
) -> list[Path]:
    """Average checkpoints greedily: add x to the soup S if ``score(mean(S + x)) >= score(mean(S))``.

    Every checkpoint is tried once, in the order of their own scores, the best first. They must have one architecture.
    Averaging only helps with checkpoints from the same initial weights, such as fine-tuning runs of one model with
    different hyperparameters.

    Every scored state is averaged from the memory-mapped files, bit for bit as it would be written. Besides what
    ``evaluate`` needs, only one model's weights are in memory. A score of NaN counts as the worst.

    Args:
        paths: The files, as for ``average_checkpoints``, without repetition.
        evaluate: A function that returns the score of a ``state_dict`` on held-out data. It may keep or change the
            tensors. It is called once for each file, then once for each file except the best.
        output: The file to write, as for ``average_checkpoints``.
        mode: "max" if the highest score is the best, "min" if the lowest is.
        force: Whether ``output`` may replace a file.

    Returns:
        The files in the average, the best first.

    Raises:
        ValueError: If a file is given twice, or no file has a finite score; also as ``average_checkpoints``.
        TypeError: If ``evaluate`` does not return a number.
        OSError: As ``average_checkpoints``.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = [f"{folder}/{value}.pt" for value in (1, 4, -9)]
        ...     for file, value in zip(files, (1.0, 4.0, -9.0)):
        ...         torch.save({"x": torch.tensor(value)}, file)
        ...     chosen = greedy_soup(files, lambda state: abs(state["x"].item() - 2), f"{folder}/soup.pt", mode="min")
        ...     [file.name for file in chosen], torch.load(f"{folder}/soup.pt")
        (['1.pt', '4.pt'], {'x': tensor(2.5000)})

    References:
        Model soups: Wortsman et al. 2022, arXiv 2203.05482, recipe 1.
    """
    check_choice("mode", mode, ("max", "min"))
    files = list_paths(paths)
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError(f"paths must name each file once, got {some(map(str, files))}.")
    target = check_output(output, force=force)
    states = dict(zip(files, states_of_one_model([load(file) for file in files], files), strict=True))

    def score(soup: list[Path]) -> float:
        """The score of a soup; higher is better in both modes."""
        value = float(evaluate(mean_state([states[file] for file in soup], [1.0] * len(soup))))
        if math.isnan(value):
            return -math.inf
        return value if mode == "max" else -value

    scores = {file: score([file]) for file in progress(files, "scoring checkpoints")}
    first, *others = sorted(files, key=lambda file: -scores[file])
    soup, best = [first], scores[first]
    if best == -math.inf:
        raise ValueError("evaluate must return a finite score for at least one file, got none.")
    for file in progress(others, "scoring soups"):
        candidate = score([*soup, file])
        if candidate >= best:
            soup, best = [*soup, file], candidate
    average_checkpoints(soup, target, force=force)
    return soup
