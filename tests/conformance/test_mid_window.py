"""A checkpoint within accumulated batches, whose gradients Lightning does not save: no trick makes it worse."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.conformance.runs import run
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.test_resume import Resumable
from tests.conformance.trick import Trick
from tests.nets import assert_close, assert_equal, data


class SaveAfter(Callback):
    """Saves after the fifth batch of the first epoch, the second of three."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx == 4:
            trainer.save_checkpoint(self.path)


def resumed(trick: Trick, path: Path) -> dict[str, Tensor]:
    settings = {"train": Resumable(data(44)), "accumulate_grad_batches": 3}
    run(trick, "off", callbacks=[SaveAfter(path)], **settings)
    return run(trick, "off", ckpt_path=path, **settings)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda **needs: resumed(Trick(**needs), tmp_path_factory.mktemp("stock") / "stock.ckpt"))


@pytest.mark.parametrize("name", every_third(2))
def test_at_the_no_op_limit_it_is_resumed_as_without_the_trick(name: str, tmp_path: Path, stock: Any) -> None:
    trick = SETTINGS[name]
    if "accumulate" in trick.refused:
        pytest.skip("it refuses accumulation")
    compare = assert_close if trick.convolutions else assert_equal
    flags = ("images", "grows", "convolutions", "experts", "wide")
    needs = {flag: getattr(trick, flag) for flag in flags}
    compare(resumed(trick, tmp_path / "a.ckpt"), stock(**needs))
