"""A watch sees who takes the ``.data`` of a tensor, and what was written through it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_tricks.core.replay.data_watch import data_of, is_freed, restore_data, watching_data

TAKEN: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda x: x.data.sum(),
    "operation": lambda x: x.data.mul_(2),
    "several": lambda x: torch._foreach_mul_([x.data], 2),
    "set": lambda x: setattr(x, "data", torch.zeros(3)),
    "numpy": lambda x: x.data.numpy().fill(1),
}
LEFT: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda x: x.detach().mul_(2),
    "computed with": lambda x: (x * 2).sum(),
    "looked at": lambda x: (x.shape, x.grad, x.dtype),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("made", [nn.Parameter, torch.clone, lambda x: nn.Linear(3, 1).weight])
def test_whoever_takes_the_data_is_seen_before_anything_is_written(made: Any, take: Callable[[Tensor], Any]) -> None:
    x, seen = made(torch.ones(3)), list[Any]()
    before = x.detach().clone()
    with watching_data({id(x): "x"}, lambda tensor: seen.append((tensor, tensor.detach().clone()))):
        take(x)
    assert [tensor is x for tensor, _ in seen] == [True]
    assert torch.equal(seen[0][1], before)


@pytest.mark.parametrize("use", LEFT.values(), ids=LEFT)
def test_other_uses_and_other_tensors_are_not_seen(use: Callable[[Tensor], Any]) -> None:
    x, other, seen = torch.ones(3), torch.ones(3), list[Tensor]()
    with watching_data({id(x): "x"}, seen.append):
        use(x)
        other.data.mul_(2)
        data_of(x).mul_(2)
    assert not seen


def test_several_watches_see_the_same_and_the_attribute_is_torchs_own_again() -> None:
    own, x, seen = torch.Tensor.data, torch.ones(3), list[str]()
    with pytest.raises(KeyError), watching_data({id(x): "x"}, lambda _: seen.append("outer")):
        with watching_data({id(x): "x"}, lambda _: seen.append("inner")):
            x.data.mul_(2)
        x.data = torch.zeros(2)
        raise KeyError
    x.data.mul_(2)
    assert seen == ["outer", "inner", "outer"]
    assert torch.Tensor.data is own
    assert "data" not in vars(torch.Tensor)


def test_compiled_code_takes_the_data_as_before() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.bias.data.mul_(0.5)
            return super().forward(x)

    layer, x = Writes(3, 3), torch.ones(2, 3)
    bias = layer.bias.detach().clone()
    compiled = torch.compile(layer, backend="eager")
    with watching_data({id(layer.bias): "bias"}, lambda _: None):
        compiled(x).sum().backward()
        compiled(x)
    assert torch.equal(layer.bias, bias / 4)


@pytest.mark.parametrize("write", [TAKEN["operation"], TAKEN["set"]])
def test_memory_and_contents_are_those_from_before_without_a_version(write: Callable[[Tensor], Any]) -> None:
    weight = nn.Parameter(torch.arange(3.0))
    address, data, contents = weight.data_ptr(), data_of(weight), weight.detach().clone()
    loss = (weight * torch.ones(3, requires_grad=True)).sum()  # whose backward pass needs the weight
    write(weight)
    restore_data(weight, data, contents)
    assert torch.equal(weight, contents)
    assert weight.data_ptr() == address
    loss.backward()


def test_memory_that_fsdp2_has_freed_stays_freed() -> None:
    weight = nn.Parameter(torch.arange(3.0))
    data, contents = data_of(weight), weight.detach().clone()
    weight.untyped_storage().resize_(0)
    assert is_freed(weight)
    restore_data(weight, data, contents)
    assert is_freed(weight)
    assert not is_freed(torch.zeros(0))
