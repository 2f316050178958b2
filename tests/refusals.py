"""Tables of arguments that are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Case = tuple[type[Exception], dict[str, Any], str]  # an error, the arguments that raise it, and what it says


def assert_refused(call: Callable[..., Any], cases: Iterable[Case]) -> None:
    """Each of the arguments raises its error."""
    for error, arguments, message in cases:
        with pytest.raises(error, match=message):
            call(**arguments)
            pytest.fail(f"took {arguments}")
