"""Whether tensors are finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_tricks.core.nonfinite.finite import all_finite, nonfinite_names

GOOD = [torch.ones(3), torch.zeros(2, 2), torch.tensor(3e38), torch.empty(0), torch.ones(2, dtype=torch.float16)]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_one_entry_is_found(value: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(1000, dtype=dtype)
    assert all_finite([*GOOD, tensor])
    tensor[789] = value
    assert not all_finite([*GOOD, tensor])
    assert not all_finite([tensor.to_sparse(), *GOOD])
    tensor[12] = -value  # two infinities do not cancel out
    assert not all_finite([*GOOD, tensor])


def test_large_values_are_finite_though_their_norm_is_not() -> None:
    assert all_finite([torch.full((100,), 3e38), torch.full((9,), 60000.0, dtype=torch.float16)])
    assert all_finite([torch.full((9,), 1e300, dtype=torch.float64)])


@pytest.mark.parametrize("none", [[], [torch.empty(0)]])
def test_nothing_is_finite(none: list[Tensor]) -> None:
    assert all_finite(none)


def test_the_names() -> None:
    named = {"a": torch.ones(2), "b": torch.tensor([1, torch.nan]), "c": torch.tensor(torch.inf)}
    assert nonfinite_names(named) == ["b", "c"]
