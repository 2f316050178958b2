"""The second run of a step: what is alive in it, and what everybody finds after it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor

import lightning_tricks as lt
from tests.nets import PlainNet, build, fit


class Counting(PlainNet):
    """Counts the tensors of the shape of its first weight in each run of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: tuple[tuple[bool, int], ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shape = self.layers[0].weight.shape
        count = sum(type(each) in (Tensor, torch.nn.Parameter) and each.shape == shape for each in gc.get_objects())
        if not getattr(self, "_sam_replays", False):
            self.alive = (*self.alive, (False, count))
        else:
            Sharp.again.append(count)
        return super().training_step(batch, batch_idx)


class Sharp(lt.SAMMixin, Counting):
    again: list[int] = []  # noqa: RUF012  # outside of the module's state, which the second run does not change


def test_the_second_run_holds_one_copy_of_the_weights_and_no_gradients_of_the_first() -> None:
    module, Sharp.again = build(Sharp), []
    fit(module, max_epochs=1)
    first = [count for _, count in module.alive]
    assert len(first) == len(Sharp.again) == 6
    # from the second step on the first run has the .grad of the step before, which is gone in the second run
    assert [again - count for again, count in zip(Sharp.again, first, strict=True)] == [1, 0, 0, 0, 0, 0]


def test_the_state_of_a_run_that_fails_is_put_back() -> None:
    class Fails(Sharp):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self._sam_replays:
                raise RuntimeError("planned")
            self.note = batch_idx
            return super().training_step(batch, batch_idx)

    module, plain = build(Fails), build(Sharp)
    try:
        fit(module)
    except RuntimeError:
        assert module._sam_aside is None
        assert not module._sam_replays
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert module.note == 0
