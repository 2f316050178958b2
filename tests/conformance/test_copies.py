"""Copies and pickles of callbacks, also of those that are in a fit or after one: new ones with the same arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from tests.conformance.runs import fitted, run
from tests.conformance.settings import SETTINGS, every_third
from tests.nets import NormNet, assert_equal, build, fit, weights

NAMES = [param for param in every_third(2) if SETTINGS[str(param.values[0])].callbacks]


class Copies(Callback):
    """Copies callbacks in a fit."""

    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks
        self.pickled = b""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            self.copied = copy.deepcopy(self.callbacks)
            self.pickled = pickle.dumps(self.callbacks)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_a_new_trick(name: str) -> None:
    trick = SETTINGS[name]
    callbacks = trick.make_callbacks("on")
    fresh, size = run(trick), len(pickle.dumps(trick.make_callbacks("on")))
    copies, kind = Copies(callbacks), trick.module(NormNet, "on")
    fitted(kind, callbacks=[*callbacks, copies])
    for mine in (copies.copied, pickle.loads(copies.pickled), copy.deepcopy(callbacks)):
        assert [each.written() for each in mine] == [each.written() for each in callbacks]
        assert_equal(weights(fitted(kind, callbacks=mine)), fresh)
    assert max(len(copies.pickled), len(pickle.dumps(callbacks))) < size + 9


def test_the_average_is_not_in_a_pickle() -> None:
    ema, module = lt.EMA(0.9), build(NormNet)
    fit(module, callbacks=[ema])
    assert len(pickle.dumps(ema)) < 1000
    with pytest.raises(ValueError, match="has no average"):
        copy.deepcopy(ema).averaged_state_dict()
