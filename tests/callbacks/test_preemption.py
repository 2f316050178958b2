"""A signal to any process: all of them save at the same step, end, and go on exactly from what they have saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightning_tricks as lt
from tests.faults import everything
from tests.faults.runs import Resumable, differences
from tests.nets import NormNet, build, loader, trainer, weights

STATUS = 128 + signal.SIGTERM


class Signals(Callback):
    """Sends this process a signal in a hook, once the step is reached, ``times`` times."""

    def __init__(self, hook: str, step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        self.step, self.number, self.times = step, number, times
        setattr(self, hook, self.send)

    def send(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.step and self.times:
            self.times -= 1
            os.kill(os.getpid(), self.number)


class Validated(Callback):
    """The steps at which a validation ended, with the loss that it found."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


def ended(run: Callable[[], Any]) -> int:
    """The exit status of a fit that a signal ends."""
    with pytest.raises(SIGTERMException) as raised:
        run()
    return raised.value.code


# ---- one process

PLACES = [  # hook, step from which on it sends, step of the checkpoint
    ("setup", 0, 1),
    ("on_train_start", 0, 1),
    ("on_before_backward", 8, 9),
    ("on_train_batch_end", 9, 9),
    ("on_validation_start", 6, 6),
    ("on_validation_batch_start", 6, 6),
    ("on_validation_batch_end", 6, 6),
    ("on_validation_end", 6, 7),
    ("on_train_epoch_end", 6, 7),
]


def interrupted(folder: Path, hook: str, step: int, **settings: Any) -> tuple[list[Any], list[Any], list[str]]:
    """Outcomes of a training, and of one that is ended in a hook and goes on, with their validations."""
    outcomes, validations = [], []
    path = folder / "run"
    for signals in ([], [Signals(hook, step, times=2)]):
        watch, module = Validated(), everything.fresh()
        made = everything.make(folder, lt.Preemption(path), watch, *signals, **settings)
        if signals:
            assert ended(lambda m=made, n=module: everything.run(m, n)) == STATUS
            module = everything.fresh()
            made = everything.make(folder, lt.Preemption(path), watch, **settings)
            everything.run(made, module, ckpt_path="newest")
        else:
            everything.run(made, module, ckpt_path="newest")  # there is none
        outcomes.append(everything.outcome(made, module))
        validations.append(watch.found)
    return outcomes, validations, sorted(os.listdir(path))


@pytest.mark.parametrize(("hook", "step", "saved"), PLACES)
@pytest.mark.parametrize("settings", [{}, {"val_check_interval": 2}], ids=str)
def test_a_training_that_is_ended_goes_on_exactly(
    hook: str, step: int, saved: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    (whole, resumed), (all_validations, both_validations), names = interrupted(tmp_path, hook, step, **settings)
    assert not differences(resumed, whole)
    assert both_validations == all_validations  # none is left out, done twice or cut short
    if not settings:
        assert names == [f"preempted-step={saved}.ckpt"]


@pytest.mark.parametrize("hook", ["on_before_backward", "on_train_batch_end"])
def test_accumulated_gradients_are_used_before_the_end(hook: str, tmp_path: Path) -> None:
    (whole, resumed), _, names = interrupted(tmp_path, hook, 4, accumulate_grad_batches=2)
    assert not differences(resumed, whole)
    assert names == ["preempted-step=5.ckpt"]


# ---- two processes: everything, on the ranks' own batches

CASES = [  # preset, hook, step, the ranks that get a signal
    ("ddp_bf16", "on_before_backward", 8, (0,)),
    ("ddp_bf16", "on_validation_batch_end", 6, (1,)),
    ("fsdp2_bf16", "on_before_backward", 8, (1,)),
    *(
        pytest.param((engine, hook, step, ranks), marks=pytest.mark.slow)
        for engine in ("ddp_bf16", "fsdp2_bf16", "zero1_bf16")
        for hook, step in (("on_before_backward", 8), ("on_validation_start", 6), ("on_save_checkpoint", 2))
        for ranks in ((0,), (1,), (0, 1))
    ),
]
FAST = [case for case in CASES if isinstance(case, tuple) and not hasattr(case, "marks")]


def strategy(engine: str) -> dict[str, Any]:
    return lt.preset(engine, precision="32-true", **({"process_group_backend": "gloo"} if engine[0] != "z" else {}))


def fit(
    folder: Path, engine: str, *callbacks: Callback, val: Any = None, ckpt_path: str | None = None, **settings: Any
) -> tuple[Any, int]:
    """The module's weights at the end, and the step."""
    module = build(Matched if engine[0] == "z" else everything.Everything)
    made = trainer(
        max_epochs=3, devices=2, callbacks=[lt.Preemption(folder), *callbacks], **strategy(engine), **settings
    )
    pl.seed_everything(7, verbose=False)
    rank = int(os.environ["RANK"])
    made.fit(module, Resumable(seed=5 + rank), loader(24) if val is None else val, ckpt_path=ckpt_path)
    return weights(module), made.global_step


class Matched(NormNet):
    """For engines that not all tricks support."""


def preempted(case: tuple[str, str, int, tuple[int, ...]], folder: str) -> dict[str, Any]:
    engine, hook, step, ranks = case
    run = Path(folder, "-".join(map(str, case)))
    tricks = [lt.EMA(0.9)] if engine[0] == "z" else everything.tricks()
    whole = fit(run, engine, *tricks)
    mine = [Signals(hook, step)] if int(os.environ["RANK"]) in ranks else [Callback()]
    tricks = [lt.EMA(0.9)] if engine[0] == "z" else everything.tricks()
    status = ended(lambda: fit(run, engine, *mine, *tricks))
    names = sorted(os.listdir(run))
    tricks = [lt.EMA(0.9)] if engine[0] == "z" else everything.tricks()
    resumed = fit(run, engine, *tricks, ckpt_path="newest")
    return {"status": status, "names": names, "whole": whole, "resumed": resumed}
