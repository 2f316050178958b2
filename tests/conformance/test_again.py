"""The same callbacks after an exception, and in a second Trainer: as if they were new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conformance.runs import fitted, fp16, run
from tests.conformance.settings import SETTINGS, every_third
from tests.nets import NormNet, assert_equal, build, fit, weights


class Stop(Callback):
    """Raises after some batches, in the middle of an accumulated window if there is one."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("planned")


DEAR = ("Compile", "InspectTraining")  # they compile or draw for a second; a second Trainer is quick for them as well
CASES = [
    pytest.param(accumulate, name, marks=[pytest.mark.slow] if slow else [])
    for accumulate in (1, 3)
    for number, (name, trick) in enumerate(SETTINGS.items())
    for slow in [trick.twin or name in DEAR or (number + accumulate) % 3]
]


@pytest.mark.parametrize(("accumulate", "name"), CASES)
def test_a_fit_after_one_that_raised_gives_the_same(name: str, accumulate: int, cell: Callable[..., None]) -> None:
    trick, settings = SETTINGS[name], {"accumulate_grad_batches": accumulate}
    error, message, again = RuntimeError, "planned", settings
    if accumulate > 1 and "accumulate" in trick.refused:  # what raises is the refusal
        error, message, again = MisconfigurationException, "accumulate_grad_batches", {}
    fresh, callbacks = run(trick, **again), trick.make_callbacks("on")
    with pytest.raises(error, match=message):  # before the last epoch of a trick that stops there
        epochs = 3 if trick.stops else 2
        fit(build(trick.module(NormNet, "on")), callbacks=[*callbacks, Stop(8)], max_epochs=epochs, **settings)
    assert_equal(weights(fitted(trick.module(NormNet, "on"), callbacks=callbacks, **again)), fresh)
    if accumulate == 1:
        cell(name, "exception")


@pytest.mark.parametrize("name", every_third(0))
def test_a_second_trainer_gives_the_same_whatever_the_first_one_did(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    callbacks, fresh = trick.make_callbacks("on"), run(trick)
    other = {"precision": "bf16-mixed"} if "fp16" in trick.refused else fp16()
    fitted(trick.module(NormNet, "on"), callbacks=callbacks, max_epochs=3, **other)
    for _ in range(2):
        assert_equal(weights(fitted(trick.module(NormNet, "on"), callbacks=callbacks)), fresh)
    cell(name, "second")
