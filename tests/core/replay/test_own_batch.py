"""The batch of a step that runs twice is rebuilt for every run, and a write into one of its tensors is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.replay.data_watch import versions
from lightning_tricks.core.replay.own_batch import copy_containers, forbid_writes, tensors_in


class Pair(NamedTuple):
    first: Tensor
    rest: list[Any]


def test_a_batch_is_rebuilt_around_the_same_tensors() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    batch = {"pair": Pair(x, [y, "text"]), "more": (x, None)}
    again = copy_containers(batch)
    batch["pair"].rest.pop()
    batch.clear()
    assert type(again["pair"]) is Pair
    assert again["pair"].first is again["more"][0] is x
    assert again["pair"].rest == [y, "text"]


def test_a_write_into_a_tensor_of_the_batch_is_seen() -> None:
    with torch.inference_mode():
        fixed = torch.zeros(2)
    batch = {"x": [torch.zeros(2), "text"], "y": (torch.ones(2), fixed)}
    tensors = tensors_in(batch)
    before = versions(tensors)
    assert len(before) == 3
    _ = batch["x"][0] + 1
    assert versions(tensors) == before
    batch["x"][0].mul_(2)
    assert versions(tensors) != before


def test_a_write_into_a_sparse_tensor_is_seen() -> None:
    sparse = torch.eye(2).to_sparse()
    before = versions([sparse])
    assert versions([sparse]) == before
    sparse.mul_(2)
    assert versions([sparse]) != before


def swap(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


WRITES: list[Callable[[Tensor], Any]] = [
    lambda t: t.mul_(2),
    lambda t: t[:1].zero_(),
    swap,
    lambda t: t.data.resize_(100),
    lambda t: t.data.mul_(2),
    lambda t: torch._foreach_add_([t.data], 1),
]


@pytest.mark.parametrize("write", WRITES)
def test_writes_into_the_batch_raise(write: Callable[[Tensor], Any]) -> None:
    module, batch = nn.Linear(2, 2), {"deep": [(torch.ones(2), "text")], "none": None}
    refused = pytest.raises(MisconfigurationException, match=r"training_step writes into its batch.*x = x \* 2")
    with refused, forbid_writes(module, batch):
        write(batch["deep"][0][0])
    with forbid_writes(module, batch):  # what was written before does not count
        pass


def test_reading_and_writing_elsewhere_is_no_write() -> None:
    with torch.inference_mode():
        fixed = torch.ones(2)
    module, batch = nn.Linear(2, 2), {"x": torch.ones(2), "fixed": fixed}
    with forbid_writes(module, batch):
        (module(batch["x"]) - module(batch["x"] * batch["fixed"])).sum().backward()
        batch["x"].clone().mul_(2)
        batch["x"].data.sum()
        with torch.no_grad():
            module.weight.mul_(2)
        batch.pop("fixed")


def test_an_exception_in_a_step_that_writes_is_the_one_that_is_seen() -> None:
    batch = torch.ones(2)
    with pytest.raises(KeyError), forbid_writes(nn.Linear(2, 2), batch):
        batch.zero_()
        raise KeyError
