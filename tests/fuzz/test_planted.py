"""Silent faults that there were, planted again: random modules find each of them, and find none without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from lightning_tricks.core.replay import undone_fit
from lightning_tricks.core.replay.module_state import ModuleState
from tests import mutants
from tests.fuzz import by_hand
from tests.fuzz.labels import Second
from tests.fuzz.modules import Spec, specs
from tests.fuzz.padded import Padded
from tests.fuzz.profiles import drawn
from tests.fuzz.runs import accepted
from tests.fuzz.twins import twins
from tests.fuzz.writes import Write

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do


def first_that_fails(functions: Any) -> None:
    for function in functions:
        function()


def torchscript_fails(self: Any, restore: Any = ModuleState.restore) -> None:
    restore(self)
    if any(hasattr(module, "_c") for module in self._module.modules()):
        raise AttributeError("'RecursiveScriptModule' object has no attribute")


@dataclass(frozen=True)
class Fault:
    """A fault that there was.

    Args:
        check: What finds it, of a module; False if a trick refuses the module.
        known: A module that shows it.
        planted: Places and what they were like, by which it is there again, if it is none of the mutants.
    """

    check: Callable[[Spec], bool]
    known: Spec
    planted: tuple[tuple[Any, str, Any], ...] = ()


DRAWS = Spec(hooks=("on_train_start draws weights once",))

FAULTS = {
    "a second run writes weights again": Fault(
        lambda spec: accepted(spec, "SAMMixin"), Spec(writes=(Write("teacher"),))
    ),
    "an average begins before on_train_start": Fault(
        partial(twins, name="EMA", twin="weights that are there from the first"), DRAWS
    ),
    "integers that choose are no labels": Fault(by_hand.mixes, Spec(second=Second("gather", named="first"))),
    "raw weights are those of the file": Fault(
        partial(twins, name="EMA", twin="a class that has not changed"), Spec(migration="reshaped", trainer="resumes")
    ),
    "a sweep leaves weights trained where restoring fails": Fault(
        lambda spec: accepted(spec, "find_lr"),
        Spec(net="scripted"),
        ((undone_fit, "run_all", first_that_fails), (ModuleState, "restore", torchscript_fails)),
    ),
    "BatchNorm in TorchScript is not recalculated": Fault(
        partial(twins, name="SWA", twin="layers without TorchScript"), Spec(net="scripted with BatchNorm")
    ),
    "a plateau waits for an epoch that never ends": Fault(
        by_hand.reduces, Spec(trainer="validates and ends amid an epoch")
    ),
    "long sequences are harder": Fault(by_hand.keeps_hardest, Spec(padded=Padded("masked mean"))),
    "Muon trains the rest at a tenth of the rate": Fault(by_hand.steps_as_muon, Spec()),
}


def plant(name: str, patch: pytest.MonkeyPatch) -> None:
    for owner, attribute, value in FAULTS[name].planted:
        patch.setattr(owner, attribute, value)  # raises where there is no such name any more
    if not FAULTS[name].planted:
        mutants.plant(name, patch)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows_in_a_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.check(fault.known)
    plant(name, monkeypatch)
    with pytest.raises(AssertionError):
        fault.check(fault.known)


@cache
def modules() -> list[Spec]:
    return drawn(specs(), 200, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    plant(name, monkeypatch)
    for number, spec in enumerate(modules()):
        try:
            fault.check(spec)
        except AssertionError:
            monkeypatch.undo()
            fault.check(spec)  # which finds nothing without the fault
            print(f"{name}: found by module {number}, {spec}")
            return
    raise AssertionError(f"200 modules have not found that {name}")
