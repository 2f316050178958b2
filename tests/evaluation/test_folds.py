"""Folds: those of scikit-learn, checked; a plan that tells other ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from sklearn.model_selection import GroupKFold, KFold, LeaveOneOut, PredefinedSplit, StratifiedKFold, TimeSeriesSplit

from lightning_tricks.evaluation.folds import fingerprint, make_folds
from lightning_tricks.evaluation.plan import require_plan

TARGETS = [i % 3 for i in range(20)]
GROUPS = ["abcde"[i // 4] for i in range(20)]


@pytest.mark.parametrize(
    ("splitter", "same"),
    [
        (4, KFold(4, shuffle=True, random_state=7)),
        (StratifiedKFold(3), StratifiedKFold(3)),
        (GroupKFold(3), GroupKFold(3)),
        (TimeSeriesSplit(3), TimeSeriesSplit(3)),
        (LeaveOneOut(), LeaveOneOut()),
        (PredefinedSplit(TARGETS), PredefinedSplit(TARGETS)),
    ],
)
@pytest.mark.parametrize("kind", [list, numpy.array])
def test_folds_are_those_of_sklearn(splitter: Any, same: Any, kind: Any) -> None:
    groups = kind(GROUPS) if isinstance(splitter, GroupKFold) else None
    found = make_folds(splitter, 20, kind(TARGETS), groups, seed=7)
    expected = same.split(numpy.zeros((20, 1)), TARGETS, GROUPS if groups is not None else None)
    assert found == [(train.tolist(), validation.tolist()) for train, validation in expected]


def test_a_splitter_without_random_state_follows_the_seed_and_leaves_the_callers_numbers() -> None:
    numpy.random.seed(1)
    expected = numpy.random.rand()
    numpy.random.seed(1)
    first, again, other = (make_folds(KFold(3, shuffle=True), 20, seed=seed) for seed in (0, 0, 1))
    assert numpy.random.rand() == expected
    assert first == again != other
    assert make_folds(3, 20) != make_folds(3, 20, seed=1)


class Given:
    def __init__(self, *folds: tuple[list[int], list[int]]) -> None:
        self.folds = folds

    def split(self, x: Any, y: Any = None, groups: Any = None) -> Any:
        return iter(self.folds)


@pytest.mark.parametrize(
    ("fold", "message"),
    [
        (([0, 1, 2], [2, 3]), "fold 1 of splitter trains with samples that it validates, as 2"),
        (([], [2, 3]), "fold 1 of splitter has 0 samples to train with and 2 to validate"),
        (([0, 1], []), "2 samples to train with and 0 to validate"),
        (([0, 1], [4]), "samples from 0 to 4, the data set has 4"),
        (([0, -1], [2]), "samples from -1 to 2"),
        (([0, 1], [2, 2]), "validates a sample twice"),
    ],
)
def test_wrong_folds_are_refused(fold: tuple[list[int], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_folds(Given(([0, 1], [2, 3]), fold), 4)


def test_equal_values_have_the_same_fingerprint() -> None:
    same = {
        fingerprint(each)
        for each in (TARGETS, numpy.array(TARGETS), torch.tensor(TARGETS), list(torch.tensor(TARGETS)))
    }
    assert len(same) == 1
    assert fingerprint(TARGETS[1:]) not in same
    assert fingerprint(GROUPS) == fingerprint(tuple(GROUPS))
    assert fingerprint(None) is None


def test_a_plan_is_written_once_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "folds.json"
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    require_plan(file, {"seed": 1}, "fold.*")
    assert not file.exists()
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    plan: dict[str, Any] = {"seed": 1, "net": {"lr": 0.1, "sizes": (1, 2)}, "left": None}
    require_plan(file, plan, "fold.*")
    assert json.loads(file.read_text())["net"] == {"lr": 0.1, "sizes": [1, 2]}
    require_plan(file, plan, "fold.*")
    with pytest.raises(ValueError, match=r"settings: seed was 1, now 2; net: lr was 0.1, now None; new was None, now"):
        require_plan(file, {"seed": 2, "net": {"sizes": [1, 2]}, "new": "it"}, "fold.*")
