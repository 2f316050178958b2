"""Before a module is cut into slices: real weights, and those of the first rank on all."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks.strategies.fsdp2.prepare import broadcast, prepare, require_untied
from tests.nets import PlainNet, assert_close, assert_equal
from tests.ranks import run_ranks
from tests.strategies.sharded import two, whole


class Meta(PlainNet):
    """The weights come into being on the strategy's device."""

    def configure_model(self) -> None:
        if self.layers[0].weight.device.type != "meta" and not self.trainer.global_step:
            with torch.device("meta"):
                self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


class Apart(PlainNet):
    """Each rank has other weights."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        torch.manual_seed(int(os.environ["RANK"]))
        self.layers[0].reset_parameters()


def both() -> dict[str, Any]:
    found = {"meta": whole(two(Meta, max_steps=1, limit_val_batches=0)[0])}
    for name in ("ddp", None):
        found[f"apart {name}"] = whole(two(Apart, **({"strategy": name} if name else {}))[0])
    rank = dist.get_rank()
    mixed = [torch.full((2, 2), float(rank)), torch.full((3,), rank), torch.full((2,), rank + 0.5)]
    broadcast(mixed)
    found["mixed"] = [tensor.tolist() for tensor in mixed]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(both)


def test_weights_on_the_meta_device_are_initialized_whole(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_equal(found["meta"], ranks[0]["meta"])
        weight = found["meta"]["layers.0.weight"]
        assert weight.isfinite().all()
        assert (weight[:8] - weight[8:]).abs().max() > 0.1, "the slices differ"


def test_all_ranks_start_from_the_weights_of_the_first_as_under_ddp(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert_close(found["apart None"], ranks[0]["apart ddp"], 1e-5)


def test_tensors_of_several_dtypes_are_broadcast(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["mixed"] == [[[0.0, 0.0], [0.0, 0.0]], [0, 0, 0], [0.5, 0.5]]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, device="meta"))


def test_weights_that_nobody_initializes_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Bare has weights on the meta device and no reset_parameters"):
        prepare(nn.Sequential(Bare()), torch.device("cpu"))


def test_tied_weights_on_the_meta_device_are_refused() -> None:
    one, other = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    require_untied(nn.Sequential(one, other))
    other.weight = one.weight
    with pytest.raises(MisconfigurationException, match=r"shared by several modules, of shape \(2, 2\)"):
        require_untied(nn.Sequential(one, other))
