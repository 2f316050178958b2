"""EMA against a naive average, and the ways in which averaged weights get lost or mistaken for the raw ones."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import pytorch_lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.functional import ema_decay
from tests.device.devices import CUDA, device
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    SaveAt,
    Stream,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    trained,
    trainer,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.averages import NaiveEMA
from tests.refusals import assert_refused


def load(path: Any) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def raw_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint["callbacks"]["EMA(decay=0.9)"]["raw"]


class Probe(Callback):
    """The weights at each hook, in the callback order of a user's own callback."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, torch.Tensor]]] = {}

    def note(self, hook: str, pl_module: L.LightningModule) -> None:
        self.seen.setdefault(hook, []).append(weights(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.note("train_batch_end", pl_module)


class ProbedNet(Net):
    """Notes the weights that the module's own hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe()

    def on_validation_start(self) -> None:
        self.probe.note("validation_start", self)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.probe.note("validation_step", self)

    def on_validation_epoch_end(self) -> None:
        self.probe.note("validation_epoch_end", self)


# ---- the average itself


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "settings",
    [
        {"decay": 0.9},
        {"decay": 0.9, "warmup": True},
        {"decay": 0.9, "warmup": "power"},
        {"decay": 0.9, "every_n_steps": 3},
        {"decay": 0.9, "start": 4},
        {"decay": 0.99, "start": 3, "every_n_steps": 2, "warmup": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_equals_a_naive_average(settings: dict[str, Any], accumulate: int) -> None:
    names = {"every_n_steps": "every"}
    naive = NaiveEMA(**{names.get(name, name): value for name, value in settings.items()})
    ema = lt.EMA(**{"warmup": False, **settings})
    module = build()
    fit(module, callbacks=[ema, naive], max_epochs=3, accumulate_grad_batches=accumulate)
    naive.assert_equals(module.state_dict())
    naive.assert_equals(ema.averaged_state_dict())


def test_warmup_forgets_the_first_weights_fast_and_ends_at_the_decay() -> None:
    assert ema_decay(0, 0.999) == 0.1
    assert ema_decay(90, 0.999) == 0.91
    assert ema_decay(10**6, 0.999) == 0.999
    assert ema_decay(0, 0.9, warmup=False, every_n_steps=2) == pytest.approx(0.81)
    assert ema_decay(0, 0.999, warmup="power") == 0
    assert ema_decay(7, 0.999, warmup="power") == pytest.approx(0.75)
    assert ema_decay(40_000, 0.999, warmup="power") == 0.999


def test_a_scaled_decay_forgets_as_fast_per_sample() -> None:
    assert lt.functional.scale_ema_decay(0.999, batch_size=64, base_batch_size=64) == 0.999
    assert lt.functional.scale_ema_decay(0.9, batch_size=128, base_batch_size=64) == pytest.approx(0.9**2)
    assert lt.functional.scale_ema_decay(0.81, batch_size=32, base_batch_size=64) == pytest.approx(0.9)
    for arguments in ({"batch_size": 0, "base_batch_size": 1}, {"batch_size": 1, "base_batch_size": -1}):
        with pytest.raises(ValueError, match="must be at least 1"):
            lt.functional.scale_ema_decay(0.9, **arguments)
    with pytest.raises(ValueError, match=r"decay must be in \[0.0, 1.0\), got 1"):
        lt.functional.scale_ema_decay(1, batch_size=1, base_batch_size=1)


@pytest.mark.slow
def test_the_fp32_average_of_bf16_weights_stays_exact_through_validations() -> None:
    naive, ema, module = NaiveEMA(0.999), lt.EMA(0.999, warmup=False), build(lr=0.01)
    fit(module, train=loader(400), precision="bf16-true", callbacks=[ema, naive], max_epochs=20)  # 1,000 steps
    assert naive.updates == 1000
    averages = ema._running.tensors
    assert all(average.dtype == torch.float32 for average in averages.values())
    naive.assert_equals(averages, 1e-6)


def test_a_fraction_of_training_is_a_valid_start() -> None:
    assert_equal(trained(Net, lt.EMA(0.9, start=0.5), max_epochs=4), trained(Net, lt.EMA(0.9, start=12), max_epochs=4))


def test_a_start_that_is_never_reached_leaves_everything_raw(tmp_path: Any) -> None:
    plain, late, probe = build(), build(), Probe()
    plain_run = fit(plain)
    run = fit(late, callbacks=[lt.EMA(start=10**6), probe])
    assert_equal(weights(plain), weights(late))
    assert run.callback_metrics["val_loss"] == plain_run.callback_metrics["val_loss"]
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert_equal(load(tmp_path / "x.ckpt")["state_dict"], weights(plain))


def test_frozen_weights_are_not_stored_and_unfrozen_ones_join() -> None:
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            pl_module.layers[0].requires_grad_(trainer.current_epoch >= 1)

    ema, module = lt.EMA(0.9, warmup=False), build()
    module.layers[0].requires_grad_(False)
    stored = []

    class Count(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            stored.append("layers.0.weight" in ema._running.tensors)

    fit(module, callbacks=[ema, Unfreeze(), Count()], max_epochs=2)
    assert stored == [False, True]
    assert not torch.equal(ema.averaged_state_dict()["layers.0.weight"], build().layers[0].weight)


def test_tied_weights_are_averaged_once_and_stay_tied() -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.layers[0]

    ema, module = lt.EMA(0.9), build(Tied)
    fit(module, callbacks=[ema])
    state = ema.averaged_state_dict()
    assert len(ema._running.tensors) == 6
    assert torch.equal(state["alias.weight"], state["layers.0.weight"])
    assert torch.equal(state["alias.weight"], module.layers[0].weight)


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_a_boolean_buffer_is_that_of_the_module(buffers: Any) -> None:
    class Switch(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("odd", torch.tensor([False, True]))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.odd.logical_not_()
            return super().training_step(batch, batch_idx)

    ema, module = lt.EMA(0.9, buffers=buffers), build(Switch)
    fit(module, callbacks=[ema], max_steps=5)
    assert ema.averaged_state_dict()["odd"].tolist() == module.odd.tolist() == [True, False]


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_buffers_are_copied_or_averaged_and_integers_always_copied(buffers: Any) -> None:
    ours, theirs = trained(Net, lt.EMA(0.9, buffers=buffers)), trained()
    assert torch.equal(ours["layers.1.num_batches_tracked"], theirs["layers.1.num_batches_tracked"])
    assert torch.equal(ours["layers.1.running_mean"], theirs["layers.1.running_mean"]) == (buffers == "copy")


class Growing(NormNet):
    """Notes something of each epoch in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noted", torch.zeros(1))

    def note(self) -> None:
        self.noted = torch.cat([self.noted, torch.ones(1)])


@pytest.mark.few(4)
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end"])
@pytest.mark.parametrize("buffers", ["copy", "average"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_buffer_may_change_its_shape(hook: str, buffers: Any, precision: Any, tmp_path: Any) -> None:
    kind = type("Growing", (Growing,), {hook: Growing.note})
    module, settings = build(kind), {"precision": precision, "max_epochs": 3}
    every = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit(module, callbacks=[lt.EMA(0.9, buffers=buffers), every], enable_checkpointing=True, **settings)
    assert module.noted.tolist() == [0, 1, 1, 1]
    again = build(kind)
    again.noted = torch.zeros_like(load(tmp_path / "epoch=1.ckpt")["state_dict"]["noted"])
    fit(again, callbacks=[lt.EMA(0.9, buffers=buffers)], ckpt_path=tmp_path / "epoch=1.ckpt", **settings)
    assert_equal(weights(again), weights(module))


class Rebinding(NormNet):
    """Makes its buffer anew in validation, which ``trainer.validate`` runs in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen = self.seen + 1


class InferenceMode(Rebinding):
    @torch.inference_mode()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Rebinding, InferenceMode])
@pytest.mark.parametrize("validate", ["averaged", "both"])
def test_buffers_that_were_made_in_inference_mode_are_averaged(kind: type[Net], validate: Any, tmp_path: Any) -> None:
    module, save = build(kind), SaveAt(tmp_path / "x.ckpt", step=4)
    run = trainer(callbacks=[lt.EMA(0.9, buffers="average", validate=validate), save], max_epochs=1)
    run.validate(module, loader(24), verbose=False)
    run.fit(module, loader(), loader(24))
    assert module.seen.tolist() == [6, 6]  # three batches before the fit, and three with the averaged weights


def test_layers_made_in_configure_model_are_averaged() -> None:
    class Lazy(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = None

        def configure_model(self) -> None:
            if self.layers is None:
                self.layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

    naive, module = NaiveEMA(0.9), build(Lazy)
    fit(module, callbacks=[lt.EMA(0.9, warmup=False), naive])
    naive.assert_equals(module.state_dict())


def test_manual_optimization_updates_once_a_batch_that_stepped() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[4])]

    naive, module = NaiveEMA(0.9), build(Manual)
    fit(module, callbacks=[lt.EMA(0.9, warmup=False), naive])
    assert naive.updates == 12
    naive.assert_equals(module.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_grad_scaler_skips_does_not_count(fused: bool) -> None:
    class Overflow(PlainNet):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), fused=fused)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * (float("inf") if batch_idx in (1, 2) else 1.0)

    ema, module = lt.EMA(0.9, warmup=False, at_end="raw"), build(Overflow)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    fit(module, callbacks=[ema], max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert ema._running.updates == 4
    assert all(torch.isfinite(value).all() for value in ema.averaged_state_dict().values())


def test_a_fraction_of_an_unknown_length_is_refused_with_the_remedy() -> None:
    with pytest.raises(MisconfigurationException, match=r"EMA\(start=0.5\).*no length.*Give start in optimizer steps"):
        fit(build(), train=DataLoader(Stream(data()), batch_size=8), callbacks=[lt.EMA(start=0.5)])


# ---- where the averaged weights are seen


def test_every_hook_of_validation_sees_the_averaged_weights_and_training_the_raw_ones() -> None:
    ema, module = lt.EMA(0.9), build(ProbedNet)
    raw = fit(build(ProbedNet), callbacks=[Probe()]).callbacks[0].seen["train_batch_end"]
    naive, probe = NaiveEMA(0.9, warmup=True), Probe()
    fit(module, callbacks=[ema, naive, probe], max_epochs=2)
    for mine, plain in zip(probe.seen["train_batch_end"], raw, strict=True):
        assert_equal(mine, plain)
    seen = module.probe.seen
    naive.assert_equals(seen["validation_start"][-1])
    for hook in ("validation_step", "validation_epoch_end"):
        assert_equal(seen[hook][-1], seen["validation_start"][-1])


def test_validate_raw_validates_and_saves_the_raw_weights(tmp_path: Any) -> None:
    plain, module, checkpoint = build(), build(), ModelCheckpoint(tmp_path, save_last=True)
    plain_run = fit(plain)
    run = fit(module, callbacks=[lt.EMA(0.9, validate="raw"), checkpoint], enable_checkpointing=True)
    assert run.callback_metrics["val_loss"] == plain_run.callback_metrics["val_loss"]
    assert_equal(load(tmp_path / "last.ckpt")["state_dict"], weights(plain))
    assert not torch.equal(module.layers[0].weight, plain.layers[0].weight)  # at_end="averaged"


def test_the_context_manager_always_swaps_back() -> None:
    ema, module = lt.EMA(0.9, at_end="raw"), build()
    fit(module, callbacks=[ema])
    raw = weights(module)
    with pytest.raises(ZeroDivisionError), ema.averaged(module):
        assert_equal(weights(module), ema.averaged_state_dict())
        assert not torch.equal(module.layers[0].weight, raw["layers.0.weight"])
        raise ZeroDivisionError
    assert_equal(weights(module), raw)


def test_an_interrupt_while_swapping_in_leaves_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ema, module, copy = lt.EMA(0.9, at_end="raw"), build(), torch._foreach_copy_
    fit(module, callbacks=[ema])
    raw = weights(module)

    def interrupted(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        monkeypatch.setattr(torch, "_foreach_copy_", copy)
        copy(targets[:2], sources[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt), ema.averaged(module):
        pass
    assert_equal(weights(module), raw)


# ---- checkpoints and resume


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_holds_the_weights_that_scored(tmp_path: Any, weights_only: bool) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=weights_only, save_top_k=-1)
    ema, module = lt.EMA(0.9), build()
    fit(module, callbacks=[checkpoint, ema], enable_checkpointing=True, max_epochs=3)
    bare = build()
    bare.load_state_dict(load(checkpoint.best_model_path)["state_dict"])
    scored = trainer().validate(bare, loader(24), verbose=False)[0]["val_loss"]
    assert scored == pytest.approx(checkpoint.best_model_score.item(), abs=1e-7)
    again = trainer().validate(build(), loader(24), ckpt_path=checkpoint.best_model_path, verbose=False)
    assert again[0]["val_loss"] == scored


def test_validate_and_test_after_fit_equal_a_fresh_process(tmp_path: Any) -> None:
    checkpoint, module = ModelCheckpoint(tmp_path, monitor="val_loss"), build()
    run = fit(module, callbacks=[lt.EMA(0.9), checkpoint], enable_checkpointing=True)
    path = checkpoint.best_model_path
    here = run.test(module, loader(24), ckpt_path=path, verbose=False)
    assert here == trainer().test(build(), loader(24), ckpt_path=path, verbose=False)
    predicted = torch.cat(run.predict(module, loader(24), ckpt_path=path))
    torch.testing.assert_close(predicted, torch.cat(trainer().predict(build(), loader(24), ckpt_path=path)))


def test_a_module_that_rewrites_its_checkpoint_saves_the_averaged_weights_too(tmp_path: Any) -> None:
    class Rewriting(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = self.state_dict()

    ended = trained(Rewriting, lt.EMA(0.9), ModelCheckpoint(tmp_path, filename="x"), enable_checkpointing=True)
    assert_equal(load(tmp_path / "x.ckpt")["state_dict"], ended)


def test_a_checkpoint_saved_before_the_callback_has_its_turn_misses_no_update(tmp_path: Any) -> None:
    ema = lt.EMA(0.9)
    fit(build(), callbacks=[SaveAt(tmp_path / "x.ckpt", step=12), ema])
    saved = load(tmp_path / "x.ckpt")
    assert saved["callbacks"]["EMA(decay=0.9)"]["updates"] == ema._running.updates == 12
    assert_equal(saved["state_dict"], ema.averaged_state_dict())


def test_an_exception_before_the_callback_has_its_turn_loses_no_update(tmp_path: Any) -> None:
    class Early(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 9:
                raise RuntimeError("planned")

    checkpoint = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=99)
    with pytest.raises(RuntimeError, match="planned"):
        fit(build(), callbacks=[Early(), lt.EMA(0.9), checkpoint], enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    assert load(path)["callbacks"]["EMA(decay=0.9)"]["updates"] == load(path)["global_step"] == 9


def test_a_finished_fit_started_again_ends_with_the_averaged_weights(tmp_path: Any) -> None:
    module, again = build(), build()
    run = fit(module, callbacks=[lt.EMA(0.9)])
    run.save_checkpoint(tmp_path / "x.ckpt")
    rerun = fit(again, callbacks=[lt.EMA(0.9)], ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(again), weights(module))
    rerun.save_checkpoint(tmp_path / "y.ckpt")
    assert_equal(load(tmp_path / "y.ckpt")["state_dict"], weights(module))
    run.fit(module, loader(), loader(24))
    assert_equal(weights(module), weights(again))


def test_a_checkpoint_saved_after_the_fit_holds_the_validated_weights_whatever_the_module_holds(tmp_path: Any) -> None:
    ema, module = lt.EMA(0.9, at_end="raw"), build()
    plain = trained()
    run = fit(module, callbacks=[ema])
    for _ in range(2):
        run.save_checkpoint(tmp_path / "x.ckpt")
        assert_equal(load(tmp_path / "x.ckpt")["state_dict"], ema.averaged_state_dict())
        assert_equal(weights(module), plain)


# ---- averages that belong to other weights


def saved_after(run: L.Trainer, path: Any) -> dict[str, Any]:
    run.save_checkpoint(path)
    saved = load(path)
    assert "EMA(decay=0.9)" not in saved["callbacks"]
    return saved["state_dict"]


def test_the_first_trainer_of_two_saves_its_own_module(tmp_path: Any) -> None:
    ema, first = lt.EMA(0.9), build()
    run = fit(first, callbacks=[ema])
    fit(build(lr=0.01), callbacks=[ema])
    assert_equal(saved_after(run, tmp_path / "x.ckpt"), weights(first))


def test_another_module_is_evaluated_and_saved_without_the_average(tmp_path: Any) -> None:
    run, other = fit(build(), callbacks=[lt.EMA(0.9)]), build()
    mine = run.validate(other, loader(24), verbose=False)
    assert mine == trainer().validate(build(), loader(24), verbose=False)
    assert_equal(saved_after(run, tmp_path / "x.ckpt"), weights(other))


@pytest.mark.parametrize("weights_only", [False, True])
def test_weights_loaded_for_a_test_are_saved_without_the_average(tmp_path: Any, weights_only: bool) -> None:
    module, other = build(), build(lr=0.01)
    fit(other, max_epochs=1).save_checkpoint(tmp_path / "other.ckpt", weights_only=weights_only)
    run = fit(module, callbacks=[lt.EMA(0.9)])
    run.test(module, loader(24), ckpt_path=tmp_path / "other.ckpt", verbose=False)
    assert_equal(saved_after(run, tmp_path / "x.ckpt"), weights(other))


def test_weights_put_in_after_a_failed_fit_are_saved_without_the_average(tmp_path: Any) -> None:
    run, module = trainer(callbacks=[lt.EMA(0.9)]), build(Failing)
    with pytest.raises(RuntimeError, match="planned"):
        run.fit(module, loader(), loader(24))
    module.load_state_dict(build(Failing).state_dict())
    assert_equal(saved_after(run, tmp_path / "x.ckpt"), weights(build(Failing)))


def test_a_later_fit_that_fails_at_once_leaves_the_first_module_alone() -> None:
    class Broken(Net):
        def setup(self, stage: str) -> None:
            raise RuntimeError("planned")

    ema, module = lt.EMA(0.9), build()
    fit(module, callbacks=[ema])
    ended = weights(module)
    for broken in (Broken, L.LightningModule):  # one fails in its setup, one before any callback's
        with pytest.raises(Exception, match=r"planned|training_step"):
            trainer(callbacks=[ema]).fit(build(broken), loader(), loader(24))
        assert_equal(weights(module), ended)


def test_a_resume_from_before_the_start_forgets_the_average(tmp_path: Any) -> None:
    again, ema = build(NormNet), lt.EMA(0.9, start=8)
    run = fit(again, callbacks=[ema, SaveAt(tmp_path / "x.ckpt", epoch=0)])
    run.fit(again, loader(), loader(24), ckpt_path=tmp_path / "x.ckpt")
    other = lt.EMA(0.9, start=8)
    fresh = trained(NormNet, other, ckpt_path=tmp_path / "x.ckpt")
    assert ema._running.updates == other._running.updates == 4
    assert_equal(weights(again), fresh)


def test_raw_weights_changed_between_two_fits_start_a_new_average() -> None:
    module, ema = build(), lt.EMA(0.9, at_end="raw")
    run = fit(module, callbacks=[ema], max_epochs=1)
    module.load_state_dict(build(lr=0.01).state_dict())
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(24))
    assert ema._running.updates == 6


def test_a_forward_in_train_mode_between_two_fits_does_not_lose_the_raw_weights() -> None:
    module, ema = build(), lt.EMA(0.9, buffers="average")
    run = fit(module, callbacks=[ema], max_epochs=1)
    module.train()(torch.randn(4, 8))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(24))
    assert ema._running.updates == 12


def test_averaged_buffers_of_a_checkpoint_can_be_resumed_as_copied_ones(tmp_path: Any) -> None:
    plain, module = build(NormNet), build(NormNet)
    fit(plain, max_epochs=4)
    half = fit(build(NormNet), callbacks=[lt.EMA(0.9, buffers="average")])
    half.save_checkpoint(tmp_path / "x.ckpt")
    fit(module, callbacks=[lt.EMA(0.9)], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(module.layers[1].running_mean, plain.layers[1].running_mean)


@pytest.mark.few(4)
@pytest.mark.parametrize("settings", [{}, {"every_n_steps": 3}, {"start": 5}, {"validate": "raw"}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resume_is_bit_exact(tmp_path: Any, settings: dict[str, Any], precision: Any) -> None:
    whole, rest = build(NormNet), build(NormNet)
    ema, first, resumed = (lt.EMA(0.9, **settings) for _ in range(3))
    fit(whole, callbacks=[ema], max_epochs=4, precision=precision)
    half = fit(build(NormNet), callbacks=[first], max_epochs=2, precision=precision)
    half.save_checkpoint(tmp_path / "x.ckpt")
    fit(rest, callbacks=[resumed], max_epochs=4, ckpt_path=tmp_path / "x.ckpt", precision=precision)
    assert_equal(weights(whole), weights(rest))
    assert_equal(ema._running.tensors, resumed._running.tensors)
    with ema.averaged(whole), resumed.averaged(rest):
        assert_equal(weights(whole), weights(rest))


def test_the_last_checkpoint_of_a_finished_fit_resumes_exactly(tmp_path: Any) -> None:
    # ModelCheckpoint saves in on_train_end too, after the averaged weights went into the module
    whole, last = trained(NormNet, lt.EMA(0.9), max_epochs=4), ModelCheckpoint(tmp_path, save_last=True)
    half = trained(NormNet, lt.EMA(0.9), last, max_epochs=2, enable_checkpointing=True)
    assert_equal(load(tmp_path / "last.ckpt")["state_dict"], half)
    rest = trained(NormNet, lt.EMA(0.9), max_epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert_equal(whole, rest)


def test_the_same_trainer_goes_on_with_both_weights() -> None:
    class Start(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            started.append((weights(pl_module), ema.averaged_state_dict(), ema._running.updates))

    module, ema, started = build(), lt.EMA(0.9, warmup=False), []
    plain = trained(max_epochs=1)
    run = fit(module, callbacks=[ema, Start()], max_epochs=1)
    ended = weights(module)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(24))
    raw, average, updates = started[1]
    assert_equal(raw, plain)
    assert_equal(average, ended)
    assert updates == 6
    assert ema._running.updates == 12


def test_a_checkpoint_without_average_can_be_resumed_with_one(tmp_path: Any) -> None:
    fit(build(), max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    naive, module = NaiveEMA(0.9), build()
    fit(module, callbacks=[lt.EMA(0.9, warmup=False), naive], max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    naive.assert_equals(module.state_dict())


# ---- exceptions


class Failing(Net):
    """Raises in the second validation, while averaged weights are in place."""

    def __init__(self, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.error = error

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 1 and batch_idx == 1:
            if self.error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)  # Ctrl-C
            raise self.error("planned")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_validation_leaves_the_module_raw_and_the_checkpoint_right(
    tmp_path: Any, error: type[BaseException]
) -> None:
    naive, module = NaiveEMA(0.9, warmup=True), build(Failing, error=error)
    raw = trained(max_epochs=2)
    checkpoint = ModelCheckpoint(tmp_path, filename="broken", save_on_exception=True)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises((RuntimeError, SystemExit)):
        fit(module, callbacks=[checkpoint, lt.EMA(0.9), naive], enable_checkpointing=True)
    signal.signal(signal.SIGINT, handler)  # which Lightning ignores from the first Ctrl-C on
    assert_equal(weights(module), raw)
    (path,) = [path for path in tmp_path.iterdir() if "exception" in path.name or "broken" in path.name]
    saved = load(path)
    naive.assert_equals(saved["state_dict"])
    raw_weights = {name: value for name, value in raw.items() if name in raw_of(saved)}
    assert_equal(raw_of(saved), raw_weights)


def test_a_failed_fit_can_be_tried_again_with_the_same_objects() -> None:
    module, ema = build(Failing), lt.EMA(0.9)
    with pytest.raises(RuntimeError, match="planned"):
        fit(module, callbacks=[ema])
    module.validation_step = lambda *_: None
    module.train()  # Lightning leaves it in eval mode
    fit(module, callbacks=[ema])
    assert ema._running.updates == 12


def test_a_checkpoint_of_another_trainer_after_a_failed_fit_holds_the_averaged_weights(tmp_path: Any) -> None:
    ema = lt.EMA(0.9)
    with pytest.raises(RuntimeError, match="planned"):
        fit(build(Failing), callbacks=[ema])
    ended = trained(Net, ema, ModelCheckpoint(tmp_path, filename="x"), enable_checkpointing=True)
    assert_equal(load(tmp_path / "x.ckpt")["state_dict"], ended)


def test_no_hook_stays_on_the_optimizer_after_a_fit() -> None:
    run = fit(build(), callbacks=[lt.EMA(0.9)])
    assert not run.optimizers or not any(o._optimizer_step_post_hooks for o in run.optimizers)


# ---- arguments


def test_bad_arguments_name_the_argument_the_value_and_what_is_allowed() -> None:
    cases = [
        (ValueError, {"decay": 1.5}, r"decay must be in \[0.0, 1.0\), got 1.5"),
        (ValueError, {"decay": 1.0}, "decay"),
        (ValueError, {"decay": -0.1}, "decay"),
        (TypeError, {"decay": "0.9"}, "decay must be a number"),
        (ValueError, {"decay": float("nan")}, "decay"),
        (TypeError, {"warmup": 3}, "warmup must be True or False, got 3"),
        (ValueError, {"warmup": "powr"}, "warmup must be one of 'power', got 'powr'. Did you mean 'power'"),
        (ValueError, {"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        (TypeError, {"every_n_steps": 1.5}, "every_n_steps"),
        (ValueError, {"start": 1.5}, "start must be an int"),
        (ValueError, {"start": -1}, "start"),
        (ValueError, {"buffers": "avg"}, "buffers must be one of 'copy', 'average', got 'avg'"),
        (ValueError, {"validate": "average"}, "Did you mean 'averaged'"),
        (ValueError, {"at_end": None}, "at_end"),
        (ValueError, {"device": "gpu"}, "device must be one of 'cpu', got 'gpu'"),
    ]
    assert_refused(lt.EMA, cases)


def test_asking_for_an_average_before_there_is_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no average: fit a module with it first"):
        lt.EMA().averaged_state_dict()
    with pytest.raises(ValueError, match="no average of that Net"), lt.EMA().averaged(build()):
        pass


# ---- two processes


def fit_ranks(folder: str) -> dict[str, Any]:
    naive, module = NaiveEMA(0.9), build(Net)
    ema = lt.EMA(0.9, warmup=False)
    run = fit(module, callbacks=[ema, naive], strategy="ddp", devices=2, max_epochs=2)
    naive.assert_equals(module.state_dict())
    run.save_checkpoint(f"{folder}/half.ckpt")
    whole = trained(PlainNet, lt.EMA(0.9), strategy="ddp", devices=2, max_epochs=4)
    half = fit(build(PlainNet), callbacks=[lt.EMA(0.9)], strategy="ddp", devices=2, max_epochs=2)
    half.save_checkpoint(f"{folder}/plain.ckpt")
    rest = trained(PlainNet, lt.EMA(0.9), strategy="ddp", devices=2, max_epochs=4, ckpt_path=f"{folder}/plain.ckpt")
    assert_equal(whole, rest)
    return {name: value for name, value in ema.averaged_state_dict().items() if "running" not in name}


def test_ddp_averages_resumes_and_agrees_between_ranks(tmp_path: Any) -> None:
    assert_equal(*run_ranks(fit_ranks, str(tmp_path)))


@pytest.mark.parametrize("on", CUDA)
def test_on_a_device_an_average_equals_a_naive_one_and_can_live_in_host_memory(on: str) -> None:
    naive, module = NaiveEMA(0.9), build()
    with device(on) as there:
        settings = {"accelerator": there.name, "max_epochs": 3, "log_every_n_steps": 1}
        fit(module, callbacks=[lt.EMA(0.9, warmup=False), naive], **settings)
        for name, value in naive.average.items():
            found = module.state_dict()[name].cpu().double()
            torch.testing.assert_close(found, value.cpu(), atol=1e-6, rtol=1e-6)
        beside, apart = build(), build()
        fit(beside, callbacks=[lt.EMA(0.9)], accelerator=there.name)
        fit(apart, callbacks=[lt.EMA(0.9, device="cpu")], accelerator=there.name, log_every_n_steps=1)
        assert there.simulation is None or not there.simulation.races
    assert_close(weights(beside), weights(apart))


# ---- the module changed behind the callback's back


@pytest.mark.parametrize("through", [lambda weight: weight.data, torch.Tensor.detach], ids=["data", "detach"])
def test_weights_written_between_two_fits_are_respected(through: Any) -> None:
    module, ema = build(), lt.EMA(0.9)
    run = fit(module, callbacks=[ema], max_epochs=1)
    through(module.layers[0].weight).fill_(7.0)
    run.fit(module, loader(), loader(24))  # nothing left to do but to start
    assert module.layers[0].weight.eq(7).all()


def test_layers_replaced_after_a_fit_are_saved_and_trained(tmp_path: Any) -> None:
    module = build()
    run = fit(module, callbacks=[lt.EMA(0.9)], max_epochs=1)
    module.layers = nn.Sequential(nn.Linear(8, 2))
    assert_equal(saved_after(run, tmp_path / "x.ckpt"), weights(module))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(24))


@pytest.mark.parametrize("hook", ["on_before_backward", "on_before_zero_grad", "on_after_backward"])
def test_a_checkpoint_saved_between_forward_and_step_disturbs_nothing(hook: str, tmp_path: Any) -> None:
    def save(module: L.LightningModule, _: Any = None) -> None:
        module.trainer.save_checkpoint(tmp_path / "x.ckpt")

    assert_equal(trained(type("Saving", (Net,), {hook: save}), lt.EMA(0.9)), trained(Net, lt.EMA(0.9)))


@pytest.mark.filterwarnings("ignore")
def test_callbacks_of_pytorch_lightning_stay() -> None:
    stop = pytorch_lightning.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    run = fit(build(PlainNet), callbacks=[stop, lt.EMA()], max_epochs=8)
    assert run.current_epoch == 2
    assert stop in run.callbacks


# -- eMA(validate="both") and several averages in one run: each metric under its name, each checkpoint what it score---


def both(**settings: Any) -> lt.EMA:
    return lt.EMA(0.9, validate="both", **settings)


class Scores(Callback):
    """The metrics of each validation as a callback finds them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name})


def scores(*callbacks: Callback, net: type[Net] = NormNet, **settings: Any) -> list[dict[str, float]]:
    seen = Scores()
    fit(build(net), callbacks=[seen, *callbacks], max_epochs=3, **settings)
    return seen.rows


class Metered(NormNet):
    """Logs a torchmetrics object and an epoch-end value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        out = self(x)
        self.accuracy(out, y)
        self.outputs.append(out)
        self.log("val_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"val_spread": out.std(), "val_mean": out.mean()})

    def on_validation_epoch_end(self) -> None:
        self.log("val_count", float(len(self.outputs)))
        self.outputs.clear()


def rows_of(logger: CSVLogger, name: str) -> list[tuple[int, float]]:
    """Step and value of a metric in the file that the logger wrote."""
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.few(2)
@pytest.mark.parametrize("net", [NormNet, Metered])
@pytest.mark.parametrize("loaders", [1, 2])
def test_each_metric_is_that_of_its_weights(net: type[Net], loaders: int) -> None:
    if loaders == 2 and net is NormNet:
        step = lambda self, batch, i, dataloader_idx: Net.validation_step(self, batch, i)  # noqa: E731
        net = type("Two", (NormNet,), {"validation_step": step})
    val = [loader(24) for _ in range(loaders)]
    together, averaged, raw = (scores(e, net=net, val=val) for e in (both(), lt.EMA(0.9), lt.EMA(0.9, validate="raw")))
    for row, ours, theirs in zip(together, averaged, raw, strict=True):
        assert len(row) == 2 * len(ours)
        for name, value in ours.items():
            assert row[name] == value
        for name, value in theirs.items():
            base, slash, dataloader = name.partition("/")
            fork = "_epoch" if base.endswith("_epoch") else "_step" if base.endswith("_step") else ""
            assert row[f"{base.removesuffix(fork)}_raw{fork}{slash}{dataloader}"] == value


def test_training_is_bit_equal_to_training_without() -> None:
    averaged = build(Net)
    plain = trained(Net, val_check_interval=2)
    run = fit(averaged, callbacks=[both(at_end="raw")], val_check_interval=2)
    assert_equal(plain, weights(averaged))
    assert "log" not in vars(averaged)
    assert run.callbacks


def test_each_best_checkpoint_holds_the_weights_that_scored(tmp_path: Path) -> None:
    names, keeps = ("val_loss", "val_loss_raw"), {"save_last": True, "save_top_k": 2}
    files = {name: ModelCheckpoint(tmp_path / name, monitor=name, **keeps) for name in names}
    fit(build(NormNet), callbacks=[*files.values(), both()], enable_checkpointing=True, max_epochs=4)
    for name, checkpoint in files.items():
        for path, score in checkpoint.best_k_models.items():
            result = trainer().validate(build(NormNet), loader(24), ckpt_path=path, verbose=False)[0]
            assert result["val_loss"] == pytest.approx(float(score), abs=1e-7)
        last = torch.load(checkpoint.last_model_path, weights_only=True)
        assert bool(last["callbacks"]["EMA(decay=0.9)"]["raw"]) == (name == "val_loss")


@pytest.mark.parametrize("name", ["val_loss", "val_loss_raw"])
def test_a_run_resumes_exactly_from_either(name: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor=name, save_top_k=-1, filename="{epoch}")
    first, second = both(), both()
    whole = trained(NormNet, first, checkpoint, enable_checkpointing=True, max_epochs=4)
    rest = trained(NormNet, second, max_epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_equal(whole, rest)
    assert first._raw_metrics.state_dict() == second._raw_metrics.state_dict()


@pytest.mark.parametrize("order", [1, -1])
def test_early_stopping_follows_either_and_counts_one_validation(order: int) -> None:
    for monitor in ("val_loss", "val_loss_raw"):
        stopping = EarlyStopping(monitor, patience=3, mode="max", min_delta=1e9)  # never better than the first
        run = fit(build(NormNet), callbacks=[both(), stopping][::order], max_epochs=9)
        assert run.current_epoch == 4


def test_the_logger_gets_both_at_the_same_step(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    seen = Scores()
    fit(build(NormNet), callbacks=[both(), seen], logger=logger, max_epochs=2, log_every_n_steps=1)
    for name in ("val_loss", "val_loss_raw"):
        assert rows_of(logger, name) == [(5, seen.rows[0][name]), (11, seen.rows[1][name])]


class Fails(NormNet):
    """Raises in the chosen call of validation_step."""

    def __init__(self, call: int = 99, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.call, self.error, self.calls = call, error, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1
        if self.calls == self.call:
            raise self.error("planned")
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [2, 5])  # three batches each: the second fails in the raw pass, the fifth after it
def test_an_exception_in_either_pass_leaves_trainer_and_module_as_they_should_be(call: int, error: Any) -> None:
    module, ema = build(Fails, call=call, error=error), both()
    run = trainer(callbacks=[ema], max_epochs=1)
    L.seed_everything(7)
    with pytest.raises((RuntimeError, SystemExit)):
        run.fit(module, loader(), loader(24))
    assert_equal(weights(module), trained(Fails, max_epochs=1))
    assert ema in run.callbacks
    assert "log" not in vars(module)
    assert "run" not in vars(run.fit_loop.epoch_loop.val_loop)


def test_the_history_is_drawn_and_an_unknown_metric_named() -> None:
    ema, seen = both(), Scores()
    fit(build(NormNet), callbacks=[ema, seen], max_epochs=3)
    figure, ax = ema.plot()
    assert isinstance(figure, Figure)
    averaged, raw = ax.get_lines()
    assert list(averaged.get_xdata()) == [6, 12, 18]
    assert list(averaged.get_ydata()) == [row["val_loss"] for row in seen.rows]
    assert list(raw.get_ydata()) == [row["val_loss_raw"] for row in seen.rows]
    assert ema.plot("val_loss", ax)[1] is ax
    with pytest.raises(ValueError, match=r"no history of 'loss' .*recorded: 'val_loss'"):
        ema.plot("loss")
    with pytest.raises(ValueError, match='validate="both" records both'):
        lt.EMA().plot()


def both_ranks() -> list[dict[str, float]]:
    return scores(both(), strategy="ddp", devices=2)


def test_two_ranks_validate_both() -> None:
    first, second = run_ranks(both_ranks)
    assert all({"val_loss", "val_loss_raw"} == row.keys() for row in first)
    assert len(first) == len(second) == 3


def quiet(decay: float, **settings: Any) -> lt.EMA:
    return lt.EMA(decay, warmup=False, validate="raw", at_end="raw", **settings)


def test_several_averages_are_each_right_resume_and_one_is_shown(tmp_path: Path) -> None:
    def averages() -> list[lt.EMA]:
        return [quiet(0.5), lt.EMA(0.9, warmup=False), quiet(0.99)]

    naives, first, module = [NaiveEMA(d) for d in (0.5, 0.9, 0.99)], averages(), build(NormNet)
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
    fit(module, callbacks=[*first, *naives, checkpoint], enable_checkpointing=True, max_epochs=4)
    for ema, naive in zip(first, naives, strict=True):
        naive.assert_equals(ema.averaged_state_dict())
    naives[1].assert_equals(module.state_dict())
    resumed = averages()
    rest = trained(NormNet, *resumed, ckpt_path=tmp_path / "epoch=1.ckpt", max_epochs=4)
    for ema, other in zip(first, resumed, strict=True):
        assert_equal(ema.averaged_state_dict(), other.averaged_state_dict())
    assert_equal(weights(module), rest)


def test_several_averages_log_under_their_decay() -> None:
    run = fit(build(NormNet), callbacks=[quiet(0.5), quiet(0.9)], log_every_n_steps=1)
    assert run.callback_metrics["tricks/ema_decay/0.5"] == 0.5
    assert {"tricks/ema_decay/0.9", "tricks/ema_distance/0.5"} <= run.callback_metrics.keys()


@pytest.mark.parametrize("argument", ["validate", "at_end"])
def test_only_one_average_can_be_shown(argument: str) -> None:
    other = lt.EMA(0.99, **{"validate": "raw", "at_end": "raw", argument: "averaged"})
    with pytest.raises(MisconfigurationException, match=rf"^EMA\(decay=0.9\) and EMA\(decay=0.99, .*{argument}"):
        fit(build(), callbacks=[lt.EMA(0.9), other])


def test_two_averages_of_one_decay_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `EMA`"):
        trainer(callbacks=[lt.EMA(0.9), lt.EMA(0.9, warmup=False)])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_changed_decay_goes_on_with_the_average(tmp_path: Path) -> None:
    first, second = lt.EMA(0.9), lt.EMA(0.99)
    fit(build(NormNet), callbacks=[first]).save_checkpoint(tmp_path / "x.ckpt")
    fit(build(NormNet), callbacks=[second], ckpt_path=tmp_path / "x.ckpt", max_epochs=2)
    assert_equal(second.averaged_state_dict(), first.averaged_state_dict())
    with pytest.raises(MisconfigurationException, match=r"EMA\(decay=0.1\) is not in the checkpoint, which has EMA"):
        fit(build(NormNet), callbacks=[quiet(0.5), quiet(0.6)]).save_checkpoint(tmp_path / "y.ckpt")
        fit(build(NormNet), callbacks=[quiet(0.1)], ckpt_path=tmp_path / "y.ckpt", max_epochs=3)


def test_decay_and_distance_are_logged_with_and_without_a_logger(tmp_path: Path) -> None:
    class Distance(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            raw = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
            with ema.averaged(pl_module):
                averaged = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
            self.last = float((raw - averaged).norm() / raw.norm())

    ema, distance, logger = lt.EMA(0.9), Distance(), CSVLogger(tmp_path)
    run = fit(build(NormNet), callbacks=[ema, distance], logger=logger, log_every_n_steps=3)
    decays, distances = rows_of(logger, "tricks/ema_decay"), rows_of(logger, "tricks/ema_distance")
    assert [step for step, _ in decays] == [2, 5, 8, 11]
    assert decays[0][1] == pytest.approx(3 / 12)
    assert distances[-1][1] == pytest.approx(distance.last, rel=1e-5)
    assert float(run.callback_metrics["tricks/ema_distance"]) == pytest.approx(distance.last, rel=1e-5)
