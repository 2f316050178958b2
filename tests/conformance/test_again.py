"""The same callbacks after an exception, in a second Trainer, and in a second fit of one: as if they were new.

In a second fit of one Trainer some go on instead, with what they know of the weights that are trained further.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from tests.conformance.runs import fitted, fp16, run
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.trick import Enrolment
from tests.few import slow
from tests.nets import NormNet, assert_equal, build, fit, loader, trainer, weights


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


@pytest.mark.few(5)
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


@pytest.mark.few(3)
@pytest.mark.parametrize("name", [slow(name) if {*name.values} & {*DEAR} else name for name in every_third(0)])
def test_a_second_trainer_gives_the_same_whatever_the_first_one_did(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    callbacks, fresh = trick.make_callbacks("on"), run(trick)
    other = {"precision": "bf16-mixed"} if "fp16" in trick.refused else fp16()
    fitted(trick.module(NormNet, "on"), callbacks=callbacks, max_epochs=3, **other)
    for _ in range(2):
        assert_equal(weights(fitted(trick.module(NormNet, "on"), callbacks=callbacks)), fresh)
    cell(name, "second")


GOES_ON = {  # what a second fit of the same Trainer, module and callbacks goes on with
    "BatchSizeWarmup": "its record of the epochs so far goes on",
    "Distill": "the average of the same weights goes on",
    "EMA": "the average of the same weights goes on",
    "PostHocEMA": "the averages of the same weights go on, in the same folder",
    "SWA": "the average of the same weights goes on",
}


def second_fit(trick: Enrolment, *, anew: bool) -> dict[str, Tensor]:
    """The weights after a fit that was stopped in its second epoch and fitted again on the same Trainer, for longer."""
    stop, module = Stop(8), build(trick.module(NormNet, "on"))
    run = trainer(callbacks=[*trick.make_callbacks("on"), stop], max_epochs=4)
    L.seed_everything(7, verbose=False)
    with pytest.raises(RuntimeError, match="planned"):
        run.fit(module, loader(), loader(24))
    if anew:
        run.callbacks[run.callbacks.index(stop) - len(trick.make_callbacks("on")) : run.callbacks.index(stop)] = (
            trick.make_callbacks("on")
        )
    run.fit_loop.max_epochs = 3
    L.seed_everything(7, verbose=False)
    with pytest.raises(FloatingPointError) if trick.stops else nullcontext():
        run.fit(module, loader(), loader(24))
    assert run.current_epoch == (2 if trick.stops else 3)
    return weights(module)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", every_third(1))
def test_a_second_fit_of_one_trainer_starts_anew_or_goes_on(
    name: str, cell: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where TerminateOnNonFinite saves
    trick = SETTINGS[name]
    mine = second_fit(trick, anew=False)
    if name == "BatchSizeWarmup":
        with pytest.raises(MisconfigurationException, match="training had no such epochs"):
            second_fit(trick, anew=True)
        equal = False
    else:
        fresh = second_fit(trick, anew=True)
        equal = all(torch.equal(mine[weight], fresh[weight]) for weight in fresh)
    assert equal == (trick.neutral or name not in GOES_ON), "what the second fit goes on with is said in GOES_ON"
    why = GOES_ON.get(name, "goes on at its place in the plan" if trick.schedule else "starts anew")
    cell(name, "again", "right", why)
