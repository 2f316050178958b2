"""Random modules with tricks at work, and with two tricks at once: trained rightly, or refused before a step."""

from __future__ import annotations

import pytest

from tests.fuzz.modules import specs
from tests.fuzz.profiles import drawn, modules
from tests.fuzz.runs import accepted, beside, repeated
from tests.fuzz.tricks import AT_WORK, TRICKS, kind

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do

# These change batches, by numbers that they draw one after the other.
OF_BATCHES = ("BatchTransform", "CutMix", "HiddenMixup", "Mixup", "ProgressiveResizing", "SequenceLengthWarmup")

APART = {("LayerFreezing", "LoRA")}  # the layer that it freezes is frozen beside LoRA, but for its adapters


@pytest.mark.few(5)
@pytest.mark.parametrize("name", AT_WORK)
def test_a_trick_at_work_trains_the_same_again_or_is_refused_in_time(name: str) -> None:
    again(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_WORK)
def test_a_trick_at_work_trains_many_more_modules_the_same_again_or_is_refused_in_time(name: str) -> None:
    again(name, modules(60))


def again(name: str, number: int) -> None:
    found = [repeated(spec, name) for spec in drawn(specs(), number, [*AT_WORK].index(name))]
    assert sum(found) >= number // 10, f"{name} was accepted by {sum(found)} of {number} modules"


@pytest.mark.slow
def test_a_trick_at_its_limit_beside_others_changes_nothing_or_is_refused_in_time() -> None:
    beside_others("EMA", 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_at_its_limit_beside_each_other_one_changes_nothing_or_is_refused_in_time(name: str) -> None:
    beside_others(name, 1)


def beside_others(name: str, every: int) -> None:
    others = [other for other in TRICKS if other != name and not (TRICKS[other].sam and TRICKS[name].sam)]
    others = [other for other in others if {kind(other), kind(name)} != {"FitsMemory"}]  # Lightning refuses two
    modules = drawn(specs(), len(others), [*TRICKS].index(name))
    pairs = list(zip(modules, others, strict=True))[::every]
    found = [accepted(spec, name, other) for spec, other in pairs]
    assert sum(found) >= len(found) / 20, f"{name} was accepted beside {sum(found)} of {len(found)} tricks"


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_WORK)
def test_a_trick_at_work_beside_each_other_one_trains_as_alone_or_is_refused_in_time(name: str) -> None:
    others = [other for other in TRICKS if kind(other) != kind(name) and not (TRICKS[other].sam and AT_WORK[name].sam)]
    others = [other for other in others if kind(name) not in OF_BATCHES or kind(other) not in OF_BATCHES]
    others = [other for other in others if (kind(name), kind(other)) not in APART]
    modules = drawn(specs(), len(others), [*AT_WORK].index(name))
    found = [beside(spec, name, other) for spec, other in zip(modules, others, strict=True)]
    assert sum(found) >= len(found) / 20, f"{name} was accepted beside {sum(found)} of {len(found)} tricks"
