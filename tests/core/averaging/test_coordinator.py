"""One coordinator a Trainer, through what happens to the Trainer and its callbacks between two fits."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from torch import nn

import lightning_tricks as lt
from lightning_tricks.core.averaging.coordinator import coordinator_of
from tests.core.weights.test_local import ShardedNet, fsdp2
from tests.nets import NormNet, PlainNet, SteppedByHand, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks


def go_on(run: L.Trainer, module: L.LightningModule) -> None:
    run.fit_loop.max_epochs += 1
    run.fit(module, loader(), loader(24))


def saved(run: L.Trainer, path: Path) -> Any:
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
    kept: list[Any] = []
    look = LambdaCallback(on_train_batch_start=lambda trainer, *_: kept.append(coordinator_of(trainer).file))
    tricks = [lt.PostHocEMA(tmp_path, every_n_steps=2), look]
    run = trainer(callbacks=tricks, max_epochs=3)
    run.fit(build(NormNet), loader(), loader(24), ckpt_path=tmp_path / "x.ckpt")
    assert kept
    assert not any(kept)


def test_after_an_exception_each_average_is_completed_whatever_another_one_raises() -> None:
    def stop(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError("the user's own")  # the averages have not seen the second step yet

    class Fails(lt.EMA):  # type: ignore[misc]
        def catch_up(self, trainer: L.Trainer) -> bool:
            if trainer.global_step == 2:
                raise ValueError("it cannot")
            return super().catch_up(trainer)

    average, module = lt.EMA(0.9), build(NormNet)
    with pytest.raises(KeyError, match="the user's own"):
        stopping = LambdaCallback(on_train_batch_end=stop)
        fit(module, callbacks=[stopping, average, Fails(0.5, validate="raw", at_end="raw")])
    assert [(averages.steps, averages.holds) for averages in average.running().values()] == [(2, "raw")]


# -- several averages in one run, saves at odd moments, and odd optimizers: each average stays what it is alone -------


def hidden(decay: float = 0.9, **settings: Any) -> lt.EMA:
    return lt.EMA(decay, validate="raw", at_end="raw", **settings)


class Stop(Callback):
    """Ends the training early, in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= 9


def alone(average: Any, **settings: Any) -> dict[str, Any]:
    fit(build(NormNet), callbacks=[average, *settings.pop("others", [])], **settings)
    return average.averaged_state_dict()


@pytest.mark.parametrize("order", [1, -1])
def test_a_save_before_its_turn_gives_an_average_nothing_of_another(order: int, tmp_path: Path) -> None:
    ema = hidden()
    saves = LambdaCallback(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint(tmp_path / "x.ckpt"))
    fit(build(NormNet), callbacks=[saves, *[ema, lt.EMA(0.99)][::order]])
    assert_equal(ema.averaged_state_dict(), alone(hidden()))


@pytest.mark.parametrize("order", [1, -1])
def test_the_last_weights_are_not_those_of_another_average(order: int) -> None:
    def swa() -> lt.SWA:
        return lt.SWA(start=2, every_n_steps=4, validate="raw", at_end="raw")

    together = swa()
    fit(build(NormNet), callbacks=[*[lt.EMA(0.9), together][::order], Stop()], max_epochs=4)
    assert_equal(together.averaged_state_dict(), alone(swa(), others=[Stop()], max_epochs=4))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("at_end", ["averaged", "raw"])
def test_all_are_saved_after_the_fit_and_all_go_on_in_a_second(order: int, at_end: Any, tmp_path: Path) -> None:
    first, second, module = hidden(), lt.EMA(0.99, at_end=at_end), build(NormNet)
    run = fit(module, callbacks=[first, second][::order])
    run.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["callbacks"]
    assert {"EMA(decay=0.9)", "EMA(decay=0.99)"} <= saved.keys()
    run.fit_loop.max_epochs = 4
    run.fit(module, loader(), loader(24))
    assert first._running.updates == second._running.updates == 24


def test_statistics_taken_for_one_average_are_not_in_another() -> None:
    ema, swa = hidden(), lt.SWA(start=0.5)
    fit(build(NormNet), callbacks=[ema, swa])
    assert_equal(ema.averaged_state_dict(), alone(hidden()))


class SavesInValidation(NormNet):
    """Saves in each validation pass, as a signal handler may."""

    def on_validation_epoch_end(self) -> None:
        assert self.trainer.checkpoint_callback is not None
        if self.trainer.current_epoch == 1:
            self.paths.append(f"{self.folder}/{len(self.paths)}.ckpt")
            self.trainer.save_checkpoint(self.paths[-1])


def test_a_checkpoint_saved_in_either_pass_of_validation_resumes_exactly(tmp_path: Path) -> None:
    def ema() -> lt.EMA:
        return lt.EMA(0.9, validate="both", at_end="raw")

    module, first = build(SavesInValidation), ema()
    module.folder, module.paths = tmp_path, []
    checkpoint = ModelCheckpoint(tmp_path / "best")
    fit(module, callbacks=[first, checkpoint], enable_checkpointing=True, max_epochs=3)
    assert len(module.paths) == 2
    for path in module.paths:
        rest, second = build(NormNet), ema()
        fit(rest, callbacks=[second], max_epochs=3, ckpt_path=path)
        assert_equal(weights(rest), weights(module))
        assert_equal(second.averaged_state_dict(), first.averaged_state_dict())


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_save_asked_for_while_weights_change_places_waits_until_they_have(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_tricks.core.averaging import transfer

    real, calls, module, first = transfer.copy_, 0, build(PlainNet), lt.EMA(0.9, at_end="raw")
    run = trainer(callbacks=[first], max_epochs=4)

    def interrupted(targets: Any, sources: Any) -> None:
        nonlocal calls
        calls += 1
        real(targets[:2], sources[:2])
        if calls == call:
            run.save_checkpoint(tmp_path / "x.ckpt")
            assert not (tmp_path / "x.ckpt").exists()
        real(targets, sources)

    monkeypatch.setattr(transfer, "copy_", interrupted)
    run.fit(module, loader(), loader(24))
    monkeypatch.setattr(transfer, "copy_", real)
    rest, second = build(PlainNet), lt.EMA(0.9, at_end="raw")
    fit(rest, callbacks=[second], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(rest), weights(module))
    assert_equal(second.averaged_state_dict(), first.averaged_state_dict())


def test_a_metric_that_the_module_itself_calls_raw_is_one_of_the_averaged_weights(tmp_path: Path) -> None:
    class Own(NormNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("score_raw", self(batch[0]).std())

    checkpoint = ModelCheckpoint(tmp_path, monitor="score_raw")
    fit(build(Own), callbacks=[lt.EMA(0.9, validate="both"), checkpoint], enable_checkpointing=True)
    result = trainer().validate(build(Own), loader(24), ckpt_path=checkpoint.best_model_path, verbose=False)[0]
    assert result["score_raw"] == pytest.approx(float(checkpoint.best_model_score))


def test_optimizers_made_anew_are_followed() -> None:
    class Anew(NormNet):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.strategy.setup_optimizers(self.trainer)

    ema = lt.EMA(0.9)
    fit(build(Anew), callbacks=[ema], max_epochs=3)
    assert ema._running.updates == 18


class Wrapper(torch.optim.Optimizer):
    """Does not call Optimizer.__init__, as many wrappers of optimizers."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_an_optimizer_without_hooks_is_watched() -> None:
    class Wrapped(NormNet):
        def configure_optimizers(self) -> Any:
            return Wrapper(super().configure_optimizers())

    ema, module = lt.EMA(0.9), build(Wrapped)
    fit(module, callbacks=[ema])
    assert ema._running.updates == 12
    assert_equal(ema.averaged_state_dict(), alone(lt.EMA(0.9)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_are_averaged_and_logged(dtype: torch.dtype) -> None:
    class Complex(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(8, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward((x * self.phase).abs().float())

    ema, module = lt.EMA(0.9), build(Complex)
    run = fit(module, callbacks=[ema], log_every_n_steps=1)
    assert run.callback_metrics["tricks/ema_distance"] > 0
    assert module.phase.dtype == dtype
    assert torch.equal(ema.averaged_state_dict()["phase"], module.phase)


def test_a_lazy_layer_joins_when_it_has_a_shape() -> None:
    class Lazy(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0] = nn.LazyLinear(16)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    ema = lt.EMA(0.9)
    fit(build(Lazy), callbacks=[ema], max_epochs=2)
    assert "layers.0.weight" in ema._running.tensors


def manual_under_fsdp2() -> None:
    class Manual(SteppedByHand, ShardedNet):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            with torch.no_grad():
                self(batch[0])  # leaves the root gathered

    ema, same = lt.EMA(0.9), lt.EMA(0.9)
    settings = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
    fit(build(Manual), callbacks=[ema], **settings, **fsdp2())
    fit(build(ShardedNet), callbacks=[same], **settings, **fsdp2())
    assert_equal(ema.averaged_state_dict(), same.averaged_state_dict())


def test_manual_optimization_under_fsdp2_may_run_the_module_after_the_step() -> None:
    run_ranks(manual_under_fsdp2)
