"""The list of mutants is of the sources and the tests that there are; ``make mutants`` shows that each is killed."""

from __future__ import annotations

import pytest

from lightning_tricks.callbacks.ema import ema_decay
from lightning_tricks.core.lightning.fit import Place
from tests.mutants import MUTANTS, has_test, mutated, plant


@pytest.mark.few(26)
@pytest.mark.parametrize("name", MUTANTS)
def test_what_it_replaces_stands_there_once_and_its_test_exists(name: str) -> None:
    compile(mutated(MUTANTS[name]), MUTANTS[name].file, "exec")
    assert has_test(MUTANTS[name].test), MUTANTS[name].test


def test_there_are_many_and_they_are_different() -> None:
    assert len({mutant[:3] for mutant in MUTANTS.values()}) == len(MUTANTS) >= 40


def test_one_is_planted_in_this_process_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(taken=3, step=5)
    plant("the warm-up of EMA is another", monkeypatch)
    plant("the plan from epoch 0 stands for what happened", monkeypatch)
    assert (ema_decay(0, 0.9), place.offset) == (1 / 9, 0)
    monkeypatch.undo()
    assert (ema_decay(0, 0.9), place.offset) == (1 / 10, 2)
