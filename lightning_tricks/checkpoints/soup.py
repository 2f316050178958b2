"""Greedy model soups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from lightning_tricks.checkpoints.average import average_checkpoints, listed, mean, states
from lightning_tricks.checkpoints.files import PathLike, check_output, load
from lightning_tricks.core.checks import check_choice
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
    """Average those checkpoints whose average scores best: keep S + x if ``score(mean(S + x)) >= score(mean(S))``.

    The checkpoints are tried in the order of their own scores, the best first, each once. They are of one architecture
    and, to be worth averaging, from the same initial weights: runs of one fine-tuning with other hyperparameters, say.

    Each state that is scored is averaged from the mapped files anew: it is bit for bit what would be written, and no
    more than one model's weights are in memory besides what ``evaluate`` needs. A score of NaN counts as the worst.

    Args:
        paths: The files, as for ``average_checkpoints``; each once.
        evaluate: Gives the score of a ``state_dict`` on held-out data; it may keep or change the tensors. It is called
            once for each file, then once for each but the best.
        output: The file to write, as for ``average_checkpoints``.
        mode: Whether the highest or the lowest score is the best.
        force: Whether ``output`` may replace a file.

    Returns:
        The files averaged, the best first.

    Raises:
        ValueError: If a file is given twice, or no file has a score; and as ``average_checkpoints``.
        TypeError: If ``evaluate`` gives no number.
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
    files = listed(paths)
    if len({file.resolve() for file in files}) < len(files):
        raise ValueError("paths must name each file once: a soup takes it or leaves it.")
    target = check_output(output, force=force)  # before hours of evaluation, not after
    loaded = dict(zip(files, states([load(file) for file in files], files), strict=True))

    def score(chosen: list[Path]) -> float:
        found = float(evaluate(mean([loaded[file] for file in chosen], [1.0] * len(chosen))))
        return -math.inf if math.isnan(found) else found if mode == "max" else -found

    scores = {file: score([file]) for file in progress(files, "scoring checkpoints")}
    first, *others = sorted(files, key=lambda file: -scores[file])
    chosen, best = [first], scores[first]
    if best == -math.inf:
        raise ValueError("evaluate gave no finite score for any of the files.")
    for file in progress(others, "scoring soups"):
        found = score([*chosen, file])
        if found >= best:
            chosen, best = [*chosen, file], found
    average_checkpoints(chosen, target, force=force)
    return chosen
