"""A fit that is undone: what it mutes, and that it goes on until it is stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.core.replay.undone_fit import UndoneFit, require_undoable
from tests.nets import Net, assert_equal, build, loader, trainer, weights


class Stops(UndoneFit):
    """After some batches, or by an exception."""

    def __init__(self, batches: int, fails: bool = False) -> None:
        super().__init__()
        self.batches, self.fails, self.seen = batches, fails, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen += 1
        if self.seen == self.batches and self.fails:
            raise RuntimeError("planned")
        trainer.should_stop = self.seen == self.batches


class Shouting(Callback):
    def on_train_start(self, *_: Any) -> None:
        raise AssertionError("another callback was called")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_steps": 3}, {"min_epochs": 9, "max_epochs": 9}])
def test_it_goes_on_until_it_stops_and_is_undone(fails: bool, settings: dict[str, Any]) -> None:
    run, module, stops = trainer(callbacks=[Shouting()], **settings), build(Net), Stops(20, fails)
    before = weights(module)
    if fails:
        with pytest.raises(RuntimeError, match="planned"):
            stops.fit(run, module, loader(), None)
        assert str(stops.exception) == "planned"
    else:
        stops.fit(run, module, loader(), None)
    assert stops.seen == 20
    assert_equal(weights(module), before)
    assert (run.global_step, run.should_stop, run.fit_loop.max_epochs) == (0, False, settings.get("max_epochs", 2))
    assert type(run.callbacks[0]) is Shouting


class Counting(Net):
    """Writes into a tensor that it keeps in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"steps": torch.zeros(2)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counts["steps"] += 1
        return super().training_step(batch, batch_idx)


def test_tensors_in_containers_are_undone_too() -> None:
    module = build(Counting)
    Stops(3).fit(trainer(), module, loader(), None)
    assert module.counts["steps"].tolist() == [0, 0]


def test_what_cannot_be_undone_is_refused_in_the_name_of_the_trick() -> None:
    with pytest.raises(MisconfigurationException, match="my_trick needs a Trainer that fits in this process"):
        require_undoable(trainer(strategy="ddp_spawn", devices=2), build(Net), loader(), "my_trick")
    with pytest.raises(TypeError, match="loaders that can be read again"):
        require_undoable(trainer(), build(Net), iter([1]), "my_trick")
