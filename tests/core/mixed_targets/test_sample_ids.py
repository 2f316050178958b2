"""The entries of a result keep their samples, are moved with them, or it is not clear; losses are in test_losses.py."""

from __future__ import annotations

import pytest
import torch

from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.losses import sample_ids_of

SAMPLES, LABELS = torch.arange(3), torch.tensor([[1, 2], [3, 4], [5, 6]])


def follow(func, *rest, moved=True, argument=LABELS, **kwargs):
    result = func(argument, *rest, **kwargs)
    return sample_ids_of(func, [((argument, *rest), kwargs)], [result], [(SAMPLES, argument.ndim)], moved)


@pytest.mark.parametrize(
    ("func", "rest", "expected"),
    [
        (torch.Tensor.flatten, (), [0, 0, 1, 1, 2, 2]),
        (torch.Tensor.view, (-1,), [0, 0, 1, 1, 2, 2]),
        (torch.Tensor.flip, ((0,),), [2, 1, 0]),
        (torch.Tensor.__getitem__, (torch.tensor([2, 0]),), [2, 0]),
        (torch.Tensor.__getitem__, ((slice(None), 1),), [0, 1, 2]),
        (torch.Tensor.t, (), None),
        (torch.Tensor.reshape, (2, 3), None),
    ],
)
def test_owners_are_moved_with_the_entries(func, rest, expected):
    found = follow(func, *rest)
    assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("shape", "times"),
    [((-1,), 4), ((3, 4), 1), ((6, 2), 2), ((12, 1), 4), ((3, 2, 2), 1), ((2, 6), None), ((1, 12), None)],
)
def test_owners_of_a_reshaped_tensor_are_known_without_a_look_at_them(shape, times):
    plan = LossPlan(torch.ones(3))
    labels, ids = torch.arange(12).view(3, 4), plan.number_samples(3, torch.device("cpu"))
    for before, known in (
        (labels, ids),
        (labels.flatten(), plan.repeated_ids(4)),
        (labels.view(6, 2), plan.repeated_ids(2)),
    ):
        result = before.reshape(shape)
        call = [((before, shape), {})]
        looked = sample_ids_of(torch.Tensor.reshape, call, [result], [(known.clone(), before.ndim)], True, plan)
        found = sample_ids_of(torch.Tensor.reshape, call, [result], [(known, before.ndim)], True, plan)
        assert (None if found is None else found.tolist()) == (None if looked is None else looked.tolist())
        assert found is (None if times is None else plan.repeated_ids(times))


def test_owners_are_kept_entry_by_entry_but_not_through_broadcasting_or_an_order():
    assert follow(torch.add, 1, moved=False).tolist() == [0, 1, 2]
    assert follow(torch.mul, torch.ones(3, 3, 2), moved=False) is None
    assert follow(torch.matmul, torch.ones(2, 2, dtype=torch.long), moved=False) is None


def test_branches_that_are_moved_apart_belong_to_nobody():
    masks = [torch.tensor([True, True, False]), torch.tensor([False, True, True])]
    calls = [((LABELS, mask), {}) for mask in masks]
    results = [LABELS[mask] for mask in masks]
    assert sample_ids_of(torch.Tensor.__getitem__, calls, results, [(SAMPLES, 2)], True) is None
