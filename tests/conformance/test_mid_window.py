"""A checkpoint within accumulated batches, whose gradients Lightning does not save: no trick makes it worse."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.conformance.runs import run
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.test_resume import resumable
from tests.conformance.trick import Enrolment
from tests.nets import NormNet, assert_close, assert_equal, build, data, loader, weights
from tests.reference.loop import Batch, Both, Naive, naive_fit


class SaveAfter(Callback):
    """Saves after the fifth batch of the first epoch, the second of three."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 4:
            trainer.save_checkpoint(self.path)


def resumed(trick: Enrolment, path: Path, state: str = "off") -> dict[str, Tensor]:
    settings = {"train": resumable(trick, data(44)), "accumulate_grad_batches": 3}
    run(trick, state, callbacks=[SaveAfter(path)], **settings)
    return run(trick, state, ckpt_path=path, **settings)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Enrolment], dict[str, Tensor]]:
    return cache(lambda bare: resumed(bare, tmp_path_factory.mktemp("stock") / "stock.ckpt"))


def refuses_or_has_none(name: str) -> bool:
    """Whether a trick refuses accumulation, or has no limit at which it changes nothing."""
    return "accumulate" in SETTINGS[name].refused or not SETTINGS[name].has_limit


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [case for case in every_third(2) if not refuses_or_has_none(case.values[0])])
def test_at_the_no_op_limit_it_is_resumed_as_without_the_trick(
    name: str, tmp_path: Path, stock: Callable[[Enrolment], dict[str, Tensor]]
) -> None:
    trick = SETTINGS[name]
    compare = assert_close if trick.convolutions else assert_equal
    compare(resumed(trick, tmp_path / "a.ckpt"), stock(trick.bare()))


class Lost(Naive):
    """Of the second window only the last batch counts."""

    depth = -2

    def descend(self, module: Any, batch: Batch, number: int, share: float) -> None:
        super().descend(module, batch, number, share)
        if number == 4:
            module.zero_grad()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [name for name, trick in SETTINGS.items() if not trick.has_limit])
def test_what_has_no_limit_goes_on_as_a_loop_that_has_lost_these_gradients(name: str, tmp_path: Path) -> None:
    trick, batches = SETTINGS[name], list(loader(44))
    reference = build(trick.plain(NormNet))
    naive_fit(reference, Both(Lost(), trick.form(batches, None)), batches, accumulate=3)
    assert_close(resumed(trick, tmp_path / "a.ckpt", "on"), weights(reference))
