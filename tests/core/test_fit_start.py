"""The table of active tricks: of every kind, once a fit, on rank zero, where a stock Trainer shows a model summary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core import rank_zero

import lightning_tricks as lt
from lightning_tricks.core.fit_start import active
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Enrolment, public_name
from tests.nets import NormNet, PlainNet, build, fit, loader, trainer
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
TITLE = "Active tricks"
FEW = {"enable_model_summary": True, "max_epochs": 2, "limit_val_batches": 0}  # 6 batches an epoch


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return caplog


def tables(shown: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in shown.records if TITLE in record.getMessage()]


class Asked(Callback):
    """What is active when training starts."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rows = active(trainer)


def rows(*callbacks: Any, kind: Any = PlainNet, **settings: Any) -> list[tuple[str, str]]:
    asked = Asked()
    fit(build(kind), callbacks=[*callbacks, asked], **{**FEW, **settings})
    return asked.rows


class Curved(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.flat_cos(super().configure_optimizers(), self, warmup=0.25)


class Plateau(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.reduce_on_plateau(super().configure_optimizers(), self, monitor="train_loss", warmup=3)


class Tail(PlainNet):
    def configure_optimizers(self) -> Any:
        return lt.swa_tail(lt.cosine(super().configure_optimizers(), self), swa_lr=0.05)


class Sharp(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.3, adaptive=True)


def test_fractions_are_steps() -> None:
    assert rows(lt.EMA(start=0.75), lt.Mixup(0.4, stop=0.9)) == [
        ("EMA", "decay 0.999, start 9 of 12"),
        ("Mixup", "alpha 0.4, start 0, stop 11 of 12"),
    ]
    assert rows(lt.GradualUnfreeze([2, 0.5], parameters=[r"s\.0\.w", r"s\.0\.b"])) == [
        ("GradualUnfreeze", r"at [2, 6 of 12], parameters [s\.0\.w, s\.0\.b]")
    ]


def test_a_step_shown_is_the_step_at_which_it_begins() -> None:
    class Begins(Callback):
        steps: list[int] = []  # noqa: RUF012

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.callbacks[0].drawn is not None:  # of the batch that is about to be trained on
                self.steps.append(trainer.global_step)

    Begins.steps = []
    assert rows(lt.Mixup(start=0.3), Begins())[0] == ("Mixup", "alpha 0.2, start 4 of 12, stop 12 of 12")
    assert Begins.steps[0] == 4


def test_without_a_total_fractions_stay() -> None:
    found = rows(lt.Mixup(start=3), max_epochs=-1, max_steps=5, max_time={"seconds": 100})
    assert found == [("Mixup", "alpha 0.2, start 3, stop 1")]


def test_epochs_of_growth() -> None:
    found = rows(lt.BatchSizeWarmup(final=4, over=0.5), max_epochs=4)
    assert found == [("BatchSizeWarmup", "factors [1, 2, 4], over 2 epochs")]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Curved, ("flat_cos", "total_steps 12, warmup 3, flat 9, floor 0")),
        (Plateau, ("reduce_on_plateau", "factor 0.1, patience 10, warmup 3, floor 0")),
        (Tail, ("swa_tail", "of cosine (total_steps 12, warmup 0, floor 0), start 9, level 0.5, anneal 0")),
        (Sharp, ("SAM", "rho 0.3, adaptive True")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_without_any_callback(kind: Any, expected: Any, shown: Any) -> None:
    run = trainer(**FEW)
    before = list(run.callbacks)
    run.fit(build(kind), loader())
    (text,) = tables(shown)
    assert all(word in text for word in (expected[0], expected[1].split(",")[0]))
    assert [each for each in run.callbacks if type(each).__name__ != "MixinHooks"] == before
    assert rows(kind=kind) == [expected]


def test_a_preset_alone(shown: Any) -> None:
    fit(build(PlainNet), **FEW, strategy="single_bf16")
    (text,) = tables(shown)
    assert "single_bf16" in text
    assert "precision bf16-mixed" in text


def test_the_callback_schedule() -> None:
    assert rows(lt.LRSchedule("cosine", warmup=2)) == [
        ("LRSchedule", "curve cosine"),
        ("cosine", "total_steps 12, warmup 2, floor 0"),
    ]


def test_lengths_of_curves_are_whole_steps_and_factors_are_not() -> None:
    dropping = lt.LRSchedule("step_decay", milestones=[0.3, 0.55], gamma=0.5, warmup=0.1)
    assert rows(dropping)[1] == ("step_decay", "total_steps 12, warmup 2, milestones [4, 7], gamma 0.5, floor 0")


NO_PART_OF_A_FIT = ("lean_loss", "optimizer")  # functions, of which it sees what they have made


@pytest.mark.few(10)
@pytest.mark.parametrize("name", [name for name in SETTINGS if public_name(name) not in NO_PART_OF_A_FIT])
def test_every_trick_is_in_the_table(name: str) -> None:
    trick: Enrolment = SETTINGS[name]
    asked = Asked()
    run = {**FEW, "max_steps": 3, "callbacks": [*trick.make_callbacks("on"), asked]}
    fit(build(lambda: trick.module(NormNet, "on")()), **run)
    assert {"SAMMixin": "SAM", "SAMCallback": "SAM"}.get(public_name(name), public_name(name)) in dict(asked.rows)


def test_once_a_fit_and_again_in_the_next(shown: Any) -> None:
    module, run = build(Curved), trainer(**FEW, callbacks=[lt.EMA(), lt.Mixup()], num_sanity_val_steps=1)
    before = list(run.callbacks)
    run.fit(module, loader(), loader())
    assert len(tables(shown)) == 1
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    assert len(tables(shown)) == 1
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(), loader())
    assert len(tables(shown)) == 2
    assert run.callbacks == before


def test_a_resumed_fit_has_one_too(shown: Any, tmp_path: Path) -> None:
    fit(build(NormNet), **FEW, callbacks=[lt.EMA(start=0.5)]).save_checkpoint(tmp_path / "a.ckpt")
    fit(build(NormNet), **{**FEW, "max_epochs": 4}, callbacks=[lt.EMA(start=0.5)], ckpt_path=tmp_path / "a.ckpt")
    first, second = tables(shown)
    assert "start 6 of 12" in first
    assert "start 12 of 24" in second


def test_without_a_model_summary_there_is_none(shown: Any) -> None:
    fit(build(Sharp), **{**FEW, "enable_model_summary": False}, callbacks=[lt.EMA()], strategy="single_bf16")
    assert not tables(shown)


def test_lightnings_log_level_silences_it(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, logger="lightning.pytorch")
    fit(build(PlainNet), **FEW, callbacks=[lt.EMA()])
    assert not tables(caplog)


def test_a_stock_fit_says_nothing(shown: Any) -> None:
    fit(build(PlainNet), **FEW)
    assert not tables(shown)


class Late(Callback):
    def __init__(self) -> None:
        self.hooks: list[str] = []

    def setup(self, *_: Any, **__: Any) -> None:
        self.hooks.append("setup")

    def on_train_start(self, *_: Any) -> None:
        self.hooks.append("on_train_start")


class Adds(Callback):
    """Brings another callback."""

    def __init__(self) -> None:
        self.late = Late()

    def setup(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        trainer.callbacks.append(self.late)


@pytest.mark.parametrize("tricks", [0, 1])
def test_a_callback_that_comes_in_setup_misses_no_hook(tricks: int) -> None:
    adds = Adds()
    run = fit(build(PlainNet), **FEW, callbacks=[*[lt.EMA()] * tricks, adds])
    assert adds.late.hooks == ["setup", "on_train_start"]
    assert run.callbacks[-1] is adds.late


def test_trials_say_nothing(shown: Any) -> None:
    run = trainer(**FEW, callbacks=[lt.EMA()], strategy="single_bf16")
    before = list(run.callbacks)
    lt.find_lr(run, build(Curved), loader(), steps=12)
    lt.find_batch_size(run, build(Sharp), loader(), max_size=8)
    assert not tables(shown)
    assert run.callbacks == before


class Fails(PlainNet):
    def setup(self, stage: str) -> None:
        raise RuntimeError("as asked")


def test_a_fit_that_fails_leaves_the_callbacks_alone(shown: Any) -> None:
    run = trainer(**FEW, callbacks=[lt.EMA()])
    before = list(run.callbacks)
    with pytest.raises(RuntimeError, match="as asked"):
        run.fit(build(Fails), loader())
    assert run.callbacks == before
    run.fit(build(PlainNet), loader())
    assert len(tables(shown)) == 1


def test_nothing_left_to_train(shown: Any) -> None:
    run = trainer(**{**FEW, "max_epochs": 0}, callbacks=[lt.EMA()])
    before = list(run.callbacks)
    run.fit(build(PlainNet), loader())
    assert run.callbacks == before


def rank_says(strategy: str) -> list[str]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = rank_zero.log  # of the Lightning that was imported last
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    fit(build(Curved), **{**FEW, "strategy": strategy, "devices": 2}, callbacks=[lt.EMA(start=0.5)])
    return [text for text in said if TITLE in text]


@pytest.mark.parametrize("strategy", ["ddp_bf16", "fsdp2_bf16", "zero3_bf16"])
def test_on_rank_zero_alone(strategy: str) -> None:
    first, second = run_ranks(rank_says, strategy)
    assert second == []
    assert len(first) == 1
    assert all(word in first[0] for word in (strategy, "EMA", "of 6", "flat_cos"))
