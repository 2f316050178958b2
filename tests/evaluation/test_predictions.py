"""Predictions put together: against a loop over samples."""

from __future__ import annotations

import random

import pytest
import torch

from lightning_tricks.evaluation.predictions import combine, in_order, joined, out_of_fold, require_mean


@pytest.mark.parametrize("seed", range(20))
def test_each_sample_has_the_mean_of_its_predictions(seed: int) -> None:
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    samples = numbers.randint(1, 9)
    every = [(numbers.sample(range(samples), numbers.randint(1, samples))) for _ in range(numbers.randint(1, 4))]
    folds = [(fold, {"a": torch.randn(len(fold), 2), "b": [torch.randn(len(fold)).bfloat16()]}) for fold in every]
    found = out_of_fold(folds, samples)
    assert found["b"][0].dtype == torch.bfloat16
    for sample in range(samples):
        rows = [outputs["a"][fold.index(sample)] for fold, outputs in folds if sample in fold]
        expected = sum(rows) / len(rows) if rows else torch.full((2,), torch.nan)
        torch.testing.assert_close(found["a"][sample], expected, equal_nan=True)


def test_what_is_predicted_once_is_kept_bit_for_bit() -> None:
    values = torch.tensor([-0.0, torch.nan, torch.inf, 5e-324], dtype=torch.double)
    found = out_of_fold([([3, 1], values[[3, 1]]), ([0, 2], values[[0, 2]])], 4)
    assert found.view(torch.long).tolist() == values.view(torch.long).tolist()
    classes = out_of_fold([([1], torch.tensor([7])), ([0], torch.tensor([3]))], 2)
    assert classes.dtype == torch.long
    assert classes.tolist() == [3, 7]
    assert out_of_fold([([1], torch.tensor([True]))], 2).isnan().tolist() == [True, False]


def test_batches_are_joined_and_sorted() -> None:
    batches = [(torch.tensor([2, 0]), [torch.ones(2, 3)]), (torch.tensor([1]), [torch.zeros(1, 3)])]
    outputs = joined(batches, [2, 1])
    assert in_order(outputs, [2, 0, 1])[0].tolist() == [0, 1, 2]
    assert in_order(outputs, [2, 0, 1])[1][0].tolist() == [[1] * 3, [0] * 3, [1] * 3]


def test_other_structures_in_another_batch_are_refused() -> None:
    for other in ([torch.ones(1)], (torch.ones(1), torch.ones(1)), {"a": torch.ones(1)}):
        with pytest.raises(ValueError, match="must have the same structure for all batches"):
            combine([(torch.ones(1),), other], lambda tensors, path: tensors[0])
    with pytest.raises(ValueError, match="same structure"):
        combine([{"a": torch.ones(1)}, {"b": torch.ones(1)}], lambda tensors, path: tensors[0])
    with pytest.raises(ValueError, match=r"\['a'\] is of torch.bool"):
        require_mean({"a": torch.tensor([True])})
    require_mean({"a": torch.ones(1), "b": torch.ones(1, dtype=torch.cfloat)})
