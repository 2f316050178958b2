"""SIGTERM in the middle of a training: it ends after that batch, with its raw weights, and goes on exactly later."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.faults import everything
from tests.faults.runs import differences, load
from tests.faults.test_interrupt import Watch
from tests.few import few
from tests.ranks import run_ranks

PLACES = [("on_before_backward", 8), ("on_validation_batch_end", 6), ("on_train_batch_end", 9)]


class Ends(Callback):
    """Sends this process a SIGTERM in a hook at a step, as a scheduler does at any moment."""

    def __init__(self, hook: str, step: int) -> None:
        self.step, self.sent = step, False
        setattr(self, hook, self.send)

    def send(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(folder: str, training: str, hook: str, step: int) -> None:
    whole, ended, resumed = (everything.fresh(everything.TRAININGS[training][0]) for _ in range(3))
    made = everything.make(Path(folder), training=training)
    everything.run(made, whole)
    expected = everything.outcome(made, whole)

    last = ModelCheckpoint(folder, "{step}", save_on_exception=True, every_n_train_steps=100)
    watch = Watch()
    made = everything.make(Path(folder), watch, Ends(hook, step), last, training=training, enable_checkpointing=True)
    with pytest.raises(SIGTERMException):
        everything.run(made, ended)
    watch.check(ended)
    (path,) = Path(folder).glob("step=*.ckpt")
    assert load(path)["global_step"] == made.global_step < 18
    made = everything.make(Path(folder), training=training)
    everything.run(made, resumed, ckpt_path=path)
    assert not differences(everything.outcome(made, resumed), expected)


@pytest.mark.parametrize(("hook", "step"), few(PLACES, 2))
@pytest.mark.parametrize("training", few(["everything", "adapters", "experts"], 1))
def test_a_training_that_is_terminated_saves_and_goes_on_exactly(
    training: str, hook: str, step: int, tmp_path: Path
) -> None:
    run_ranks(terminated, str(tmp_path), training, hook, step, nprocs=1)
