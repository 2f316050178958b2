"""A run that is stopped, fitted again and resumed elsewhere trains as a plain loop that lives the same life."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, seed

from tests.fuzz.lives import Life, lives, require_same
from tests.fuzz.profiles import cases, drawn
from tests.mutants import plant

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about what is done to the run


def many(number: int, part: int) -> None:
    @seed(part)
    @cases(number, print_blob=False)
    @given(life=lives())
    def test(life: Life) -> None:
        with TemporaryDirectory() as folder:
            require_same(life, Path(folder))

    test()


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(16))
def test_a_life_is_that_of_the_plain_loop(part: int) -> None:
    many(10, part)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100, 150))
def test_more_lives_are_those_of_the_plain_loop(part: int) -> None:
    many(100, part)


# -- faults that there were, planted again: lives find each of them ---------------------------------------------------

FAULTS = (
    "the plan from epoch 0 stands for what happened",
    "what is left stands for the whole plan",
    "Lightning's counts of batches and epochs stay as they are",
    "a checkpoint does not hold the plan",
    "an average is not restored",
    "an interrupted fit leaves the average in the module",
    "averages of several lengths are not restored",
    "the step before an exception is not averaged",
    "a history is not restored",
    "a size grows by the real step",
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    for life in drawn(lives(), 200, 0):
        with TemporaryDirectory() as folder:
            try:
                require_same(life, Path(folder))
            except Exception:
                return
    raise AssertionError(f"200 lives have not found that {fault}")
