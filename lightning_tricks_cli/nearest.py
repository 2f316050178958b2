"""Suggestions for misspelt words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A question to append to an error message, with the nearest name or two that are as near; or nothing.

    >>> did_you_mean("emaa", ["EMA", "SWA"])
    " Did you mean 'EMA'?"
    >>> did_you_mean("epochs", ["max_epochs", "min_epochs", "devices"])
    " Did you mean 'min_epochs' or 'max_epochs'?"
    """
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(word.lower(), by_lower, n=2)
    ratios = [difflib.SequenceMatcher(None, name, word.lower()).ratio() for name in near]
    best = [repr(by_lower[name]) for name, ratio in zip(near, ratios, strict=True) if ratio == max(ratios)]
    return f" Did you mean {' or '.join(best)}?" if best else ""
