"""A compiled network trains, with a trick, what the same network trains eagerly, alone and in two processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.conformance.runs import Compiled, refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.trick import public_name
from tests.nets import PlainNet, assert_close, loader, rank_loader
from tests.ranks import Cases, run_cases


# torch's compiler looks at it where a hook interrupts a network
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", quick("EMA", "Mixup", "SAMMixin", "SkipNonFinite", "cosine"))
def test_a_compiled_network_gives_the_same(name: str, cell: Callable[..., None]) -> None:
    eager, compiled = run(SETTINGS[name], base=PlainNet), run(SETTINGS[name], base=Compiled)
    assert_close({key: compiled[key] for key in eager}, eager)
    cell(name, "compile")


def two_compiled(name: str) -> dict[str, Any] | str:
    torch.compiler.reset()
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    if "DDP" in SETTINGS[name].refused:
        return refusal(SETTINGS[name], Compiled, train=rank_loader(), **settings)
    ended = run(SETTINGS[name], base=Compiled, train=rank_loader(), **settings)
    return {key: value.numpy() for key, value in ended.items()}


@pytest.fixture(scope="module")
def compiled(selected: Callable[..., list[str]]) -> Callable[[], Cases]:
    """What all tricks give under DDP in a compiled network, in the same two processes."""
    return cache(lambda: run_cases(two_compiled, selected("name", devices=2)))


@pytest.mark.parametrize("name", quick("EMA", "Mixup"))
@pytest.mark.parametrize("devices", [2])
def test_compiled_networks_in_processes_equal_one_process(
    name: str, devices: int, compiled: Callable[[], Cases], cell: Callable[..., None]
) -> None:
    trick = SETTINGS[name]
    first, second = compiled()[name]
    if "DDP" in trick.refused:
        assert "DDP" in first
        assert public_name(name) in first
        cell(name, "compiled DDP", "refused", first)
        return
    by_itself = "accumulate" in trick.refused
    batches = {"train": loader(48, 16)} if by_itself else {"train": loader(48), "accumulate_grad_batches": 2}
    for key, value in run(trick, base=PlainNet, **batches).items():
        assert (first[key] == second[key]).all()
        torch.testing.assert_close(torch.from_numpy(first[key]), value, atol=1e-5, rtol=1e-4)
    cell(name, "compiled DDP")
