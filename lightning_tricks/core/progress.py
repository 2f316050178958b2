"""Progress bars for long work."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tqdm import tqdm


def progress(items: Iterable[Any] | None, what: str, total: int | None = None) -> Any:
    """A bar over items, or one to be updated; on a terminal and on rank zero only, and gone afterwards.

    >>> list(progress([1, 2], "counting"))
    [1, 2]
    """
    return tqdm(items, what, total, leave=False, disable=True if rank_zero_only.rank else None)
