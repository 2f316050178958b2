"""A run that is stopped, fitted again and resumed elsewhere trains as a plain loop that lives the same life."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, seed

import lightning_tricks as lt
from lightning_tricks.core.batches import growing
from lightning_tricks.core.lightning.fit import Fit, Place
from lightning_tricks.core.lightning.steps import Plan
from lightning_tricks.core.trick import Trick
from tests.fuzz.lives import Life, lives, require_same
from tests.fuzz.profiles import cases, drawn

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about what is done to the run


def many(number: int, part: int) -> None:
    @seed(part)
    @cases(number, print_blob=False)
    @given(life=lives())
    def test(life: Life) -> None:
        with TemporaryDirectory() as folder:
            require_same(life, Path(folder))

    test()


@pytest.mark.parametrize("part", range(8))
def test_a_life_is_that_of_the_plain_loop(part: int) -> None:
    many(25, part)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100, 150))
def test_more_lives_are_those_of_the_plain_loop(part: int) -> None:
    many(100, part)


# -- faults that there were, planted again: lives find each of them ---------------------------------------------------

FAULTS: dict[str, tuple[Any, str, Any]] = {
    "the plan from epoch 0 stands for what happened": (Place, "offset", property(lambda self: 0)),
    "what is left stands for the whole plan": (
        Plan, "placed", lambda self, *at, placed=Plan.placed: (max(1, placed(self, *at)[0] - at[2]), 0),
    ),
    "Lightning's counts of batches and epochs stay as they are": (Fit, "_mend_progress", lambda self, before: None),
    "a checkpoint does not hold the plan": (
        Fit, "state_dict", lambda self, whole=Fit.state_dict: whole(Fit(self._trainer)),
    ),
    "an average is not restored": (lt.EMA, "on_load_checkpoint", lambda *_: None),
    "an interrupted fit leaves the average in the module": (lt.EMA, "_on_failure", lambda *_: None),
    "averages of several lengths are not restored": (lt.PostHocEMA, "on_load_checkpoint", lambda *_: None),
    "the step before an exception is not averaged": (lt.PostHocEMA, "_on_failure", Trick._on_failure),
    "a history is not restored": (lt.AutoClip, "load_state_dict", lambda *_: None),
    "a size grows by the real step": (growing, "plan_step", lambda trainer: trainer.global_step),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, value = FAULTS[fault]
    monkeypatch.setattr(owner, name, value)
    for life in drawn(lives(), 200, 0):
        with TemporaryDirectory() as folder:
            try:
                require_same(life, Path(folder))
            except Exception:
                return
    raise AssertionError(f"200 lives have not found that {fault}")
