"""profile_tricks: a trick that takes a known time is reported with it, and nothing stays behind."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from typing_extensions import override

import lightning_tricks as lt
from lightning_tricks.advisor import TricksProfile
from lightning_tricks.core.lightning import patching
from lightning_tricks.core.trick import Trick
from tests.device.devices import TRAINED_ON, device
from tests.nets import Net, PlainNet, assert_equal, build, loader, trainer, weights

SLEEP = 0.005


class Sleeps(Trick):
    """Sleeps in a hook, in a method that it wraps, and once where no step is made; knows for how long it did."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = {"hook": 0.0, "wrapped": 0.0}

    def _sleep(self, where: str, seconds: float) -> None:
        began = time.perf_counter()
        time.sleep(seconds)
        self.slept[where] += time.perf_counter() - began

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._wrap(trainer.strategy, "batch_to_device", self._transfer)
        time.sleep(0.05)

    def _transfer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # not a validation
            self._sleep("wrapped", 2 * SLEEP)
        return original(*args, **kwargs)

    @override
    def on_before_zero_grad(self, *_: Any) -> None:
        self._sleep("hook", SLEEP)

    @override
    def on_validation_start(self, *_: Any) -> None:
        time.sleep(0.05)


class Slow(PlainNet):
    """Its step takes a while, within the method that a trick wraps."""

    def transfer_batch_to_device(self, *args: Any) -> Any:
        time.sleep(3 * SLEEP)
        return super().transfer_batch_to_device(*args)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(SLEEP)
        return super().training_step(batch, batch_idx)


def profiled(module: Any, callbacks: list[Any], **settings: Any) -> tuple[TricksProfile, L.Trainer]:
    run = trainer(max_epochs=2, callbacks=callbacks, **settings)
    with lt.profile_tricks(run) as profile:
        L.seed_everything(7, verbose=False)
        run.fit(module, loader(), loader(24))
    return profile, run


def test_a_trick_has_the_time_that_it_takes_and_not_that_of_what_it_wraps() -> None:
    trick = Sleeps()
    profile, _ = profiled(Slow(), [trick])
    assert profile.steps == 12
    assert profile.seconds["Sleeps", "on_before_zero_grad"] == pytest.approx(trick.slept["hook"], rel=0.05)
    assert profile.seconds["Sleeps", "batch_to_device"] == pytest.approx(trick.slept["wrapped"], rel=0.05)
    assert profile.per_step()["Sleeps"] == pytest.approx(sum(profile.seconds.values()) / 12)
    step = profile.total / 12
    assert step > 7 * SLEEP, "steps, transfers and sleeps"
    assert sum(profile.per_step().values()) < step - 4 * SLEEP, "without the step and the transfer"


def test_validation_is_no_part_of_a_step() -> None:
    class Validated(PlainNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.05)

    began = time.perf_counter()
    profile, _ = profiled(Validated(), [Sleeps()])
    assert profile.total < time.perf_counter() - began - 0.3, "two epochs of three batches each"


def test_all_kinds_of_tricks_are_seen_and_their_sum_is_less_than_the_step() -> None:
    tricks = [lt.Mixup(), lt.EMA(0.9), lt.SkipNonFinite(), lt.AutoClip(), lt.SAMCallback()]
    profile, _ = profiled(Net(), tricks)
    assert {"Mixup", "EMA", "SkipNonFinite", "AutoClip", "SAMCallback"} <= profile.per_step().keys()
    assert ("Mixup", "batches") in profile.seconds
    assert 0 < sum(profile.per_step().values()) < profile.total / profile.steps
    assert profile.per_step()["SAMCallback"] > profile.per_step()["AutoClip"], "a second pass"
    shown = str(profile)
    for name in ("EMA", "on_train_batch_end", "all tricks", "the step", "Not seen: what mixins do"):
        assert name in shown


def test_training_is_the_same_and_nothing_is_left() -> None:
    plain, watched, tricks = build(Net), build(Net), [lt.Mixup(), lt.EMA(0.9)]
    unwatched, call = [lt.Mixup(), lt.EMA(0.9)], patching._Wrapped.__call__
    run = trainer(max_epochs=2, callbacks=unwatched)
    L.seed_everything(7, verbose=False)
    run.fit(plain, loader(), loader(24))
    _, run = profiled(watched, tricks)
    assert_equal(weights(watched), weights(plain))
    assert [vars(trick).keys() for trick in tricks] == [vars(trick).keys() for trick in unwatched]
    assert patching._Wrapped.__call__ is call
    assert [type(one).__name__ for one in run.callbacks] == ["Mixup", "EMA"]  # type: ignore[attr-defined]


def test_after_a_failure_nothing_is_left() -> None:
    class Failing(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("no power")

    ema, call = lt.EMA(0.9), patching._Wrapped.__call__
    with pytest.raises(RuntimeError, match="no power"):
        profiled(Failing(), [ema])
    assert patching._Wrapped.__call__ is call
    assert not [name for name in vars(ema) if name.startswith("on_")]


def test_several_fits_add_up_and_a_trainer_without_tricks_has_none() -> None:
    run = trainer(max_epochs=1)
    with lt.profile_tricks(run) as profile:
        run.fit(PlainNet(), loader(), loader(24))
        run.fit_loop.max_epochs = 2
        run.fit(PlainNet(), loader(), loader(24))
    assert profile.steps == 12
    assert profile.per_step() == {}
    assert "all tricks" in str(profile)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(TypeError, match="trainer must be a lightning"), lt.profile_tricks(None):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("on", TRAINED_ON)
def test_each_measurement_waits_for_the_device(on: str) -> None:
    with device(on) as there:
        made = trainer(callbacks=[lt.EMA(0.9)], accelerator=there.name, max_steps=2)
        with lt.profile_tricks(made) as profile:
            made.fit(build(PlainNet), loader(), loader(8))
        if there.simulation is not None:
            assert [wait.what for wait in there.simulation.waits].count("synchronize") > 10
    assert ("EMA", "on_train_batch_end") in profile.seconds
