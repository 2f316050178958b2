"""Suggestions for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A question to append to an error message, or nothing if no name is similar to the word.

    >>> did_you_mean("emaa", ["EMA", "SWA"])
    " Did you mean 'EMA'?"
    """
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""
