"""A compiled network trains, with a trick, what the same network trains eagerly."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.runs import Compiled, run
from tests.conformance.settings import SETTINGS
from tests.nets import PlainNet, assert_close

QUICK = ("EMA", "Mixup", "SAMMixin", "SkipNonFinite", "cosine")  # one of each mechanism


# torch's compiler looks at it where a hook interrupts a network
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS]
)
def test_a_compiled_network_gives_the_same(name: str, cell: Callable[..., None]) -> None:
    eager, compiled = run(SETTINGS[name], base=PlainNet), run(SETTINGS[name], base=Compiled)
    assert_close({key: compiled[key] for key in eager}, eager)
    cell(name, "compile")
