"""Tricks with random numbers, or loaders of their own, on two groups of two processes as on two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close
from tests.ranks import Cases, run_cases
from tests.strategies.fsdp2.split_nets import HAND, Words, together
from tests.strategies.sharded import whole

pytestmark = pytest.mark.slow


class Pairs(lt.GradCacheMixin, Words):
    chunk = 3

    def embed(self, batch: Any) -> tuple[Tensor, Tensor]:
        z = self(batch[0])
        return z, z.roll(1, 1) + batch[1][:, None]

    def contrast(self, queries: Tensor, keys: Tensor) -> Tensor:
        return lt.functional.info_nce(queries, keys)


class Free(Words):
    def configure_optimizers(self) -> Any:
        return lt.optimizer("schedulefree_adamw", self, lr=0.01, eps=1e-4)


class Scaled(Words):
    """Takes its rate from the number of samples of a step."""

    def configure_optimizers(self) -> Any:
        rate = lt.scale_lr(0.01, batch_size=lt.effective_batch_size(self.trainer, per_device=8), base_batch_size=16)
        return torch.optim.AdamW(self.parameters(), lr=rate, eps=1e-4)


CASES: dict[str, tuple[type[PlainNet], Callable[[], list[Any]]]] = {
    "Mixup": (Words, lambda: [lt.Mixup(0.5)]),
    "HiddenMixup": (Words, lambda: [lt.HiddenMixup("blocks.0", 0.5)]),
    "HardExampleFilter": (Words, lambda: [lt.HardExampleFilter()]),
    "BatchSizeWarmup": (Words, lambda: [lt.BatchSizeWarmup(initial=1, final=2)]),
    "ScheduleFree": (Free, lambda: [lt.ScheduleFree()]),
    "GradCacheMixin": (Pairs, list),
    "scale_lr": (Scaled, list),
}


def ended(case: str, tensor_parallel: int) -> dict[str, Tensor]:
    kind, callbacks = CASES[case]
    plan = HAND if tensor_parallel > 1 else None
    return whole(together(kind, {"tensor_parallel": tensor_parallel, "plan": plan}, callbacks=callbacks())[0])


@pytest.fixture(scope="module")
def two() -> Cases:
    return run_cases(ended, CASES, 1)


@pytest.fixture(scope="module")
def four() -> Cases:
    return run_cases(ended, CASES, 2, nprocs=4, timeout=600)


@pytest.mark.parametrize("case", CASES)
def test_two_groups_train_as_two_processes(two: Cases, four: Cases, case: str) -> None:
    for rank in four[case]:
        assert_close(rank, two[case][0], 1e-5)
