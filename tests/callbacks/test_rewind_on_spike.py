"""RewindOnSpike: after a spike the run is the one that had never seen the batches since the snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.rewind_on_spike import Snapshot, is_spike
from tests.callbacks import test_skip_non_finite
from tests.conformance.engines import cpu_deepspeed
from tests.nets import TWO, Net, PlainNet, ShardedLayers, assert_equal, build, data, fit, trained, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

batches = partial(test_skip_non_finite.batches, count=16)


class Clean(Net):
    """With dropout, so that random numbers matter, BatchNorm, Adam and a schedule."""

    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=0.02), self, warmup=2, total_steps=40)


class Spiky(Clean):
    factor = 1000.0
    when: tuple[int, ...] = (10,)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if batch_idx in self.when and self.global_rank == 0 else loss


def spiky(base: type[Any] = Spiky, **attributes: Any) -> Any:
    return build(type(base)("Spoiled", (base,), attributes))


def rewind(**settings: Any) -> lt.RewindOnSpike:
    return lt.RewindOnSpike(**{"window": 4, "every_n_steps": 4, **settings})


def ema() -> lt.EMA:
    return lt.EMA(0.9, at_end="raw")


def compare(spoiled: Any, clean: Any, left_out: Any, callback: Any, average: Any = ema, **settings: Any) -> None:
    """Both train one epoch; bit-equal weights, averages, optimizer and learning rate at the end."""
    averages = average(), average()
    with_spike = fit(spoiled, train=batches(), callbacks=[callback, averages[0]], max_epochs=1, **settings)
    without = fit(clean, train=batches(*left_out), callbacks=[averages[1]], max_epochs=1, **settings)
    assert_equal(weights(spoiled), weights(clean))
    assert_equal(averages[0].averaged_state_dict(), averages[1].averaged_state_dict())
    assert with_spike.global_step == without.global_step
    mine, theirs = with_spike.optimizers[0].state_dict(), without.optimizers[0].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        assert_equal(mine["state"][number], state)


@pytest.mark.few(4)
@pytest.mark.parametrize("factor", [1000.0, torch.inf, torch.nan])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}], ids=str)
def test_it_goes_back_bit_for_bit(factor: float, settings: dict[str, Any]) -> None:
    callback = rewind()
    compare(spiky(factor=factor), build(Clean), (8, 9, 10), callback, **settings)
    assert callback.rewinds == 1


def test_it_goes_back_to_the_same_snapshot_again() -> None:
    callback = rewind(every_n_steps=8)
    compare(spiky(when=(10, 13)), build(Clean), (8, 9, 10, 11, 12, 13), callback)
    assert callback.rewinds == 2


LATE_SWA = partial(lt.SWA, 3, every_n_steps=2, at_end="raw", recalibrate_batchnorm=False)


@pytest.mark.parametrize("average", [partial(lt.EMA, 0.9, start=3, at_end="raw"), LATE_SWA], ids=["EMA", "SWA"])
def test_it_goes_back_to_before_averaging_began(average: Any) -> None:
    compare(spiky(), build(Clean), tuple(range(11)), rewind(every_n_steps=16), average)


class Epochs:
    """Other batches in each epoch, of the numbers given; those that are negative are not numbers themselves."""

    def __init__(self, *epochs: list[int]) -> None:
        self.epochs = iter(epochs)

    def __iter__(self) -> Iterator[Any]:
        for number in next(self.epochs):
            x, y = data(8, seed=abs(number))[:]
            yield (x * torch.nan if number < 0 else x), y


def test_it_goes_back_to_before_weights_joined_an_average() -> None:
    ended = []
    goes_back = rewind(every_n_steps=3, window=9)
    for second, first in (((4, 5, -6, 7, 8), [goes_back]), ((7, 8), [])):
        module, average = build(Clean), ema()
        late = lt.GradualUnfreeze([3], parameters=[r"^layers\.[01]\."])
        fit(module, train=Epochs([1, 2, 3], [*second]), callbacks=[*first, late, average])
        ended.append((weights(module), average.averaged_state_dict()))
    for spoiled, clean in zip(*ended, strict=True):
        assert_equal(spoiled, clean)
    assert not torch.equal(clean["layers.0.weight"], ended[1][0]["layers.0.weight"])


def test_it_goes_back_to_weights_that_were_drawn_when_training_started() -> None:
    def draw(module: Any) -> None:
        for number, weight in enumerate(module.parameters()):
            weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))

    spoiled = spiky(when=(2,), factor=torch.nan, on_train_start=draw)
    compare(spoiled, build(type("Drawn", (Clean,), {"on_train_start": draw})), (0, 1, 2), rewind(), ema)


def test_the_losses_since_the_snapshot_are_forgotten() -> None:
    callback, calm = rewind(window=8), rewind(window=8, threshold=1e9)
    fit(spiky(), train=batches(), callbacks=[callback], max_epochs=1)
    fit(build(Clean), train=batches(8, 9, 10), callbacks=[calm], max_epochs=1)
    assert callback.rewinds == 1
    assert callback.state_dict()["losses"] == calm.state_dict()["losses"]


def test_before_the_window_is_full_only_what_is_not_finite_counts() -> None:
    callback = rewind(window=12)
    fit(spiky(when=(10,)), train=batches(), callbacks=[callback], max_epochs=1)
    assert callback.rewinds == 0
    callback = rewind(window=12)
    compare(spiky(when=(2,), factor=torch.nan), build(Clean), (0, 1, 2), callback)


def test_a_loss_of_each_sample() -> None:
    class Each(Clean):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.mean().backward()

    callback = rewind()
    watched = trained(Each, callback, train=batches(), max_epochs=1)
    assert callback.rewinds == 0
    assert_equal(watched, trained(Each, train=batches(), max_epochs=1))


def test_an_accumulated_window() -> None:
    callback = rewind(every_n_steps=2, window=3)
    compare(spiky(when=(9,)), build(Clean), (8, 9), callback, accumulate_grad_batches=2)
    assert callback.rewinds == 1


class Overflowing(Spiky):
    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.batch_idx in self.when:
            self.layers[0].weight.grad.fill_(torch.inf)


def test_an_infinite_gradient_is_a_spike() -> None:
    compare(spiky(Overflowing, factor=1.0), build(Clean), (8, 9, 10), rewind())


def fp16() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0))]}


def test_under_a_grad_scaler() -> None:
    callback = rewind()
    spoiled, clean = spiky(), build(Clean)
    run = fit(spoiled, train=batches(), callbacks=[callback], max_epochs=1, **fp16())
    other = fit(clean, train=batches(8, 9, 10), max_epochs=1, **fp16())
    assert_equal(weights(spoiled), weights(clean))
    assert run.precision_plugin.scaler.state_dict() == other.precision_plugin.scaler.state_dict()
    callback = rewind()  # infinite gradients are the scaler's own
    fit(spiky(Overflowing, factor=1.0), train=batches(), callbacks=[callback], max_epochs=1, **fp16())
    assert callback.rewinds == 0


class Rates(Spiky):
    """Notes the learning rate of each optimizer step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        hook = optimizer.register_step_post_hook(lambda each, *_: self.rates.append(each.param_groups[0]["lr"]))
        super().optimizer_step(*args, **kwargs)
        hook.remove()


def test_the_learning_rate_is_lower_for_a_while() -> None:
    plain, slow = [], []
    for rates, settings in ((plain, {}), (slow, {"lr_factor": 0.5, "lr_steps": 3})):
        module = spiky(Rates)
        module.rates = rates
        fit(module, train=batches(), callbacks=[rewind(**settings)], max_epochs=1)
    expected = [rate * (0.5 if 10 <= number < 13 else 1) for number, rate in enumerate(plain)]
    assert slow == pytest.approx(expected)
    assert len(plain) == 15  # ten, and five behind the spike from the ninth on


def test_a_second_spike_while_the_rate_is_lower() -> None:
    def rates(*when: int, factor: float) -> list[float]:
        module = spiky(Rates, when=when)
        module.rates = []
        fit(module, train=batches(), callbacks=[rewind(lr_factor=factor, lr_steps=3)], max_epochs=1)
        return module.rates

    plain, slow = rates(10, 12, factor=1.0), rates(10, 12, factor=0.5)
    assert slow == pytest.approx([rate * (0.5 if number >= 10 else 1) for number, rate in enumerate(plain)])
    assert len(plain) == 14  # ten, one behind the first spike, three behind the second


class SometimesNone(Clean):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_not_judged() -> None:
    watched = trained(SometimesNone, rewind(threshold=50.0), train=batches(), max_epochs=1)
    plain = trained(SometimesNone, train=batches(), max_epochs=1)
    assert_equal(watched, plain)


@pytest.mark.parametrize("factor", [1000.0, torch.nan])
def test_sam(factor: float) -> None:
    sharp, sharp_clean = (type(f"SAM{kind.__name__}", (lt.SAMMixin, kind), {}) for kind in (Spiky, Clean))
    compare(spiky(sharp, factor=factor), build(sharp_clean), (8, 9, 10), rewind())


def test_too_many_stop_training() -> None:
    message = r"gone back max_rewinds=2 times, and the loss is \S+ after step 9 again \(good losses before it: \d"
    with pytest.raises(FloatingPointError, match=message):
        fit(spiky(when=(10, 12, 14)), train=batches(), callbacks=[rewind(every_n_steps=8, max_rewinds=2)], max_epochs=1)


def test_a_calm_run_is_as_without_it() -> None:
    watched = build(Clean)
    fit(watched, train=batches(), callbacks=[rewind(threshold=50.0)], max_epochs=1)
    assert_equal(weights(watched), trained(Clean, train=batches(), max_epochs=1))
    assert "optimizer_step" not in vars(watched.trainer.strategy)


def test_the_end_is_as_good_as_that_of_a_clean_run() -> None:
    def last(*callbacks: Any, factor: float) -> float:
        settings = {"train": batches(), "val": DataLoader(data(64, seed=1), 64), "max_epochs": 4}
        return fit(spiky(factor=factor), callbacks=[*callbacks], **settings).callback_metrics["val_loss"].item()

    assert last(rewind(), factor=1e6) < last(factor=1.0) + 0.05


def test_resume_goes_on_counting(tmp_path: Any) -> None:
    callback, resumed = rewind(), rewind()
    fit(spiky(), train=batches(), callbacks=[callback], max_epochs=1).save_checkpoint(tmp_path / "1.ckpt")
    fit(spiky(), train=batches(), callbacks=[resumed], max_epochs=2, ckpt_path=tmp_path / "1.ckpt")
    assert (callback.rewinds, resumed.rewinds) == (1, 2)


class Sharded(ShardedLayers, Spiky):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def two_ranks() -> None:
    rank = int(os.environ["RANK"])
    for name in ("ddp", "fsdp"):
        ended = []
        for when, left_out in (((10,), ()), ((), (8, 9, 10))):
            module, callback = spiky(Sharded, when=when), rewind()
            own = {"train": batches(*left_out, rank=rank, ranks=2), "callbacks": [callback] if when else []}
            strategy = "ddp" if name == "ddp" else ModelParallelStrategy(2, 1)
            fit(module, max_epochs=1, strategy=strategy, **own, **TWO)
            ended.append(weights(module))
            assert callback.rewinds == len(when)
        assert_equal(*ended)
    with pytest.raises(MisconfigurationException, match=r"RewindOnSpike .* CPUDeepSpeedStrategy"):
        fit(build(PlainNet), callbacks=[rewind()], strategy=cpu_deepspeed(), devices=2)


def test_all_ranks_go_back_to_their_shards() -> None:
    run_ranks(two_ranks)


def test_what_is_out_of_range_is_refused() -> None:
    cases = [
        (ValueError, {"threshold": -1}, "threshold must be in"),
        (ValueError, {"window": 1}, "window must be at least"),
        (ValueError, {"every_n_steps": 0}, "every_n_steps must be at least 1"),
        (ValueError, {"max_rewinds": 0}, "max_rewinds must be at least 1"),
        (ValueError, {"lr_factor": 2.0}, "lr_factor must be in"),
        (ValueError, {"lr_steps": -1}, "lr_steps must be at least 0"),
    ]
    assert_refused(lt.RewindOnSpike, cases)


def test_a_spike_is_judged_by_mean_and_deviation() -> None:
    before = [1.0, 2.0, 3.0]  # mean 2, deviation 1
    assert [is_spike(loss, before, 2.0) for loss in (3.9, 4.1, float("nan"), float("inf"))] == [False, True, True, True]


# -- a snapshot is gone back to bit for bit ---------------------------------------------------------------------------


def facts(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Everything that a snapshot holds, as tensors."""
    optimizer = trainer.optimizers[0].state_dict()
    state = {f"{n}/{key}": value.clone() for n, each in optimizer["state"].items() for key, value in each.items()}
    averages = {f"ema/{key}": value.clone() for key, value in trainer.callbacks[0]._running.tensors.items()}
    scalars = {
        "lr": optimizer["param_groups"][0]["lr"],
        "weight_decay": optimizer["param_groups"][0]["weight_decay"],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "step": trainer.global_step,
        "updates": trainer.callbacks[0]._running.updates,
    }
    scalars = {key: torch.tensor(float(value)) for key, value in scalars.items()}
    return {**weights(module), **state, **averages, **scalars, "random": torch.get_rng_state()}


class Adam(Net):
    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=0.02), self)


class GoesBack(Callback):
    """Takes snapshots at the start and after two batches, goes back to each twice, the later first."""

    def __init__(self) -> None:
        self.held: list[tuple[Snapshot, dict[str, torch.Tensor]]] = []
        self.went = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (0, 2) and trainer.current_epoch == 0:
            self.held.append((Snapshot(trainer, pl_module), facts(trainer, pl_module)))
        if batch_idx in (3, 5) and trainer.current_epoch == 0:
            snapshot, before = self.held[1 if batch_idx == 3 else 0]
            for _ in range(2):
                with torch.no_grad():
                    pl_module.layers[0].weight.add_(1)
                torch.rand(3)
                trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.7
                snapshot.restore(trainer, pl_module)
                assert_equal(facts(trainer, pl_module), before)
                self.went += 1


class Nested(torch.optim.SGD):
    """Keeps a list of tensors for each weight."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for weight in self.param_groups[0]["params"]:
            self.state[weight].setdefault("list", [torch.zeros(1)])[0] += 1
        return loss


class KeepsLists(Net):
    def configure_optimizers(self) -> Any:
        return Nested(self.parameters(), lr=0.1)


class ListsGoBack(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        def counts() -> set[float]:
            return {state["list"][0].item() for state in trainer.optimizers[0].state.values()}

        if batch_idx == 1:
            self.snapshot = Snapshot(trainer, pl_module)
        if batch_idx in (3, 4):
            assert counts() == {3.0 if batch_idx == 3 else 2.0}
            self.snapshot.restore(trainer, pl_module)
            assert counts() == {1.0}


def test_tensors_within_the_state_of_an_optimizer() -> None:
    fit(build(KeepsLists), callbacks=[ListsGoBack()], max_epochs=1)


def test_everything_is_as_it_was() -> None:
    callback = GoesBack()
    fit(build(Adam), callbacks=[lt.EMA(0.9, at_end="raw"), callback])
    assert callback.went == 4


class Remakes(Net):
    """Makes a new parameter for its codes in every step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.codes = nn.Parameter(torch.ones(8), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.codes = nn.Parameter(self.codes * 0.5, requires_grad=False)
        return super().training_step([batch[0] + self.codes.clone(), batch[1]], batch_idx)


class Returns(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.snapshot, self.before = Snapshot(trainer, pl_module), weights(pl_module)
        if batch_idx in (3, 4):
            self.snapshot.restore(trainer, pl_module)
            assert_equal(weights(pl_module), self.before)


def test_a_parameter_that_a_step_has_made_anew_goes_back() -> None:
    module = build(Remakes)
    fit(module, callbacks=[Returns()], max_epochs=1, limit_val_batches=0)
    assert module.codes.tolist() == [0.125] * 8  # one step before the snapshot, and two behind the last return
