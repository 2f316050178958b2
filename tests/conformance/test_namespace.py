"""With a ``pytorch_lightning.Trainer`` a trick does something, unless it is to be neutral."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conformance.settings import NAMES
from tests.pytorch_lightning.test_conformance import SUITE, run_slice
from tests.ranks import run_alone

TEST = f"{SUITE}/test_no_op.py::test_the_trick_does_something_unless_it_is_to_be_neutral"


@pytest.fixture(scope="module")
def passed(selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tests that passed with that namespace, in a process of its own."""
    return run_alone(run_slice, str(tmp_path_factory.mktemp("pl")), [f"{TEST}[{name}]" for name in selected("name")])


@pytest.mark.parametrize("name", NAMES)
def test_it_works_in_the_other_namespace(name: str, passed: list[str], cell: Callable[..., None]) -> None:
    assert f"{TEST}[{name}] pytorch_lightning" in passed
    cell(name, "namespace")
