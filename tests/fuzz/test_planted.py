"""Silent faults that there were, planted again: random modules find each of them, and find none without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from lightning_tricks.core.averaging import batchnorm
from lightning_tricks.core.averaging.callback import AveragingCallback
from lightning_tricks.core.averaging.coordinator import Coordinator
from lightning_tricks.core.lightning.fit import plan_step
from lightning_tricks.core.mixed_targets import unmixed
from lightning_tricks.core.mixed_targets.scores import SampleScores
from lightning_tricks.core.replay import undone_fit
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.optimizers import by_name
from lightning_tricks.schedules import plateau
from tests.fuzz import by_hand
from tests.fuzz.labels import Second
from tests.fuzz.modules import Spec, specs
from tests.fuzz.padded import Padded
from tests.fuzz.profiles import drawn
from tests.fuzz.runs import accepted
from tests.fuzz.twins import twins
from tests.fuzz.writes import Write

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do


def begins_early(self: Any, trainer: Any, module: Any, start: Any = AveragingCallback.on_train_start) -> None:
    start(self, trainer, module)
    if plan_step(trainer) >= self._steps["start"]:
        self._track()


def first_that_fails(functions: Any) -> None:
    for function in functions:
        function()


def torchscript_fails(self: Any, restore: Any = ModuleState.restore) -> None:
    restore(self)
    if any(hasattr(module, "_c") for module in self._module.modules()):
        raise AttributeError("'RecursiveScriptModule' object has no attribute")


def never_a_mean(self: Any, divisor: Any) -> None:
    self.values.copy_(
        self._sum if not hasattr(divisor, "dtype") and divisor == 1 else self._sum * (self._samples / divisor)
    )


def a_tenth(row: Any, module: Any, groups: Any, lr: float, settings: Any, make: Any = by_name._muon_groups) -> Any:
    settings.setdefault("adamw_lr", lr / 10)
    return make(row, module, groups, lr, settings)


@dataclass(frozen=True)
class Fault:
    """A fault that there was.

    Args:
        planted: Places and what they were like, by which it is there again.
        check: What finds it, of a module; False if a trick refuses the module.
        known: A module that shows it.
    """

    planted: list[tuple[Any, str, Any]]
    check: Callable[[Spec], bool]
    known: Spec


DRAWS = Spec(hooks=("on_train_start draws weights once",))

FAULTS = {
    "a second run writes weights again": Fault(
        [(ModuleState, "_note_weight", lambda *_: None)],
        lambda spec: accepted(spec, "SAMMixin"),
        Spec(writes=(Write("teacher"),)),
    ),
    "an average begins before on_train_start": Fault(
        [(AveragingCallback, "on_train_start", begins_early)],
        partial(twins, name="EMA", twin="weights that are there from the first"),
        DRAWS,
    ),
    "integers that choose are no labels": Fault(
        [(unmixed, "_is_chosen", lambda *_: False)],
        by_hand.mixes,
        Spec(second=Second("gather", named="first")),
    ),
    "raw weights are those of the file": Fault(
        [(Coordinator, "_note_file", lambda self, module, hook, checkpoint: hook(checkpoint))],
        partial(twins, name="EMA", twin="a class that has not changed"),
        Spec(migration="reshaped", trainer="resumes"),
    ),
    "a sweep leaves weights trained where restoring fails": Fault(
        [(undone_fit, "run_all", first_that_fails), (ModuleState, "restore", torchscript_fails)],
        lambda spec: accepted(spec, "find_lr"),
        Spec(net="scripted"),
    ),
    "BatchNorm in TorchScript is not recalculated": Fault(
        [(batchnorm, "scripted_batchnorm", lambda module: {})],
        partial(twins, name="SWA", twin="layers without TorchScript"),
        Spec(net="scripted with BatchNorm"),
    ),
    "a plateau waits for an epoch that never ends": Fault(
        [(plateau, "_occasions", lambda trainer, monitor: ("epoch", 1))],
        by_hand.reduces,
        Spec(trainer="validates and ends amid an epoch"),
    ),
    "long sequences are harder": Fault(
        [(SampleScores, "note", never_a_mean)],
        by_hand.keeps_hardest,
        Spec(padded=Padded("masked mean")),
    ),
    "Muon trains the rest at a tenth of the rate": Fault(
        [(by_name, "_muon_groups", a_tenth)], by_hand.steps_as_muon, Spec()
    ),
}


def plant(fault: Fault, patch: pytest.MonkeyPatch) -> None:
    for owner, name, value in fault.planted:
        patch.setattr(owner, name, value)  # raises where there is no such name any more


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows_in_a_module(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    fault.check(fault.known)
    plant(fault, monkeypatch)
    with pytest.raises(AssertionError):
        fault.check(fault.known)


@cache
def modules() -> list[Spec]:
    return drawn(specs(), 200, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    plant(fault, monkeypatch)
    for number, spec in enumerate(modules()):
        try:
            fault.check(spec)
        except AssertionError:
            monkeypatch.undo()
            fault.check(spec)  # which finds nothing without the fault
            print(f"{name}: found by module {number}, {spec}")
            return
    raise AssertionError(f"200 modules have not found that {name}")
