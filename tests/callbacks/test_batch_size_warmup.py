"""BatchSizeWarmup equals loops written by hand, and optimizer_steps counts what it takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, WeightedRandomSampler

import lightning_tricks as lt
from lightning_tricks.callbacks.batch_size_warmup import BatchSizeWarmup, doublings, factor_at
from lightning_tricks.schedules import optimizer_steps
from tests.callbacks.test_lr_schedule import cli  # noqa: F401
from tests.core.lightning.test_steps import SizedStream
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    Stream,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    rank_loader,
    trained,
    trainer,
    weights,
)
from tests.ranks import run_ranks
from tests.refusals import assert_refused
from tests.schedules.recording import SaveEveryStep, Tiny, ones

GROW = ("accumulate", "loader")


class Counted(Tiny):
    """Asks for the count in configure_optimizers and in each epoch; keeps the sizes of its batches."""

    def configure_optimizers(self) -> Any:
        self.totals = [optimizer_steps(self.trainer)]
        self.sizes: list[list[int]] = []
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.totals.append(optimizer_steps(self.trainer))

    def on_train_epoch_end(self) -> None:
        self.totals.append(optimizer_steps(self.trainer))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0 or not self.sizes:  # resumed
            self.sizes.append([])
        self.sizes[-1].append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    @property
    def taken(self) -> int:
        return len(self.optimizer.lrs)


class Validated(Counted):
    """Keeps the sizes of its validation batches, and when validation ran."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.validated: list[int] = []
        self.at: list[tuple[int, int]] = []

    def on_validation_start(self) -> None:
        self.at.append((self.trainer.current_epoch, self.trainer.fit_loop.batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(len(batch[0]))


def assert_counts(train: Any, callback: BatchSizeWarmup, **settings: Any) -> Counted:
    module = Counted()
    run = trainer(**{"max_epochs": 5, "callbacks": [callback], **settings})
    run.fit(module, train)
    assert set(module.totals) == {module.taken}, (settings, module.totals, module.taken)
    assert run.accumulate_grad_batches == settings.get("accumulate_grad_batches", 1)
    return module


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "factors"), [(1, 8, [1, 2, 4, 8]), (3, 3, [3]), (2, 12, [2, 4, 8, 12]), (1, 2, [1, 2])]
)
def test_doublings_end_with_the_end(start, end, factors):
    assert doublings(start, end) == factors


def test_all_but_the_last_factor_share_the_epochs_of_growth():
    assert [factor_at(epoch, [1, 2, 4, 8], 6) for epoch in range(8)] == [1, 1, 2, 2, 4, 4, 8, 8]
    assert [factor_at(epoch, [1, 2, 4, 8], 1) for epoch in range(3)] == [1, 8, 8]
    assert [factor_at(epoch, [5], 3) for epoch in range(4)] == [5] * 4


@pytest.mark.parametrize(
    ("over", "epochs", "expected"),
    [(0.5, 4, [1, 1, 2, 2]), (0.7, 10, [1] * 7 + [2] * 3), (0.9, 3, [1, 1, 2]), (0.1, 2, [1, 2]), (3, 4, [1, 1, 1, 2])],
)
def test_over_is_epochs_or_a_fraction_of_them(over, epochs, expected):
    callback = BatchSizeWarmup(final=2, over=over)
    assert [callback.factor(trainer(max_epochs=epochs), epoch) for epoch in range(epochs)] == expected


# -- naive references -------------------------------------------------------------------------------------------------


def by_hand(
    module: Net,
    batches: Callable[[int], Any],
    factors: list[int],
    scale: Callable[[int], float] = lambda factor: 1.0,
    schedule: Callable[[int], float] = lambda step: 1.0,
) -> list[float]:
    """Windows of ``factors[epoch]`` batches; gives the learning rates of the steps."""
    optimizer, lrs = module.configure_optimizers(), []
    for epoch, factor in enumerate(factors):
        everything = list(batches(epoch))
        for start in range(0, len(everything), factor):
            optimizer.zero_grad()
            for x, y in everything[start : start + factor]:
                (F.cross_entropy(module(x), y) / factor).backward()
            lrs.append(module.lr * schedule(len(lrs)) * scale(factor))
            optimizer.param_groups[0]["lr"] = lrs[-1]
            optimizer.step()
    return lrs


@pytest.mark.parametrize("lr_rule", [None, "linear"])
def test_accumulation_that_grows_equals_a_loop_by_hand(lr_rule):
    reference = build(NormNet)
    by_hand(reference, lambda epoch: loader(), [1, 2, 4, 4], lambda factor: factor / 4 if lr_rule else 1.0)
    assert_equal(weights(reference), trained(NormNet, BatchSizeWarmup(final=4, lr_rule=lr_rule), max_epochs=4))


def test_a_loader_that_grows_equals_a_loop_by_hand():
    reference = build(NormNet)
    factors = [1, 2, 4, 4]
    by_hand(reference, lambda epoch: loader(batch_size=8 * factors[epoch]), [1] * 4)
    assert_equal(weights(reference), trained(NormNet, BatchSizeWarmup(final=4, grow="loader"), max_epochs=4))


def test_both_ways_train_alike_where_samples_do_not_meet_in_a_batch():
    runs = [trained(PlainNet, BatchSizeWarmup(final=4, grow=grow), train=loader(64), max_epochs=4) for grow in GROW]
    assert_close(*runs)


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_growth_it_is_a_plain_loader(shuffle):
    module = trained(Net, BatchSizeWarmup(2, final=2, grow="loader"), train=loader(shuffle=shuffle), max_epochs=3)
    assert_equal(module, trained(train=loader(batch_size=16, shuffle=shuffle), max_epochs=3))


# -- the count --------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("grow", GROW)
@pytest.mark.parametrize("batches", [4, 5, 11])
def test_the_count_is_what_a_fit_takes(batches, grow):
    for limit, max_steps, over in product((1.0, 0.8, 4), (-1, 6, 1000), (0.6, 4)):
        settings = {"limit_train_batches": limit, "max_steps": max_steps, "max_epochs": 5}
        assert_counts(ones(batches), BatchSizeWarmup(final=3, over=over, grow=grow), **settings)


def test_every_size_is_trained_with():
    module = assert_counts(ones(7), BatchSizeWarmup(final=4, over=3, grow="loader"))
    assert module.sizes == [[1] * 7, [1] * 7, [2, 2, 2, 1], [4, 3], [4, 3]]
    assert module.taken == 22
    assert assert_counts(ones(7), BatchSizeWarmup(final=4, over=3)).taken == 22


@pytest.mark.parametrize("grow", GROW)
def test_a_given_sequence_is_followed(grow):
    factors = [1, 3, 3, 5]
    callback = BatchSizeWarmup(factors=factors, over=3, grow=grow)
    assert assert_counts(ones(10), callback).taken == 10 + 4 + 4 + 2 + 2
    assert callback.factors is factors
    assert factors == [1, 3, 3, 5]


@pytest.mark.parametrize("grow", GROW)
def test_max_steps_alone_is_the_count(grow):
    callback = BatchSizeWarmup(final=4, over=2, grow=grow)
    assert assert_counts(ones(5), callback, max_epochs=-1, max_steps=9).taken == 9


@pytest.mark.few(3)
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_a_growing_loader_with_workers_is_counted(workers, drop_last):
    train = ones(11, batch_size=2, drop_last=drop_last, **workers)
    module = assert_counts(train, BatchSizeWarmup(final=4, grow="loader"), max_epochs=4)
    whole = [[2] * 5, [4] * 2, [8], [8]]
    assert module.sizes == (whole if drop_last else [[*sizes, 11 - sum(sizes)] for sizes in whole])


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_sampler": BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)},
        {"batch_size": 2, "sampler": WeightedRandomSampler([1.0] * 11, 9)},
        {"batch_size": 2, "shuffle": True},
    ],
    ids=["batch_sampler", "sampler", "shuffle"],
)
def test_a_plain_batch_sampler_grows_over_any_sampler(settings):
    module = assert_counts(ones(11, **settings), BatchSizeWarmup(final=4, grow="loader"), max_epochs=4)
    assert [sizes[0] for sizes in module.sizes] == [2, 4, 8, 8]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_all_loaders_of_a_combined_one_grow(mode):
    combined = CombinedLoader({"a": ones(12), "b": ones(7)}, mode)
    callback = BatchSizeWarmup(final=4, over=2, grow="loader")

    class Two(Counted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return Tiny.training_step(self, batch, batch_idx)

    module = Two()
    trainer(max_epochs=3, callbacks=[callback], limit_train_batches=0.9).fit(module, combined)
    assert set(module.totals) == {module.taken}


def test_a_growing_loader_may_be_accumulated_too():
    module = assert_counts(ones(9), BatchSizeWarmup(final=2, grow="loader"), accumulate_grad_batches=2, max_epochs=2)
    assert module.taken == 5 + 3


@pytest.mark.parametrize("grow", GROW)
def test_fast_dev_run_is_counted(grow):
    assert assert_counts(ones(7), BatchSizeWarmup(final=4, grow=grow), fast_dev_run=3).taken == 3


def _count_on_a_rank() -> list[Any]:
    found = []
    for grow, limit, max_steps in product(GROW, (1.0, 3), (-1, 8)):
        module, warmup = Counted(), BatchSizeWarmup(final=3, over=3, grow=grow, lr_rule="linear")
        settings = {"max_epochs": 4, "max_steps": max_steps, "limit_train_batches": limit}
        trainer(strategy="ddp", devices=2, callbacks=[warmup], **settings).fit(module, ones(11, shuffle=True))
        found.append((set(module.totals) == {module.taken}, module.taken, module.optimizer.lrs))
    return found


@pytest.mark.slow
def test_the_count_is_what_two_ranks_take():
    ranks = run_ranks(_count_on_a_rank)
    assert ranks[0] == ranks[1]
    assert all(right for right, *_ in ranks[0])
    assert ranks[0][0][1] == ranks[0][4][1] == 6 + 6 + 3 + 2
    assert ranks[0][0][2] == [1 / 3] * 12 + [2 / 3] * 3 + [1.0] * 2


def _rank_weights(grow: str) -> Any:
    callback = BatchSizeWarmup(final=4, grow=grow, lr_rule="linear")
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    return trained(PlainNet, callback, train=rank_loader(), max_epochs=4, **settings)


@pytest.mark.parametrize("grow", GROW)
def test_two_ranks_train_as_one_process_on_their_batches_together(grow):
    first, second = run_ranks(_rank_weights, grow)
    assert_equal(first, second)
    reference, factors = build(PlainNet), [1, 2, 4, 4]
    if grow == "accumulate":
        by_hand(reference, lambda epoch: loader(48, 16), factors, lambda factor: factor / 4)
    else:
        scales = [0.25] * 3 + [0.5] * 2 + [1.0] * 2
        by_hand(reference, lambda epoch: loader(48, 16 * factors[epoch]), [1] * 4, schedule=lambda step: scales[step])
    assert_close(first, weights(reference))


# -- resuming ---------------------------------------------------------------------------------------------------------


class SaveAt(L.Callback):
    """Saves in a hook of an epoch."""

    def __init__(self, hook: str, path: Any, epoch: int = 1, batch: int | None = None) -> None:
        self.epoch, self.batch, self.path = epoch, batch, path
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and self.batch in (None, trainer.fit_loop.batch_idx):
            trainer.save_checkpoint(self.path)

    def on_validation_end(self, *_: Any) -> None:
        pass


MOMENTS = {
    "in an epoch": ("on_train_batch_end", 1),
    "last batch": ("on_train_batch_end", 4),
    "validation": ("on_validation_end", None),
    "epoch end": ("on_train_epoch_end", None),
}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")  # all batches are alike here
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("grow", "workers"), [("accumulate", 0), ("loader", 0), pytest.param("loader", 1, marks=pytest.mark.slow)]
)
def test_a_resumed_fit_goes_on_as_if_it_had_not_stopped(tmp_path, grow, workers, moment):
    def run(*callbacks: Any, **settings: Any) -> Validated:
        module = Validated(lt.linear)
        warmup = BatchSizeWarmup(final=8, over=4, grow=grow, lr_rule="linear")
        train = ones(5, num_workers=workers)
        trainer(max_epochs=6, callbacks=[warmup, *callbacks]).fit(module, train, ones(1), **settings)
        assert len(set(module.totals)) == 1
        return module

    hook, batch = MOMENTS[moment]
    whole = run(SaveAt(hook, tmp_path / "x.ckpt", batch=batch))
    resumed = run(ckpt_path=tmp_path / "x.ckpt", weights_only=True)
    factors = [factor_at(epoch, [1, 2, 4, 8], 4) for epoch in range(6)]
    per_step = [factor for factor in factors for _ in range(-(-5 // factor))]
    assert whole.totals[0] == resumed.totals[0] == whole.taken == len(per_step)
    assert whole.optimizer.lrs == [(1 - t / len(per_step)) * factor / 8 for t, factor in enumerate(per_step)]
    done = 5 + (2 if moment == "in an epoch" else -(-5 // factors[1]))
    assert resumed.optimizer.lrs == whole.optimizer.lrs[done:]
    if moment != "in an epoch":
        assert resumed.sizes == whole.sizes[2:]


def _resume_on_a_rank(folder: Any) -> list[Any]:
    found = []
    for grow, batch in product(GROW, (1, 3)):
        path, runs = folder / f"{grow}{batch}.ckpt", []
        for callbacks, resume in (([SaveAt("on_train_batch_end", path, batch=batch)], {}), ([], {"ckpt_path": path})):
            module = Counted(lt.linear)
            warmup = BatchSizeWarmup(final=4, over=4, grow=grow, lr_rule="linear")
            run = trainer(strategy="ddp", devices=2, max_epochs=6, callbacks=[warmup, *callbacks])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You're resuming from a checkpoint")
                run.fit(module, ones(8), **resume)
            runs.append((set(module.totals), module.optimizer.lrs))
        found.append(runs)
    return found


def test_two_ranks_resume_as_one(tmp_path):
    ranks = run_ranks(_resume_on_a_rank, tmp_path)
    assert ranks[0] == ranks[1]
    for whole, resumed in ranks[0]:
        assert whole[0] == resumed[0] == {len(whole[1])} == {4 + 4 + 2 + 2 + 1 + 1}
        assert resumed[1] == whole[1][-len(resumed[1]) :]
    assert [len(resumed[1]) for _, resumed in ranks[0]] == [8, 6, 8, 6]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("max_steps", [-1, 13])
@pytest.mark.parametrize("grow", GROW)
def test_a_resume_from_every_step_takes_the_same_learning_rates(tmp_path, grow, max_steps):
    def lrs(*callbacks: Any, **settings: Any) -> list[float]:
        module = Counted()
        warmup = BatchSizeWarmup(final=4, over=3, grow=grow, lr_rule="sqrt")
        trainer(max_epochs=5, max_steps=max_steps, callbacks=[warmup, *callbacks]).fit(module, ones(5), **settings)
        assert set(module.totals) == {13 if max_steps == 13 else 17}
        return module.optimizer.lrs

    whole = lrs(SaveEveryStep(tmp_path))
    for step in range(1, len(whole)):
        assert lrs(ckpt_path=tmp_path / f"{step}.ckpt", weights_only=True) == whole[step:], step


def test_a_resume_after_other_factors_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    fit(build(), callbacks=[BatchSizeWarmup(final=4, over=4), SaveAt("on_train_epoch_end", path, 2)], max_epochs=6)
    for callback in (BatchSizeWarmup(final=4, over=2), BatchSizeWarmup(final=4, over=4, grow="loader")):
        message = r"resumes after epochs with .* but training had \[\(1, 1\)"
        with pytest.raises(MisconfigurationException, match=message):
            fit(build(), callbacks=[callback], max_epochs=6, ckpt_path=path)
    fit(build(), callbacks=[BatchSizeWarmup(final=4, over=4)], max_epochs=9, ckpt_path=path)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_resume_from_a_training_without_it_is_refused(tmp_path, epoch):
    path = tmp_path / "x.ckpt"
    fit(build(), callbacks=[SaveAt("on_train_batch_end", path, epoch)], max_epochs=3)
    with pytest.raises(MisconfigurationException, match="without this callback"):
        fit(build(), callbacks=[BatchSizeWarmup(final=4)], max_epochs=4, ckpt_path=path)


# -- the learning rate ------------------------------------------------------------------------------------------------


def lrs(schedule: Any, *callbacks: Any, batches: int = 4, epochs: int = 4) -> list[float]:
    module = Tiny(schedule)
    trainer(max_epochs=epochs, callbacks=list(callbacks)).fit(module, ones(batches))
    return module.optimizer.lrs


FACTORS = [1] * 4 + [2] * 2 + [4, 4]  # of the steps of four epochs of four batches


@pytest.mark.few(3)
@pytest.mark.parametrize("grow", GROW)
@pytest.mark.parametrize("rule", [None, "linear", "sqrt"])
def test_the_rule_multiplies_whatever_schedule_runs(rule, grow):
    power = {None: 0, "linear": 1, "sqrt": 0.5}[rule]
    scales = [(factor / 4) ** power for factor in FACTORS]

    def warmup() -> BatchSizeWarmup:
        return BatchSizeWarmup(final=4, over=2, grow=grow, lr_rule=rule)

    def chained(optimizer: Any, module: Any) -> Any:  # one that computes the next value from the group's
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    assert lrs(lambda o, m: o, warmup()) == scales
    assert lrs(chained, warmup()) == [0.5**t * scale for t, scale in enumerate(scales)]
    cosine = [lt.schedules.curves.cosine(t, total_steps=8) * scale for t, scale in enumerate(scales)]
    assert lrs(lambda o, m: lt.cosine(o, m), warmup()) == cosine
    assert lrs(lambda o, m: o, warmup(), lt.LRSchedule("cosine")) == cosine
    assert lrs(lambda o, m: o, lt.LRSchedule("cosine"), warmup()) == cosine


def test_each_group_keeps_its_own_learning_rate_and_a_tensor_stays_the_same():
    seen: list[Any] = []

    class Groups(Net):
        def configure_optimizers(self) -> Any:
            first, *others = self.parameters()
            self.rate = torch.tensor(0.5)
            groups = [{"params": [first], "lr": self.rate}, {"params": others, "lr": 0.25}]
            return torch.optim.AdamW(groups)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert optimizer.param_groups[0]["lr"] is self.rate
            seen.append([float(group["lr"]) for group in optimizer.param_groups])

    module = build(Groups)
    run = fit(module, train=loader(16), callbacks=[BatchSizeWarmup(final=2, lr_rule="linear")])
    assert seen == [[0.25, 0.125]] * 2 + [[0.5, 0.25]]
    assert [float(group["lr"]) for group in run.optimizers[0].param_groups] == [0.5, 0.25]


def test_between_the_steps_the_learning_rate_is_the_schedules(tmp_path):
    monitor = LearningRateMonitor("step")
    warmup = BatchSizeWarmup(final=4, lr_rule="linear")
    module = Tiny()
    run = trainer(logger=CSVLogger(tmp_path), log_every_n_steps=1, callbacks=[warmup, monitor], max_epochs=4)
    run.fit(module, ones(4))
    assert set(monitor.lrs["lr-RecordingSGD"]) == {1.0}


def test_a_learning_rate_set_during_the_step_is_an_error():
    class Sets(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            optimizer.param_groups[0]["lr"] = 0.01

    with pytest.raises(MisconfigurationException, match="on_train_batch_start"):
        fit(build(Sets), callbacks=[BatchSizeWarmup(final=4, lr_rule="linear")])


def test_a_step_that_fails_leaves_the_learning_rate_of_the_schedule():
    class Fails(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise OSError("disk")

    module = build(Fails)
    run = trainer(callbacks=[BatchSizeWarmup(2, final=4, lr_rule="linear")])
    with pytest.raises(OSError, match="disk"):
        run.fit(module, loader(), loader(8))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1
    assert run.accumulate_grad_batches == 1
    assert "optimizer_step" not in vars(run.strategy)


# -- what it leaves behind --------------------------------------------------------------------------------------------


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.current_epoch == 1:
            assert self.trainer.accumulate_grad_batches in (1, 4)
            raise OSError("disk")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("grow", GROW)
def test_an_exception_leaves_trainer_and_loader_as_they_were(grow):
    train = loader()
    run = trainer(callbacks=[BatchSizeWarmup(2, final=4, grow=grow, lr_rule="sqrt")])
    with pytest.raises(OSError, match="disk"):
        run.fit(build(Fails), train, loader(8))
    assert run.accumulate_grad_batches == 1
    assert (train.batch_size, train.batch_sampler.batch_size, len(train)) == (8, 8, 6)
    assert not {"process_dataloader", "optimizer_step"} & set(vars(run.strategy))


def test_validation_with_the_same_loader_keeps_its_batches():
    train = ones(6)
    module = Validated()
    trainer(max_epochs=2, callbacks=[BatchSizeWarmup(2, final=4, grow="loader")]).fit(module, train, train)
    assert module.sizes == [[2, 2, 2], [4, 2]]
    assert module.validated == [1] * 12


def test_persistent_workers_of_the_users_loader_live_on():
    train = ones(6, num_workers=1, persistent_workers=True)
    assert len(list(train)) == 6
    module = assert_counts(train, BatchSizeWarmup(final=4, grow="loader"), max_epochs=2)
    assert module.sizes == [[1] * 6, [4, 2]]
    assert [len(x) for (x,) in train] == [1] * 6
    train._iterator._shutdown_workers()  # when garbage is collected, in a later test, it takes five seconds


def test_the_last_batch_of_an_epoch_is_known_under_a_limit():
    class Last(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            self.at = [*getattr(self, "at", []), (trainer.is_last_batch, trainer.num_training_batches)]

    last, warmup = Last(), BatchSizeWarmup(final=2, grow="loader")
    trainer(max_epochs=2, callbacks=[warmup, last], limit_train_batches=0.5).fit(Tiny(), ones(12))
    assert last.at == [*[(False, 6)] * 5, (True, 6), *[(False, 3)] * 2, (True, 3)]


@pytest.mark.parametrize("interval", [0.5, 1.0, 2])
def test_validation_comes_as_often_as_asked(interval):
    module = Validated()
    callback = BatchSizeWarmup(final=4, over=2, grow="loader")
    trainer(max_epochs=3, callbacks=[callback], val_check_interval=interval).fit(module, ones(8), ones(1))
    batches = {0: 8, 1: 4, 2: 2}
    every = {epoch: interval if isinstance(interval, int) else int(n * interval) for epoch, n in batches.items()}
    assert module.at == [(e, b) for e, n in batches.items() for b in range(n) if (b + 1) % every[e] == 0]


@pytest.mark.parametrize("grow", GROW)
def test_a_trainer_that_goes_on_goes_on_growing(grow):
    warmup = BatchSizeWarmup(final=4, over=3, grow=grow)
    run, module = trainer(max_epochs=2, callbacks=[warmup]), Counted()
    run.fit(module, ones(4))
    run.fit_loop.max_epochs = 5
    run.fit(module, ones(4))
    assert run.global_step == module.totals[-1] == 4 + 4 + 2 + 1 + 1


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_wrong_values_are_refused():
    cases = [
        (ValueError, {"initial": 4, "final": 2}, "final must be at least initial=4, got 2"),
        (ValueError, {"initial": 0, "final": 2}, "initial must be at least 1, got 0"),
        (TypeError, {"final": 2.0}, "final must be an integer, got 2.0"),
        (ValueError, {"final": 2, "over": 0}, "over must be an int >= 1"),
        (ValueError, {"final": 2, "over": 1.0}, r"float in \(0, 1\) \(fraction\), got 1.0"),
        (ValueError, {"final": 2, "over": 0.0}, "got 0.0"),
        (TypeError, {"final": 2, "over": True}, "got True"),
        (ValueError, {"final": 2, "lr_rule": "square"}, "lr_rule must be one of 'linear', 'sqrt', got 'square'"),
        (ValueError, {"final": 2, "grow": "loaders"}, "Did you mean 'loader'"),
        (ValueError, {"final": 2, "factors": [1, 2]}, "got initial=1 and final=2: leave them out"),
        (ValueError, {"factors": [2, 1]}, r"must not shrink, got \[2, 1\]: sort"),
        (ValueError, {"factors": [0, 1]}, r"factors\[0\] must be at least 1"),
        (TypeError, {"factors": []}, "sequence of integers"),
        (TypeError, {"factors": 3}, "sequence of integers"),
        (TypeError, {"factors": "12"}, "integer, got '1'"),
    ]
    assert_refused(BatchSizeWarmup, cases)


@pytest.mark.parametrize(
    ("message", "settings", "arguments"),
    [
        ("GradientAccumulationScheduler: both decide", {"callbacks": [GradientAccumulationScheduler({0: 2})]}, {}),
        (r"Trainer\(accumulate_grad_batches=2\)", {"accumulate_grad_batches": 2}, {}),
        ("fraction of max_epochs=-1: give over in epochs", {"max_epochs": -1, "max_steps": 4}, {}),
        ("reload_dataloaders_every_n_epochs", {"reload_dataloaders_every_n_epochs": 1}, {"grow": "loader"}),
        ("needs at least 1 batches.*got 0 with 16", {}, {"final": 16, "grow": "loader"}),
        ("needs at least 3 batches.*got 2 with 4", {"val_check_interval": 3}, {"final": 4, "grow": "loader"}),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(message, settings, arguments):
    callback = BatchSizeWarmup(**{"final": 2, **arguments})
    callbacks = [callback, *settings.pop("callbacks", [])]
    train = DataLoader(data(8), 1, drop_last=True)
    run = trainer(callbacks=callbacks, **settings)
    before = run.accumulate_grad_batches
    with pytest.raises(MisconfigurationException, match=message):
        run.fit(build(PlainNet), train, loader(8))
    assert run.accumulate_grad_batches == before


def test_two_of_them_are_refused_by_lightning():
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `BatchSizeWarmup`"):
        trainer(callbacks=[BatchSizeWarmup(final=2), BatchSizeWarmup(final=4)])


def test_a_strategy_that_accumulates_itself_is_refused(monkeypatch):
    monkeypatch.setattr(SingleDeviceStrategy, "handles_gradient_accumulation", True)  # as DeepSpeed's
    with pytest.raises(MisconfigurationException, match=r"SingleDeviceStrategy, which fixes batch"):
        fit(Net(), callbacks=[BatchSizeWarmup(final=2)])
    assert DeepSpeedStrategy.handles_gradient_accumulation.fget(None)


class OwnBatches(BatchSampler):
    pass


class OwnLength(DataLoader):
    def __len__(self) -> int:
        return 3


class Stateful(DataLoader):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class NoLength(torch.utils.data.Sampler):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.mark.parametrize(
    ("found", "train"),
    [
        ("OwnBatches", lambda: DataLoader(data(), batch_sampler=OwnBatches(SequentialSampler(data()), 8, False))),
        ("of an IterableDataset", lambda: DataLoader(Stream(data()), 8)),
        ("no batch sampler", lambda: DataLoader(data(), batch_size=None)),
        ("SizedStream, which counts", lambda: SizedStream(5)),
        ("OwnLength, which counts", lambda: OwnLength(data(), 8)),
        ("Stateful, whose state_dict", lambda: Stateful(data(), 8)),
    ],
)
def test_a_loader_that_cannot_grow_is_refused_by_name(found, train):
    with pytest.raises(MisconfigurationException, match=rf"got a.*{found}.*grow='accumulate'"):
        fit(build(PlainNet), train=train(), callbacks=[BatchSizeWarmup(final=2, grow="loader")])


def test_a_sampler_without_a_length_is_refused():
    train = DataLoader(data(), 4, sampler=NoLength())
    with pytest.raises(MisconfigurationException, match="Give the sampler a length"):
        fit(build(PlainNet), train=train, callbacks=[BatchSizeWarmup(final=2, grow="loader")])


def test_validation_alone_needs_nothing():
    module = Net()
    module.automatic_optimization = False
    trainer(callbacks=[BatchSizeWarmup(final=2)]).validate(module, loader(24), verbose=False)


# -- from YAML --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [("{final: 2, over: 0.5, lr_rule: sqrt}", 9), ("{factors: [1, 6], over: 1, grow: loader}", 7)],
)
def test_it_trains_from_yaml(cli, arguments, steps):  # noqa: F811
    tool = cli(f"{{class_path: lightning_tricks.BatchSizeWarmup, init_args: {arguments}}}", "fit")
    assert tool.trainer.global_step == steps
