"""Random modules with tricks at work do what is computed by hand, or are refused in time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.fuzz import by_hand
from tests.fuzz.modules import Spec, specs
from tests.fuzz.profiles import drawn

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do

CHECKS: dict[str, tuple[Callable[[Spec], bool], tuple[str, ...]]] = {  # with what all of its modules have
    "Mixup": (by_hand.mixes, ("labels",)),
    "HiddenMixup": (partial(by_hand.mixes, name="HiddenMixup"), ("labels",)),
    "HardExampleFilter": (by_hand.keeps_hardest, ("padding",)),
    "HardExampleFilter without padding": (by_hand.keeps_hardest, ()),
    "Muon": (by_hand.steps_as_muon, ()),
    "reduce_on_plateau": (by_hand.reduces, ("validation",)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CHECKS)
def test_a_trick_does_what_is_computed_by_hand(name: str) -> None:
    checked(name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_a_trick_does_with_many_more_modules_what_is_computed_by_hand(name: str) -> None:
    checked(name, 200)


def checked(name: str, modules: int) -> None:
    check, dimensions = CHECKS[name]
    found = [check(spec) for spec in drawn(specs(*dimensions), modules, [*CHECKS].index(name))]
    assert sum(found) >= modules // 20, f"{name} was accepted by {sum(found)} of {modules} modules"
