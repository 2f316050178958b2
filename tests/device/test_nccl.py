"""Collectives as NCCL has them, which the tests of all tricks on several devices stand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.device.nccl import rank_with_nccl
from tests.device.simulation import Simulation
from tests.ranks import run_ranks

HOST, DEVICE = (lambda: torch.ones(2)), (lambda: torch.ones(2, device="cuda"))


def many(x: Any) -> list[Any]:
    return [torch.empty_like(x) for _ in range(2)]


def mean() -> list[float]:
    x = torch.full((2,), float(dist.get_rank()), device="cuda")
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.tolist()


def objects() -> list[int]:
    found = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return found


def waits() -> list[str]:
    (simulation,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Simulation))
    before = len(simulation.waits)
    dist.barrier()
    return [wait.what for wait in simulation.waits[before:]]


def beside() -> tuple[str, list[float]]:
    group = dist.new_group(backend="gloo")
    dist.all_reduce(x := HOST(), group=group)
    return dist.get_backend(group), x.tolist()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "reduce": (lambda: dist.all_reduce(HOST()), "device type cpu"),
    "broadcast": (lambda: dist.broadcast(HOST(), src=0), "device type cpu"),
    "gather": (lambda: dist.all_gather(many(DEVICE()), HOST()), "device type cpu"),
    "gather into": (lambda: dist.all_gather(many(HOST()), DEVICE()), "device type cpu"),
    "int16": (lambda: dist.broadcast(DEVICE().short(), src=0), "Unconvertible NCCL type torch.int16"),
    "object": (lambda: dist.all_gather_object([None, None], 1), "an object goes through device 0"),
    "barrier": (lambda: dist.barrier(), "a barrier goes through device 0"),
}
TAKEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "mean": (mean, [0.5, 0.5]),
    "name": (lambda: (dist.get_backend(), dist.get_backend_config()), ("nccl", "cuda:nccl")),
    "beside": (beside, ("gloo", [2.0, 2.0])),
}
WITH_A_DEVICE: dict[str, tuple[Callable[[], Any], Any]] = {
    "objects": (objects, [0, 1]),
    "a barrier waits": (waits, ["barrier"]),
}


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with rank_with_nccl():
        dist.init_process_group("nccl")
        for name, (refused, _) in REFUSED.items():
            with pytest.raises(RuntimeError) as raised:
                refused()
            found[name] = str(raised.value)
        found |= {name: taken() for name, (taken, _) in TAKEN.items()}
        torch.cuda.set_device(dist.get_node_local_rank())
        return found | {name: taken() for name, (taken, _) in WITH_A_DEVICE.items()}


def mixed() -> Any:
    with rank_with_nccl():
        dist.init_process_group("cpu:gloo,cuda:nccl")
        for x in (host := HOST(), on_it := DEVICE()):
            dist.all_reduce(x)
        return host.tolist(), on_it.tolist(), objects()


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(cases)


@pytest.mark.parametrize("name", REFUSED)
def test_what_nccl_refuses_raises(name: str, found: list[dict[str, Any]]) -> None:
    assert all(REFUSED[name][1] in rank[name] for rank in found)


@pytest.mark.parametrize(("name", "expected"), [(name, each) for name, (_, each) in {**TAKEN, **WITH_A_DEVICE}.items()])
def test_what_nccl_takes_is_right(name: str, expected: Any, found: list[dict[str, Any]]) -> None:
    assert all(rank[name] == expected for rank in found)


def test_a_group_of_both_takes_both() -> None:
    assert run_ranks(mixed) == [([2.0, 2.0], [2.0, 2.0], [0, 1])] * 2
