"""EMA(validate="both") and several averages in one run: each metric under its name, each checkpoint what it scored."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure

import lightning_tricks as lt
from tests.nets import Net, NormNet, assert_equal, build, fit, loader, trainer, weights
from tests.ranks import run_ranks
from tests.reference.averages import NaiveEMA


def both(**settings: Any) -> lt.EMA:
    return lt.EMA(0.9, validate="both", **settings)


class Scores(Callback):
    """The metrics of each validation as a callback finds them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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


@pytest.mark.parametrize("net", [NormNet, Metered])
@pytest.mark.parametrize("loaders", [1, 2])
def test_each_metric_is_that_of_its_weights(net: type[Net], loaders: int) -> None:
    if loaders == 2 and net is NormNet:
        net = type(
            "Two", (NormNet,), {"validation_step": lambda self, b, i, dataloader_idx: Net.validation_step(self, b, i)}
        )
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
    plain, averaged = build(Net), build(Net)
    fit(plain, val_check_interval=2)
    run = fit(averaged, callbacks=[both(at_end="raw")], val_check_interval=2)
    assert_equal(weights(plain), weights(averaged))
    assert "log" not in vars(averaged)
    assert run.callbacks


def test_each_best_checkpoint_holds_the_weights_that_scored(tmp_path: Path) -> None:
    files = {
        name: ModelCheckpoint(tmp_path / name, monitor=name, save_last=True, save_top_k=2)
        for name in ("val_loss", "val_loss_raw")
    }
    module = build(NormNet)
    fit(module, callbacks=[*files.values(), both()], enable_checkpointing=True, max_epochs=4)
    for name, checkpoint in files.items():
        for path, score in checkpoint.best_k_models.items():
            result = trainer().validate(build(NormNet), loader(24), ckpt_path=path, verbose=False)[0]
            assert result["val_loss"] == pytest.approx(float(score), abs=1e-7)
        last = torch.load(checkpoint.last_model_path, weights_only=True)
        assert bool(last["callbacks"]["EMA(decay=0.9)"]["raw"]) == (name == "val_loss")


@pytest.mark.parametrize("name", ["val_loss", "val_loss_raw"])
def test_a_run_resumes_exactly_from_either(name: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor=name, save_top_k=-1, filename="{epoch}")
    whole, rest = build(NormNet), build(NormNet)
    first, second = both(), both()
    fit(whole, callbacks=[first, checkpoint], enable_checkpointing=True, max_epochs=4)
    fit(rest, callbacks=[second], max_epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_equal(weights(whole), weights(rest))
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
    module, ema, plain = build(Fails, call=call, error=error), both(), build(Fails)
    run = trainer(callbacks=[ema], max_epochs=1)
    pl.seed_everything(7)
    with pytest.raises((RuntimeError, SystemExit)):
        run.fit(module, loader(), loader(24))
    fit(plain, max_epochs=1)
    assert_equal(weights(module), weights(plain))
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


# ---- several averages


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
    resumed, rest = averages(), build(NormNet)
    fit(rest, callbacks=resumed, ckpt_path=tmp_path / "epoch=1.ckpt", max_epochs=4)
    for ema, other in zip(first, resumed, strict=True):
        assert_equal(ema.averaged_state_dict(), other.averaged_state_dict())
    assert_equal(weights(module), weights(rest))


def test_several_averages_log_under_their_decay() -> None:
    run = fit(build(NormNet), callbacks=[quiet(0.5), quiet(0.9)], log_every_n_steps=1)
    assert run.callback_metrics["tricks/ema_decay/0.5"] == 0.5
    assert {"tricks/ema_decay/0.9", "tricks/ema_distance/0.5"} <= run.callback_metrics.keys()


@pytest.mark.parametrize("argument", ["validate", "at_end"])
def test_only_one_average_can_be_shown(argument: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"^EMA\(decay=0.9\) and EMA\(decay=0.99, .*{argument}"):
        fit(
            build(), callbacks=[lt.EMA(0.9), lt.EMA(0.99, **{"validate": "raw", "at_end": "raw", argument: "averaged"})]
        )


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


# ---- what is logged


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
