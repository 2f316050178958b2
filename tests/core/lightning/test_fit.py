"""The step of the plan in a run's second life, against a plan that is written out step by step."""

from __future__ import annotations

import logging
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.loops.progress import _BaseProgress
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.core.lightning.steps import Plan, Span
from tests.few import few
from tests.nets import Stream, build, loader, trainer
from tests.ranks import run_ranks
from tests.schedules.recording import FALLING, SaveEveryStep, Tiny, ones

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),  # any data will do
    pytest.mark.filterwarnings("ignore:The schedule of the checkpoint"),  # that of the earlier plan
]


def written_out(epochs: int, batches: int, accumulated: int) -> list[tuple[int, int]]:
    """The position, an epoch and a batch, that each planned optimizer step begins at."""
    return [(epoch, first) for epoch in range(epochs) for first in range(0, batches, accumulated)]


def steps_before(plan: list[tuple[int, int]], position: tuple[int, int]) -> int:
    return sum(begins < position for begins in plan)


class StopAfter(L.Callback):
    """Raises after so many batches."""

    def __init__(self, batches: int, error: BaseException) -> None:
        self.left, self.error = batches, error

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise self.error


def linear_lrs(total: int, first: int = 0) -> list[float]:
    return [1 - step / total for step in range(first, total)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("planned")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("stopped", [1, 5, 10, 11, 14, 20])
def test_a_fit_after_an_interrupted_one_has_the_rates_that_are_left(stopped: int, error: BaseException) -> None:
    module, run = Tiny(lt.linear), trainer(callbacks=[StopAfter(stopped, error)])
    with pytest.raises((SystemExit, RuntimeError)):
        run.fit(module, ones(10))
    run.fit(module, ones(10))
    whole = (stopped - 1) // 10  # epochs; one that was interrupted in its last hook is repeated
    assert module.optimizer.lrs == pytest.approx(linear_lrs(20, 10 * whole))


def test_a_second_fit_on_other_data_goes_on_in_the_new_plan(caplog: pytest.LogCaptureFixture) -> None:
    mixup = lt.Mixup(stop=0.9)
    mixed: list[bool] = []

    class Scheduled(type(build())):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return lt.linear(super().configure_optimizers(), self)

    swa = lt.SWA(start=0.75)
    watch = LambdaCallback(on_train_batch_start=lambda *_: mixed.append(mixup._is_active(run)))
    run = trainer(max_epochs=1, callbacks=[mixup, watch, swa])
    module = build(Scheduled)
    run.fit(module, loader(80, 8), loader(8))
    mixed.clear()
    run.fit_loop.max_epochs = 2
    run.accumulate_grad_batches = 2
    run.fit(module, loader(160, 8), loader(8))
    assert mixed == [True] * 16 + [False] * 4  # 18 of 20 steps are .9 of the plan, 10 of them in the first epoch
    assert swa._averages is not None
    assert swa._averages.updates > 0
    assert run.lr_scheduler_configs[0].scheduler.last_epoch == 20
    assert run.optimizers[0].param_groups[0]["lr"] == 0


CHANGES: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 3},
    {"batches": 3},
    {"batches": 10},
    {"limit_train_batches": 0.5},
    {"max_epochs": 6},
    {"max_epochs": 6, "batches": 4, "accumulate_grad_batches": 2},
    {"max_steps": 21},
    {"max_steps": 12},
    {"max_epochs": -1, "max_steps": 24},
]


@pytest.mark.parametrize(("first", "every"), few([({}, 5), ({}, 1), ({"accumulate_grad_batches": 2}, 1)], 1))
def test_a_resumed_fit_goes_on_at_its_place_in_the_new_plan(first: dict[str, Any], every: int, tmp_path: Path) -> None:
    base = {"max_epochs": 4, "batches": 5, "max_steps": -1, "limit_train_batches": 1.0, "accumulate_grad_batches": 1}

    def train(module: Tiny, given: dict[str, Any], **settings: Any) -> L.Trainer:
        given = {**base, **given}
        batches = given.pop("batches")
        run = trainer(**given, callbacks=settings.pop("callbacks", None))
        run.fit(module, ones(batches), **settings)
        return run

    before = Tiny(lt.linear)
    train(before, first, callbacks=[SaveEveryStep(tmp_path)])
    old = {**base, **first}
    began = written_out(4, 5, old["accumulate_grad_batches"])
    for change, taken in list(product(CHANGES, range(1, len(began))))[::every]:
        now = {**base, **first, **change}
        module = Tiny(lt.linear)
        train(module, {**first, **change}, ckpt_path=tmp_path / f"{taken}.ckpt")
        (epoch, batch), window = began[taken], now["accumulate_grad_batches"]
        batches = int(now["batches"] * now["limit_train_batches"])
        plan = written_out(max(now["max_epochs"], 0), batches, window)
        if batches != 5:  # the same fraction of the epoch, rounded down to whole windows
            batch = batch * batches // 5 // window * window
        step = steps_before(plan, (epoch, batch)) - (batch % window > 0)  # the rest of a window has a step of its own
        left, by_steps = len(plan) - step, now["max_steps"] - taken
        total = len(plan)
        if now["max_epochs"] == -1 or (now["max_steps"] != -1 and by_steps < left):
            total, step, left = now["max_steps"], taken, by_steps
        expected = linear_lrs(total, step) if left > 0 else []
        what = f"{change} at step {taken}, batch {batch} of epoch {epoch}"
        assert module.optimizer.lrs == pytest.approx(expected), what
        if expected and not change:
            assert module.optimizer.lrs == before.optimizer.lrs[taken:], what


class Validated(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class SaveIn(L.Callback):
    """Saves in a hook; the default of ModelCheckpoint is the end of a validation."""

    def __init__(self, folder: Path, hook: str) -> None:
        self.folder = folder
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


@pytest.mark.few(3)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("batches", [3, 5, 8])
def test_an_epoch_that_was_over_is_over_with_another_number_of_batches(hook: str, batches: int, tmp_path: Path) -> None:
    trainer(callbacks=[SaveIn(tmp_path, hook)], max_epochs=3).fit(Validated(lt.linear), ones(5), ones(1))
    for epoch in (1, 2):
        module = Validated(lt.linear)
        trainer(max_epochs=3).fit(module, ones(batches), ones(1), ckpt_path=tmp_path / f"{5 * epoch}.ckpt")
        assert module.optimizer.lrs == pytest.approx(linear_lrs(3 * batches, epoch * batches))


@pytest.mark.few(2)
@pytest.mark.parametrize("factory", FALLING, ids=lambda factory: factory.__name__)
def test_every_curve_ends_where_training_ends(factory: Any, tmp_path: Path) -> None:
    def schedule(optimizer: Any, module: Any) -> Any:
        return factory(optimizer, module, warmup=4)

    trainer(callbacks=[SaveEveryStep(tmp_path)], max_epochs=4).fit(Tiny(schedule), ones(10))
    unbroken = Tiny(schedule)
    trainer(max_epochs=4, accumulate_grad_batches=2).fit(unbroken, ones(10))
    first = Tiny(schedule)
    trainer(max_epochs=4).fit(first, ones(10))
    for taken in (10, 20, 30):
        module = Tiny(schedule)
        run = trainer(max_epochs=4, accumulate_grad_batches=2)
        run.fit(module, ones(10), ckpt_path=tmp_path / f"{taken}.ckpt")
        assert len(module.optimizer.lrs) == 20 - taken // 2
        # It goes on where it was: four steps of warm-up that were taken are two of the plan.
        assert module.optimizer.lrs[0] == pytest.approx(first.optimizer.lrs[taken], abs=0.05)
        curve = run.lr_scheduler_configs[0].scheduler
        assert curve.last_epoch == 20
        assert curve.curve(20) == pytest.approx(curve.curve(10**9))


def test_a_warm_up_of_so_many_steps_is_not_repeated_when_steps_become_fewer(tmp_path: Path) -> None:
    def schedule(optimizer: Any, module: Any) -> Any:
        return lt.cosine(optimizer, module, warmup=12)

    first = Tiny(schedule)
    trainer(callbacks=[SaveEveryStep(tmp_path)], max_epochs=4).fit(first, ones(10))
    module = Tiny(schedule)
    trainer(max_epochs=4, accumulate_grad_batches=5).fit(module, ones(10), ckpt_path=tmp_path / "20.ckpt")
    assert module.optimizer.lrs[0] == pytest.approx(first.optimizer.lrs[20])
    assert module.optimizer.lrs == sorted(module.optimizer.lrs, reverse=True)


def test_a_changed_plan_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(callbacks=[SaveEveryStep(tmp_path)], max_epochs=4).fit(Tiny(lt.linear), ones(10))
    line = (
        "The plan of training has changed from 40 to {} optimizer steps, of which {} are left, with a learning rate of"
    )
    for settings, told in (
        ({}, None),
        ({"accumulate_grad_batches": 2}, f"{line.format(20, 10)} 0.5 now and 0 at the end."),
        ({"max_epochs": 8}, f"{line.format(80, 60)} 0.75 now and 0 at the end."),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
            trainer(**{"max_epochs": 4, **settings}).fit(Tiny(lt.linear), ones(10), ckpt_path=tmp_path / "20.ckpt")
        assert [text for text in caplog.messages if text.startswith("The plan")] == ([] if told is None else [told])


def test_a_place_outlives_two_changes_and_is_saved_after_the_fit(tmp_path: Path) -> None:
    trainer(callbacks=[SaveEveryStep(tmp_path)], max_epochs=4).fit(Tiny(lt.linear), ones(10))
    run = trainer(max_epochs=4, accumulate_grad_batches=2, limit_train_batches=10)
    second = Tiny(lt.linear)
    with pytest.raises(RuntimeError, match="planned"):
        run.callbacks.append(StopAfter(12, RuntimeError("planned")))
        run.fit(second, ones(10), ckpt_path=tmp_path / "10.ckpt")
    assert second.optimizer.lrs == pytest.approx(linear_lrs(20, 5)[:6])
    run.save_checkpoint(tmp_path / "again.ckpt")
    for settings, expected in (({"accumulate_grad_batches": 2}, linear_lrs(20, 11)), ({}, linear_lrs(40, 22))):
        third = Tiny(lt.linear)
        trainer(max_epochs=4, **settings).fit(third, ones(10), ckpt_path=tmp_path / "again.ckpt")
        assert third.optimizer.lrs == pytest.approx(expected)


@pytest.mark.parametrize("epochs", [10**9, sys.maxsize])
def test_any_number_of_epochs_is_counted_at_once(epochs: int) -> None:
    growing = {0: 4, 3: 2, 10**6: 1}
    for callbacks in (
        [lt.EMA(start=0.0)],
        [lt.Mixup(stop=0.5)],
        [lt.BatchSizeWarmup(final=4, over=0.25)],
        [GradientAccumulationScheduler(growing)],
    ):
        module = Tiny(lt.flat_cos if not isinstance(callbacks[0], lt.Mixup) else lambda optimizer, _: optimizer)
        begun = time.perf_counter()
        run = trainer(max_epochs=epochs, max_steps=3, callbacks=callbacks)
        run.fit(build(), loader(80), loader(8)) if isinstance(callbacks[0], lt.Mixup) else run.fit(module, ones(20))
        assert run.global_step == 3
        assert time.perf_counter() - begun < 20  # minutes, or a MemoryError, with a list of epochs


def test_the_closed_form_counts_as_a_list_of_epochs_does() -> None:
    spans = (Span(0, 7, 4), Span(2, 7, 2), Span(5, 14, 3))
    plan = Plan(spans, 9, None)
    of_epoch = [max(span for span in spans if span.first <= epoch) for epoch in range(9)]
    listed = [(epoch, batch) for epoch in range(9) for batch in range(0, of_epoch[epoch][1], of_epoch[epoch][2])]
    assert plan.placed(0, 0, 0) == (len(listed), 0)
    for epoch in range(9):
        for batch in range(of_epoch[epoch].batches + 1):
            begun = steps_before(listed, (epoch, batch))
            inside = 0 < batch < of_epoch[epoch].batches and batch % of_epoch[epoch].accumulated > 0
            assert plan.steps_before(epoch, batch) == begun - inside


@pytest.mark.parametrize("batches", [True, 3])
def test_fast_dev_run_tries_a_stream_whose_real_run_counts_steps(batches: int) -> None:
    def steps(**settings: Any) -> int:
        module = Tiny(lt.linear)
        trainer(**settings).fit(module, DataLoader(Stream(torch.full((12, 1), 0.1)), batch_size=1))
        return len(module.optimizer.lrs)

    assert steps(max_epochs=-1, max_steps=8) == 8
    assert steps(max_epochs=-1, max_steps=8, fast_dev_run=batches) == int(batches)


def _lrs_on_a_rank(folder: str | None, ckpt_path: str | None) -> list[float]:
    module = Tiny(lt.linear)
    callbacks = [] if folder is None else [SaveIn(Path(folder), "on_train_epoch_end")]
    run = trainer(strategy="ddp", devices=2, max_epochs=4, callbacks=callbacks)
    run.fit(module, ones(20, batch_size=2), ckpt_path=ckpt_path)
    return module.optimizer.lrs


def test_a_fit_resumed_on_another_number_of_processes_goes_on_where_it_was(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    trainer(callbacks=[SaveEveryStep(one)], max_epochs=4).fit(Tiny(lt.linear), ones(20, batch_size=2))
    for taken, first in ((20, 10), (26, 13)):  # at the end of an epoch of ten steps, and amid one
        for lrs in run_ranks(_lrs_on_a_rank, None, str(one / f"{taken}.ckpt")):
            assert lrs == pytest.approx(linear_lrs(20, first))
    run_ranks(_lrs_on_a_rank, str(two), None)
    module = Tiny(lt.linear)
    trainer(max_epochs=4).fit(module, ones(20, batch_size=2), ckpt_path=two / "10.ckpt")
    assert module.optimizer.lrs == pytest.approx(linear_lrs(40, 20))


def test_lightning_saves_and_restores_any_count_of_a_loop(tmp_path: Path) -> None:
    """A ``_BaseProgress`` among the attributes of a loop is in its state, and those who lack it leave it out."""

    class Count(_BaseProgress):
        value = 0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.value = state_dict["value"]

    first, second, stock = trainer(), trainer(), trainer()
    for run in (first, second):
        run.fit_loop.mine = Count()
    first.fit_loop.mine.value = 3
    first.fit(Tiny(), ones(2))
    first.save_checkpoint(tmp_path / "a.ckpt")
    for run in (second, stock):
        run.fit(Tiny(), ones(2), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert second.fit_loop.mine.value == 3
