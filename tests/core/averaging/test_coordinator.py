"""One coordinator a Trainer, through what happens to the Trainer and its callbacks between two fits."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning.pytorch.loops.fit_loop import _FitLoop

import lightning_tricks as lt
from lightning_tricks.core.averaging.coordinator import coordinator_of
from tests.nets import NormNet, build, fit, loader, trainer


def go_on(run: pl.Trainer, module: pl.LightningModule) -> None:
    run.fit_loop.max_epochs += 1
    run.fit(module, loader(), loader(24))


def saved(run: pl.Trainer, path: Path) -> Any:
    run.save_checkpoint(path)
    return torch.load(path, weights_only=True)["callbacks"]


def test_it_is_that_of_the_trainer_whose_loop_was_replaced(tmp_path: Path) -> None:
    module = build(NormNet)
    run = fit(module, callbacks=[lt.EMA(0.9)])
    steps, first = run.global_step, coordinator_of(run)
    run.fit_loop = _FitLoop(run, max_epochs=0)
    run.fit_loop.epoch_loop = _TrainingEpochLoop(run)
    go_on(run, module)
    assert coordinator_of(run) is first
    assert saved(run, tmp_path / "x.ckpt")["EMA(decay=0.9)"]["steps"] == steps + run.global_step


@pytest.mark.parametrize("stays", [True, False])
def test_no_average_goes_on_across_the_jump_that_another_one_left(stays: bool, tmp_path: Path) -> None:
    sparse, shown, module = lt.PostHocEMA(tmp_path, every_n_steps=2), lt.EMA(0.9, at_end="averaged"), build(NormNet)
    run = fit(module, callbacks=[sparse, shown])
    before = run.global_step
    if not stays:
        run.callbacks.remove(shown)
    go_on(run, module)
    expected = run.global_step if stays else run.global_step - before
    assert {averages.steps for averages in sparse.running().values()} == {expected}


def test_a_callback_that_is_gone_leaves_nothing_behind() -> None:
    average, module = lt.EMA(0.9), build(NormNet)
    run = fit(module, callbacks=[average])
    go_on(run, module)
    run.callbacks.remove(average)
    gone = weakref.ref(average)
    del average
    gc.collect()
    assert gone() is None


def test_a_checkpoint_that_was_loaded_is_not_kept_while_training(tmp_path: Path) -> None:
    fit(build(NormNet), callbacks=[lt.EMA(0.9)]).save_checkpoint(tmp_path / "x.ckpt")
    kept = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            kept.append(coordinator_of(trainer).file)

    tricks = [lt.PostHocEMA(tmp_path, every_n_steps=2), Look()]
    run = trainer(callbacks=tricks, max_epochs=3)
    run.fit(build(NormNet), loader(), loader(24), ckpt_path=tmp_path / "x.ckpt")
    assert kept
    assert not any(kept)


def test_after_an_exception_each_average_is_completed_whatever_another_one_raises() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise KeyError("the user's own")  # the averages have not seen the second step yet

    class Fails(lt.EMA):  # type: ignore[misc]
        def catch_up(self, trainer: pl.Trainer) -> bool:
            if trainer.global_step == 2:
                raise ValueError("it cannot")
            return super().catch_up(trainer)

    average, module = lt.EMA(0.9), build(NormNet)
    with pytest.raises(KeyError, match="the user's own"):
        fit(module, callbacks=[Stop(), average, Fails(0.5, validate="raw", at_end="raw")])
    assert [(averages.steps, averages.holds) for averages in average.running().values()] == [(2, "raw")]
