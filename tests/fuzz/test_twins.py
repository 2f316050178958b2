"""Random modules with tricks at work train as their twins do, or are refused in time."""

from __future__ import annotations

import pytest

from tests.fuzz.modules import specs
from tests.fuzz.profiles import drawn
from tests.fuzz.tricks import AT_WORK
from tests.fuzz.twins import TWINS, twins

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do

DIMENSIONS = dict(zip(TWINS, ("first weights", "TorchScript", "migrations"), strict=True))
QUICK = ("EMA", "SWA", "ScheduleFree", "SAMMixin")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("twin", TWINS)
def test_a_module_trains_as_its_twin(twin: str, name: str) -> None:
    trained(name, twin, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_WORK)
@pytest.mark.parametrize("twin", TWINS)
def test_many_more_modules_train_as_their_twins(twin: str, name: str) -> None:
    trained(name, twin, 30)


def trained(name: str, twin: str, modules: int) -> None:
    found = [twins(spec, name, twin) for spec in drawn(specs(DIMENSIONS[twin]), modules, [*AT_WORK].index(name))]
    assert sum(found) >= len(found) / 20, f"{name} was accepted by {sum(found)} of {len(found)} modules"
