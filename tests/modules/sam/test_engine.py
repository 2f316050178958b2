"""The second run of a step: what is alive in it, and what everybody finds after it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.core.replay.rerun import is_replaying
from tests.nets import NormNet, PlainNet, build, fit, loader

TENSORS = (Tensor, torch.nn.Parameter)


class Counting(PlainNet):
    """Counts the tensors of the shape of its first weight in each run of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: tuple[tuple[bool, int], ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        shape = self.layers[0].weight.shape
        tensors = [each for each in gc.get_objects() if type(each) in TENSORS]
        count = sum(not each.is_nested and each.shape == shape for each in tensors)  # a nested one has no shape
        del tensors
        if not is_replaying():
            self.alive = (*self.alive, (False, count))
        else:
            AGAIN.append(count)
        return super().training_step(batch, batch_idx)


class Sharp(lt.SAMMixin, Counting):
    """The same under SAM."""


AGAIN: list[int] = []  # the counts of second runs, outside of the module's state, which they do not change


@pytest.mark.slow
def test_the_second_run_holds_one_copy_of_the_weights_and_no_gradients_of_the_first() -> None:
    module = build(Sharp)
    AGAIN.clear()
    others = [each for each in gc.get_objects() if type(each) in TENSORS]  # what other tests have left stays as it is
    fit(module, max_epochs=1, limit_train_batches=3)
    del others
    first = [count for _, count in module.alive]
    assert len(first) == len(AGAIN) == 3
    # from the second step on the first run has the .grad of the step before, which is gone in the second run
    assert [again - count for again, count in zip(AGAIN, first, strict=True)] == [1, 0, 0]


def test_a_step_that_has_no_loss_at_the_perturbed_weights_is_named() -> None:
    class Guarded(Sharp):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if is_replaying() else super().training_step(batch, batch_idx)

    with pytest.raises(MisconfigurationException, match=r"SAM needs a loss from both runs of a step, .* got None"):
        fit(build(Guarded))


class SharpNorm(lt.SAMMixin, NormNet):
    grads: list[bool] = []  # noqa: RUF012  # outside of the module's state

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SharpNorm.grads.append(torch.is_grad_enabled())
        return super().training_step(batch, batch_idx)


def test_a_pass_without_gradients_is_left_without() -> None:
    SharpNorm.grads = []
    fit(build(SharpNorm), callbacks=[lt.SWA(start=0.5)], max_epochs=2)
    assert SharpNorm.grads.count(False) == 6  # of the statistics' pass
    assert SharpNorm.grads.count(True) == 24


def test_an_average_that_is_set_up_later_keeps_its_hold_on_checkpoints(tmp_path: Any) -> None:
    class WithAverage(lt.SAMMixin, NormNet):
        def configure_callbacks(self) -> list[Any]:
            return [*super().configure_callbacks(), lt.EMA(0.9)]

    module = build(WithAverage)
    run = fit(module)
    run.fit_loop.max_epochs = 4

    save = LambdaCallback(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(tmp_path / "x.ckpt"))
    run.callbacks.append(save)
    run.fit(module, loader(), loader(24))
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]["EMA(decay=0.9)"]["raw"]
