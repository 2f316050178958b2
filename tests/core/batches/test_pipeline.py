"""The tap behind the transfer: which callbacks see a batch, and which number it has, whatever interrupts training."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks import Mixup
from lightning_tricks.core.batches.pipeline import chosen
from lightning_tricks.core.mixed_targets.target import MixedTarget
from tests.batches import refused
from tests.core.batches.test_callback import ONCE, fail, watched
from tests.core.batches.test_mixing import ImageNet, Watch, images
from tests.few import few
from tests.nets import (
    NormNet,
    PlainNet,
    Resumable,
    SaveAt,
    SteppedByHand,
    assert_equal,
    build,
    fit,
    loader,
    rank_loader,
    weights,
)
from tests.ranks import run_ranks

# ---- one of several


@pytest.mark.parametrize(
    ("probs", "expected"),
    [
        ((0.3, 0.2), (0.3, 0.2, 0.5)),
        ((1.0, 1.0), (0.5, 0.5, 0.0)),
        ((1.0, 0.5), (2 / 3, 1 / 3, 0)),
        ((0, 1), (0, 1, 0)),
        ((0, 0), (0, 0, 1)),
        ((1, 1, 1), (1 / 3, 1 / 3, 1 / 3, 0)),
        ((0.2, 0, 0.5), (0.2, 0, 0.5, 0.3)),
        ((), (1,)),
    ],
    ids=str,
)
def test_one_is_chosen_by_its_prob_behind_all_that_have_none(probs: Any, expected: Any) -> None:
    alternatives, always = [Mixup(prob=prob) for prob in probs], [lt.HardExampleFilter(), lt.HardExampleFilter(0.25)]
    numbers, counts = random.Random(0), [0] * len(expected)
    for _ in range(6000):
        found = chosen([*always[:1], *alternatives, *always[1:]], numbers)
        assert found[:2] == always
        assert len(found) <= 3
        counts[alternatives.index(found[2]) if found[2:] else -1] += 1
    assert all(abs(a / 6000 - b) < 0.02 for a, b in zip(counts, expected, strict=True)), counts
    assert [a == 0 for a in counts] == [b == 0 for b in expected]


def test_three_alternatives_share_the_batches_of_a_fit() -> None:
    callbacks = [lt.CutMix(), lt.HiddenMixup("layers.2"), lt.Mixup()]
    counts = [0] * 3

    def count(*_: Any) -> None:
        (number,) = (n for n, each in enumerate(callbacks) if each.drawn is not None)
        counts[number] += 1

    counting = LambdaCallback(on_train_batch_start=count)
    fit(build(ImageNet), train=images(300, 2), callbacks=[*callbacks, counting], **ONCE)
    assert sum(counts) == 150
    assert all(abs(count / 150 - 1 / 3) < 0.12 for count in counts), counts


@pytest.mark.parametrize("settings", [{"inputs": 0, "target": 1}, {"prob": 0.5}, {"per_sample": True}], ids=str)
def test_two_of_a_kind_with_other_settings_are_alternatives_too(settings: dict[str, Any]) -> None:
    callbacks = [lt.Mixup(), lt.Mixup(**settings)]
    watch = Watch(*callbacks)  # which asserts that there is one at most
    fit(build(PlainNet), callbacks=[*callbacks, watch])
    assert all(watch.drawn) or "prob" not in settings


def test_two_windows_follow_one_another() -> None:
    first, second = lt.Mixup(1.0, stop=4), lt.Mixup(1.0, start=4, stop=0.75)
    watches = [Watch(first), Watch(second)]
    fit(build(PlainNet), callbacks=[second, first, *watches])
    assert [watch.steps for watch in watches] == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]


# ---- how batches are counted


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("on_before_backward", False),
        ("on_before_backward", True),
        ("on_validation_end", False),
        ("on_validation_end", True),
    ],
)
def test_a_checkpoint_saved_on_exception_goes_on_with_the_batch_that_failed(
    where: str, first: bool, tmp_path: Any
) -> None:
    whole, callbacks = watched()
    straight = build(PlainNet)
    fit(straight, callbacks=callbacks)
    watch, callbacks = watched()
    broken = LambdaCallback(**{where: lambda run, *_: fail() if run.global_step == 6 else None})
    saver = LambdaCallback(on_exception=lambda run, *_: run.save_checkpoint(tmp_path / "x.ckpt"))
    with pytest.raises(RuntimeError, match="broken"):
        fit(build(PlainNet), callbacks=[saver, *callbacks, broken] if first else [*callbacks, broken, saver])
    assert watch.numbers()[:6] == whole.numbers()[:6]
    watch, callbacks = watched()
    resumed = build(PlainNet)
    fit(resumed, callbacks=callbacks, ckpt_path=tmp_path / "x.ckpt")
    assert watch.numbers() == whole.numbers()[6:]
    assert_equal(weights(resumed), weights(straight))


BEFORE = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
BEFORE += ["on_before_optimizer_step"]
AFTER = ["on_train_batch_end", "on_validation_start", "on_validation_batch_start", "on_validation_batch_end"]
AFTER += ["on_validation_end"]


def even() -> Resumable:
    """Six batches of the same size."""
    return Resumable(list(loader(48)))


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    "settings",
    few(
        [
            {"val_check_interval": 1},
            {"val_check_interval": 1, "accumulate_grad_batches": 2},
            {"val_check_interval": 2, "limit_train_batches": 5, "max_epochs": 3},
            {"check_val_every_n_epoch": None, "val_check_interval": 4},
        ],
        2,
    ),
    ids=str,
)
def test_a_checkpoint_of_any_hook_goes_on_with_the_next_number(settings: Any, first: bool, tmp_path: Any) -> None:
    def save(hook: str) -> Any:
        path = tmp_path / hook

        def save(run: Any, *_: Any) -> None:
            if run.fit_loop.epoch_loop.batch_progress.total.ready == 4 and not path.exists():
                run.save_checkpoint(path)

        return LambdaCallback(**{hook: save})

    (watch, callbacks), module = watched(prob=0.8), build(PlainNet)
    saves = [save(hook) for hook in [*BEFORE, *AFTER]]
    fit(module, train=even(), callbacks=[*saves, *callbacks] if first else [*callbacks, *saves], **settings)
    whole = watch.numbers()
    made = [hook for hook in [*BEFORE, *AFTER] if (tmp_path / hook).exists()]
    assert len(made) >= 9
    for hook in made:
        (watch, callbacks), resumed = watched(prob=0.8), build(PlainNet)
        fit(resumed, train=even(), callbacks=callbacks, ckpt_path=tmp_path / hook, **settings)
        if hook in BEFORE:  # the step is made again, though the loader has gone on to the next batch
            assert watch.numbers()[:2] == whole[3:5], hook
        else:
            assert watch.numbers() == whole[4:], hook
            assert_equal(weights(resumed), weights(module))


@pytest.mark.slow
def test_a_fit_that_goes_on_draws_new_numbers() -> None:
    watch, callbacks = watched()
    module = build(PlainNet)
    run = fit(module, callbacks=callbacks, **ONCE)
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(), loader(24))
    assert len(watch.drawn) == 12
    assert watch.numbers()[:6] != watch.numbers()[6:]
    assert len({str(numbers) for numbers in watch.numbers()}) == 12


class Short(PlainNet):
    """Ends its epochs before their fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def test_an_epoch_cut_short_does_not_repeat_its_numbers() -> None:
    runs = []
    for _ in range(2):
        watch, callbacks = watched()
        run = fit(build(Short), callbacks=callbacks)
        assert run.global_step == 6
        runs.append(watch.numbers())
    assert runs[0] == runs[1]
    assert len({str(numbers) for numbers in runs[0]}) == len(runs[0]) == 8


def test_a_step_may_transfer_another_batch() -> None:
    class Twice(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = self.trainer.strategy.batch_to_device(other)
            assert torch.equal(x, other[0])
            assert type(y) is Tensor
            return super().training_step(batch, batch_idx)

    other, plain, twice = next(iter(loader())), build(PlainNet), build(Twice)
    fit(plain, callbacks=[Mixup(1.0)])
    fit(twice, callbacks=[Mixup(1.0)])
    assert_equal(weights(plain), weights(twice))


HOOKS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_end")
HOOKS += ("on_before_backward", "on_validation_start", "on_validation_batch_end")
MOVES = [*product(HOOKS, (False, True)), ("on_train_start", False), ("on_train_batch_start", True)]
MOVES += [("on_train_batch_end", False)]


@pytest.mark.parametrize(("hook", "first"), MOVES)
def test_another_callback_may_transfer_a_batch(hook: str, first: bool) -> None:
    def move(run: Any, *_: Any) -> None:
        x, y = run.strategy.batch_to_device(other)
        seen.append(type(y) is Tensor and torch.equal(x, other[0]))

    other, seen, spy = next(iter(loader())), [], LambdaCallback(**{hook: move})
    plain, module = build(PlainNet), build(PlainNet)
    fit(plain, callbacks=[Mixup(1.0)])
    fit(module, callbacks=[spy, Mixup(1.0)] if first else [Mixup(1.0), spy])
    assert all(seen)
    assert seen
    assert_equal(weights(plain), weights(module))


def test_nothing_is_mixed_after_a_batch_that_was_left_out() -> None:
    class Checked(Short):
        def on_train_epoch_end(self) -> None:
            x = next(iter(loader()))[0]
            plain = torch.nn.functional.linear(self.layers[:2](x), self.layers[2].weight, self.layers[2].bias)
            assert torch.equal(self.layers(x), plain)

    fit(build(Checked), callbacks=[lt.HiddenMixup("layers.2", 1.0)])


def test_the_learning_rate_finder_does_not_shift_the_numbers() -> None:
    whole, callbacks = watched()
    fit(build(PlainNet), callbacks=callbacks)
    watch, callbacks = watched()
    fit(build(PlainNet), callbacks=[*callbacks, LearningRateFinder(num_training_steps=5)])
    assert watch.numbers()[-12:] == whole.numbers()


# ---- ranks


def _on_a_rank(path: Any, step: int | None) -> Any:
    watch, callbacks = watched()
    saves = [] if step is None else [SaveAt(path, step=step)]
    module = build(PlainNet)
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "callbacks": [*callbacks, *saves]}
    fit(module, train=rank_loader(), ckpt_path=None if saves else path, limit_val_batches=0, **settings)
    return watch.numbers(), weights(module)


def test_ranks_draw_numbers_of_their_own_and_resume_exactly(tmp_path: Any) -> None:
    (first, ours), (second, _) = whole = run_ranks(_on_a_rank, tmp_path / "x.ckpt", 3)
    assert all(a != b for a, b in zip(first, second, strict=True))
    rest = run_ranks(_on_a_rank, tmp_path / "x.ckpt", None)
    assert [numbers for numbers, _ in rest] == [numbers[3:] for numbers, _ in whole]
    assert_equal(rest[0][1], ours)


class Noting(PlainNet):
    """Notes in its weights' buffer that it trained on mixed inputs; importable by spawned processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mixup = next(each for each in self.trainer.callbacks if isinstance(each, Mixup))
        assert mixup.drawn is not None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ddp_spawn_pickles_and_trains(start_method: Any) -> None:
    """To the processes of a forkserver, which have their imports, the same is pickled."""
    module = build(Noting)
    before = weights(module)
    run = fit(module, strategy=DDPStrategy(start_method=start_method), devices=2, callbacks=[Mixup(1.0)], **ONCE)
    assert run.state.finished
    assert any(not torch.equal(before[name], value) for name, value in weights(module).items())


# ---- the loss that a step returns


@pytest.mark.parametrize("returns", [lambda loss: loss, lambda loss: {"loss": loss, "kept": 1}], ids=["loss", "dict"])
def test_lightning_gets_the_mixed_loss_as_a_plain_tensor(returns: Any) -> None:
    inside, outside = set[type](), set[type]()

    class Returns(PlainNet):
        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            inside.add(type(loss))
            return returns(loss)

    look = LambdaCallback(on_before_backward=lambda trainer, module, loss: outside.add(type(loss)))
    ends = []
    for kind in (PlainNet, Returns):
        fit(module := build(kind), callbacks=[lt.Mixup(1.0), look], **ONCE)
        ends.append(weights(module))
    assert_equal(*ends)
    assert (inside, outside) == ({MixedTarget}, {Tensor})


def test_a_returned_loss_whose_samples_are_ambiguous_is_refused_before_the_first_step() -> None:
    class Ambiguous(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            outputs = self(batch[0])
            picked = outputs.log_softmax(1).gather(1, batch[1][:, None])
            return -picked.amax()

    refused(Ambiguous, "ambiguous", [lt.Mixup(1.0, per_sample=True)])


class Ignores(PlainNet):
    """Its loss knows nothing of the target."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


@pytest.mark.parametrize("kind", [Ignores, type("ManualIgnores", (SteppedByHand, Ignores), {})])
def test_a_target_that_no_loss_saw_is_refused_before_the_first_optimizer_step(kind: Any) -> None:
    for trick in (lt.Mixup(), lt.HardExampleFilter(mode="loss")):
        refused(kind, "did nothing to batch 0", [trick])


@pytest.mark.parametrize(
    ("kind", "trick", "message"),
    [
        (Ignores, lambda: lt.Mixup(start=0.9), "did nothing to batch 0"),
        (Ignores, lambda: lt.Mixup(prob=1e-9), "did nothing to batch 0"),
        (Ignores, lambda: lt.HardExampleFilter(start=0.9, mode="loss"), "did nothing to batch 0"),
        (Ignores, lambda: lt.HardExampleFilter(start=0.9), "computed no loss"),
        (PlainNet, lambda: lt.CutMix(start=0.9), "needs images"),
        (PlainNet, lambda: lt.Mixup(start=0.9, target="nowhere"), "finds no such tensor"),
        (PlainNet, lambda: lt.HiddenMixup("unused", start=0.9), "did not call the layer 'unused'"),
    ],
)
def test_what_begins_later_is_refused_at_the_first_batch(kind: Any, trick: Any, message: str) -> None:
    module = build(kind)
    module.unused = nn.Linear(8, 8)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[trick()])
    assert_equal(weights(module), before)


def test_the_first_batch_is_checked_without_a_trace() -> None:
    plain, checked = build(NormNet), build(NormNet)
    tricks = [lt.Mixup(start=1.0, prob=0.5), lt.HiddenMixup("layers.2", start=1.0, prob=0.5)]
    fit(plain)
    fit(checked, callbacks=[*tricks, lt.HardExampleFilter(start=1.0), lt.HardExampleFilter(start=1.0, mode="loss")])
    assert_equal(weights(plain), weights(checked))
