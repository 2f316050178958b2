"""Random modules with two tricks at once, and with tricks at work: trained rightly, or refused before a step."""

from __future__ import annotations

import pytest

from tests.fuzz.modules import specs
from tests.fuzz.profiles import drawn
from tests.fuzz.runs import accepted, repeated
from tests.fuzz.tricks import AT_WORK, SWEEP, TRICKS

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do

OFF = [name for name, trick in TRICKS.items() if trick is not SWEEP]


@pytest.mark.parametrize(
    "name", [name if name == "EMA" else pytest.param(name, marks=pytest.mark.slow) for name in OFF]
)
def test_a_trick_beside_each_other_one_changes_nothing_or_is_refused_in_time(name: str) -> None:
    others = [other for other in OFF if not (other == name or (TRICKS[other].sam and TRICKS[name].sam))]
    modules = drawn(specs(), len(others), OFF.index(name))
    found = [accepted(spec, name, other) for spec, other in zip(modules, others, strict=True)]
    assert sum(found) >= len(found) / 20, f"{name} was accepted beside {sum(found)} of {len(found)} tricks"


def work(name: str, modules: int) -> None:
    found = [repeated(spec, name) for spec in drawn(specs(), modules, sorted(AT_WORK).index(name))]
    assert sum(found) >= modules / 10, f"{name} was accepted by {sum(found)} of {len(found)} modules"


@pytest.mark.parametrize("name", AT_WORK)
def test_a_trick_at_work_trains_twice_the_same_or_is_refused_in_time(name: str) -> None:
    work(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_WORK)
def test_a_trick_at_work_trains_many_more_modules_twice_the_same_or_is_refused_in_time(name: str) -> None:
    work(name, 60)
