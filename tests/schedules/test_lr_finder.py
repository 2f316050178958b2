"""What the losses of a sweep suggest, and the sweep itself: its steps, where it stops, what is muted and refused."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import matplotlib as mpl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, IterableDataset

import lightning_tricks as lt
from lightning_tricks.schedules.lr_finder import LRFinderResult, find_lr, smoothed_losses, suggested_lr
from tests.nets import Net, PlainNet, assert_equal, build, data, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

METHODS = ("valley", "steepest", "minimum/10")


def rates(steps: int = 100, low: float = 1e-8, high: float = 1.0) -> list[float]:
    return [low * (high / low) ** (k / (steps - 1)) for k in range(steps)]


def curve(lrs: list[float]) -> list[float]:
    """Flat, a fall by 0.8 about 1e-3, and a rise that explodes from 0.1 on."""
    return [0.2 + 0.8 / (1 + (lr / 1e-3) ** 1.5) + math.expm1(min(50.0, 20 * lr)) for lr in lrs]


def noisy(losses: Any, size: float, seed: int) -> list[float]:
    numbers = random.Random(seed)
    return [loss + size * numbers.gauss(0, 1) for loss in losses]


# -- smoothing --------------------------------------------------------------------------------------------------------


def test_smoothing_is_the_mean_that_the_formula_says() -> None:
    losses, h = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], 2.0
    weights = [[math.exp(-((i - j) ** 2) / (2 * h * h)) for j in range(6)] for i in range(6)]
    expected = [sum(w * loss for w, loss in zip(row, losses, strict=True)) / sum(row) for row in weights]
    assert smoothed_losses(rates(6), losses) == pytest.approx(expected)


def test_smoothing_keeps_a_straight_line_and_follows_the_spacing() -> None:
    lrs = rates(1000)
    line = [math.log10(lr) for lr in lrs]
    inside = slice(130, -130)  # 4 bandwidths from the ends
    assert smoothed_losses(lrs, line)[inside] == pytest.approx(line[inside])
    thousand, hundred = (noisy([1.0] * n, 0.1, 0) for n in (1000, 100))
    spread = torch.tensor(smoothed_losses(lrs, thousand)).std() / torch.tensor(smoothed_losses(rates(), hundred)).std()
    assert spread < 0.6  # as many more losses in the same range of learning rates: 1/sqrt(10), loosely


def test_an_explosion_does_not_reach_back() -> None:
    for first in (1.0, -1.0):
        smoothed = smoothed_losses(rates()[:93], [first] * 90 + [1e30] * 3)
        assert smoothed[77] == pytest.approx(first, abs=1e-3)
        assert max(smoothed) <= first + 7


def test_smoothing_of_nothing_is_nothing() -> None:
    assert smoothed_losses([], []) == []
    assert smoothed_losses([0.1], [0.0]) == [0.0]


# -- suggestions ------------------------------------------------------------------------------------------------------


def test_suggestions_on_a_curve_in_closed_form() -> None:
    lrs = rates()
    losses = curve(lrs)
    assert suggested_lr(lrs, losses, "steepest") == pytest.approx(1e-3, rel=0.3)
    assert suggested_lr(lrs, losses, "valley") == pytest.approx(1e-3, rel=0.5)
    lowest = lrs[losses.index(min(losses))]
    assert lowest / 2.5 < 10 * suggested_lr(lrs, losses, "minimum/10") < lowest * 1.1  # smoothing looks ahead


@pytest.mark.parametrize("method", METHODS)
def test_noise_does_not_move_a_suggestion(method: Any) -> None:
    lrs = rates()
    quiet = suggested_lr(lrs, curve(lrs), method)
    for size, seed in product([1e-4, 1e-2], range(20)):
        assert quiet / 3 < suggested_lr(lrs, noisy(curve(lrs), size, seed), method) < 3 * quiet, (size, seed)


@pytest.fixture(scope="module")
def real() -> LRFinderResult:
    batches = loader(512, 64, shuffle=True)  # with smaller ones it depends on the draw whether there is a suggestion
    return find_lr(trainer(), build(Net), batches, min_lr=1e-6, max_lr=10.0)


@pytest.mark.parametrize("method", METHODS)
def test_noise_does_not_move_a_suggestion_of_a_real_fit(real: LRFinderResult, method: Any) -> None:
    quiet = real.suggestion(method)
    for size, seed in product([1e-4, 1e-2], range(20)):
        again = LRFinderResult(real.lrs, tuple(noisy(real.losses, size, seed)))
        assert quiet / 3 < again.suggestion(method) < 3 * quiet, (size, seed)


def test_a_fall_after_a_rise_does_not_count() -> None:
    lrs = rates()
    losses = [loss + 3 * math.exp(-((k - 95) ** 2) / 4) for k, loss in enumerate(curve([min(lr, 0.02) for lr in lrs]))]
    assert suggested_lr(lrs, losses, "steepest") == pytest.approx(1e-3, rel=0.3)
    assert suggested_lr(lrs, losses, "valley") == pytest.approx(1e-3, rel=0.7)


def test_a_loss_below_zero_is_as_good() -> None:
    lrs = rates()
    for method in METHODS:
        lowered = [loss - 5 for loss in curve(lrs)]
        assert suggested_lr(lrs, lowered, method) == pytest.approx(suggested_lr(lrs, curve(lrs), method), rel=0.5)


def test_what_does_not_fall_suggests_nothing() -> None:
    for losses in ([1.0] * 50, noisy([1.0] * 50, 0.1, 0), [1 + 0.1 * k for k in range(50)]):
        with pytest.raises(ValueError, match="must fall"):
            suggested_lr(rates(50), losses)


def test_a_suggestion_needs_ten_losses_and_a_known_method() -> None:
    with pytest.raises(ValueError, match="at least 10 losses, got 9"):
        suggested_lr(rates(9), curve(rates(9)))
    with pytest.raises(ValueError, match="Did you mean 'valley'"):
        suggested_lr(rates(), curve(rates()), "vally")


# -- the result -------------------------------------------------------------------------------------------------------


def test_the_result_is_plain_data(real: LRFinderResult) -> None:
    data = json.loads(json.dumps(real.to_dict()))
    assert LRFinderResult(tuple(data["lrs"]), tuple(data["losses"])) == real
    assert tuple(data["smoothed"]) == real.smoothed
    assert len(real.smoothed) == len(real.losses)


def test_a_plot_has_its_suggestions_and_takes_axes() -> None:
    from matplotlib.figure import Figure

    mpl.use("agg")
    import matplotlib.pyplot as plt

    result = LRFinderResult(tuple(rates()), tuple(curve(rates())))
    figure, ax = result.plot()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert [label.split()[0] for label in labels] == ["loss", "smoothed", *METHODS]
    assert ax.get_xscale() == "log"
    plt.close(figure)
    before, own = plt.get_fignums(), Figure().subplots()
    assert result.plot(own)[1] is own
    assert plt.get_fignums() == before
    LRFinderResult((), ()).plot(Figure().subplots())  # also where there is nothing to suggest


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[plot\]"):
        LRFinderResult(tuple(rates()), tuple(curve(rates()))).plot()


# -- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_are_checked() -> None:
    cases = [
        (ValueError, {"min_lr": 0.0}, "min_lr must be above 0"),
        (ValueError, {"min_lr": 1.0, "max_lr": 0.1}, "below max_lr"),
        (TypeError, {"max_lr": "1"}, "max_lr must be a number"),
        (ValueError, {"steps": 5}, "steps must be at least 10"),
        (TypeError, {"steps": 5.5}, "steps must be an integer"),
        (ValueError, {"stop_factor": 1}, "stop_factor must be above 1"),
        (ValueError, {"stop_factor": 0.5}, "stop_factor must be in"),
        (TypeError, {"train_dataloaders": iter([])}, "read again"),
        (TypeError, {"trainer": build(Net)}, r"trainer must be a lightning\.pytorch Trainer"),
        (TypeError, {"module": torch.nn.Linear(1, 1)}, "module must be a LightningModule"),
    ]
    right = {"trainer": trainer(), "module": build(Net), "train_dataloaders": loader()}
    assert_refused(lambda **arguments: find_lr(**{**right, **arguments}), cases)


class Recording(PlainNet):
    """Keeps what every optimizer step saw, outside of the module."""

    seen: SimpleNamespace

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.losses.append(loss.item())
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        groups = self.optimizers().param_groups
        self.seen.rates.append([float(group["lr"]) for group in groups])
        self.seen.norms.append(math.sqrt(sum(float(p.grad.norm()) ** 2 for p in self.parameters())))


def recording(kind: type[Recording] = Recording) -> Any:
    seen = SimpleNamespace(losses=[], rates=[], norms=[])
    return build(type(kind.__name__, (kind,), {"seen": seen})), seen


# -- the sweep: learning rates and losses -----------------------------------------------------------------------------


def test_the_rates_are_geometric_and_the_losses_those_of_the_steps() -> None:
    module, seen = recording()
    result = find_lr(trainer(), module, loader(), min_lr=1e-6, max_lr=1e-2, steps=20)
    assert result.lrs == pytest.approx([1e-6 * 1e4 ** (k / 19) for k in range(20)])
    assert [first for (first,) in seen.rates] == list(result.lrs)
    assert result.losses == pytest.approx(seen.losses)


@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_groups_keep_their_ratio_to_the_largest(wrap: Any) -> None:
    class Groups(Recording):
        def configure_optimizers(self) -> Any:
            lrs = map(wrap, (0.1, 0.01, 0.0))
            layers = [self.layers[0].parameters(), [self.layers[2].weight], [self.layers[2].bias]]
            optimizer = torch.optim.Adam([{"params": p, "lr": lr} for p, lr in zip(layers, lrs, strict=True)])
            return lt.cosine(optimizer, self, warmup=5) if wrap is float else optimizer

    module, seen = recording(Groups)
    result = find_lr(trainer(), module, loader(), steps=12)
    for lr, rates in zip(result.lrs, seen.rates, strict=True):
        assert rates == pytest.approx([lr, lr / 10, 0.0])


def test_groups_have_the_base_learning_rates_of_the_schedules() -> None:
    class Scaled(Recording):
        def configure_optimizers(self) -> Any:
            first, last = self.layers[0].parameters(), self.layers[2]
            groups = [{"params": first, "lr_scale": 0.25}, {"params": [last.weight]}]
            return torch.optim.SGD([*groups, {"params": [last.bias], "max_lr": 0.05}], lr=0.1)

    module, seen = recording(Scaled)
    result = find_lr(trainer(), module, loader(), steps=12, max_lr=1e-2)
    for lr, rates in zip(result.lrs, seen.rates, strict=True):  # the rates are of the largest, which is not the first
        assert rates == pytest.approx([lr / 4, lr, lr / 2])


def test_a_warm_up_of_the_modules_own_does_not_count() -> None:
    class WarmUp(Recording):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 123.0
            super().optimizer_step(epoch, batch_idx, optimizer, closure)

    module, seen = recording(WarmUp)
    result = find_lr(trainer(), module, loader(), steps=12)
    assert [first for (first,) in seen.rates] == list(result.lrs)


def test_a_window_of_accumulated_batches_is_one_step() -> None:
    scheduler = GradientAccumulationScheduler({0: 4, 1: 1})
    for settings in ({"accumulate_grad_batches": 4}, {"callbacks": [scheduler]}):
        module, seen = recording()
        result = find_lr(trainer(**settings), module, loader(48), steps=10, max_lr=1e-2)
        means = []
        for epoch in range(5):  # of 6 batches, so windows of 4 and 2
            batches = seen.losses[6 * epoch : 6 * epoch + 6]
            means += [sum(batches[:4]) / 4, sum(batches[4:]) / 2]
        assert result.losses == pytest.approx(means)
        assert len(result.lrs) == 10


def test_gradients_are_clipped_as_the_trainer_does() -> None:
    module, seen = recording()
    find_lr(trainer(gradient_clip_val=0.01), module, loader(), steps=10)
    assert max(seen.norms) <= 0.01 * 1.001


def test_precision_is_the_trainers() -> None:
    class Half(Recording):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            assert out.dtype == torch.bfloat16
            return out

    module, _ = recording(Half)
    assert len(find_lr(trainer(precision="bf16-mixed"), module, loader(), steps=10).lrs) == 10


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_left_out() -> None:
    class Skips(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    result = find_lr(trainer(), build(Skips), loader(48), steps=12)
    assert len(result.lrs) == len(result.losses) == 10


def test_a_trainer_that_has_fitted_can_sweep_again() -> None:
    run, module = trainer(), build(Net)
    run.fit(module, loader(), loader(8))
    steps = run.global_step
    assert len(find_lr(run, module, loader(), steps=30).lrs) == 30
    assert run.global_step == steps


# -- the sweep: where it stops ----------------------------------------------------------------------------------------


class Scripted(PlainNet):
    """Losses of the test's own choice."""

    script: Callable[[int], float]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        return 0 * super().training_step(batch, batch_idx) + self.script(step)


def scripted(script: Callable[[int], float], **arguments: Any) -> Any:
    module = build(type("Scripted", (Scripted,), {"script": staticmethod(script)}))
    return find_lr(trainer(), module, loader(), steps=50, **arguments)


def test_it_stops_where_the_loss_has_risen() -> None:
    def script(step: int) -> float:
        return 1.0 if step < 30 else 1.0 + (step - 30)

    assert 30 <= len(scripted(script, stop_factor=4.0).lrs) <= 40
    assert len(scripted(script, stop_factor=100.0).lrs) == 50


def test_a_negative_loss_does_not_stop_it() -> None:
    assert len(scripted(lambda step: -1.0 - step).lrs) == 50
    assert len(scripted(lambda step: -1.0 if step < 30 else 50.0).lrs) < 40


def test_it_stops_at_a_loss_that_is_not_finite() -> None:
    for value in (math.nan, math.inf):
        result = scripted(lambda step, value=value: 1.0 if step < 20 else value)
        assert result.losses == (1.0,) * 20


def test_one_bad_batch_does_not_stop_it() -> None:
    assert len(scripted(lambda step: 5.0 if step == 20 else 1.0).lrs) == 50


def test_it_stops_when_there_are_no_more_batches() -> None:
    class Dry(IterableDataset[Any]):
        left = 24

        def __iter__(self) -> Any:
            while self.left:
                self.left -= 1
                yield data(24)[self.left]

    assert len(find_lr(trainer(), build(PlainNet), DataLoader(Dry(), 2), steps=50).lrs) == 12


# -- the sweep: what is muted -----------------------------------------------------------------------------------------


class Shouting(Callback):
    """Fails whenever a hook is called."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "setup", "teardown")):
            raise AssertionError(f"{name} was called")
        return super().__getattribute__(name)


class Loud(Net):
    """Schedules that would fail if stepped, callbacks of its own, a learning rate that is read while training."""

    def configure_callbacks(self) -> list[Callback]:
        return [Shouting()]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.lr_schedulers() is not None
        self.logger.log_metrics({"mine": 1.0})
        return super().training_step(batch, batch_idx)

    def validation_step(self, *_: Any) -> None:
        raise AssertionError("validation")

    def lr_scheduler_step(self, *_: Any) -> None:
        raise AssertionError("a schedule was stepped")


def test_callbacks_loggers_schedules_and_validation_are_muted(tmp_path: Path) -> None:
    callbacks = [Shouting(), lt.EMA(), lt.Mixup(), lt.HardExampleFilter(), EarlyStopping("val_loss")]
    settings: Any = {f"enable_{name}": True for name in ("checkpointing", "progress_bar", "model_summary")}
    settings |= {"logger": CSVLogger(tmp_path), "default_root_dir": tmp_path, "log_every_n_steps": 1}
    run, module = trainer(callbacks=callbacks, num_sanity_val_steps=2, **settings), build(Loud)
    module.val_dataloader = lambda: loader(8)
    assert len(find_lr(run, module, loader(), steps=20).lrs) == 20
    assert not list(tmp_path.rglob("*.*"))


def test_schedules_see_the_training_that_will_follow() -> None:
    totals = []

    class Counting(Net):
        def configure_optimizers(self) -> Any:
            totals.append(lt.optimizer_steps(self.trainer))
            return lt.cosine(super().configure_optimizers(), self, warmup=150)  # more than the sweep has

    assert len(find_lr(trainer(max_epochs=40), build(Counting), loader(), steps=20).lrs) == 20
    assert totals == [240]


def test_sam_takes_the_plain_gradient() -> None:
    class Sharp(lt.SAMMixin, Recording):
        sam = lt.SAM(rho=0.5)

    (sharp, seen), (plain, expected) = recording(Sharp), recording()
    a, b = (find_lr(trainer(), module, loader(), steps=20) for module in (sharp, plain))
    assert a == b
    assert seen == expected  # not twice
    assert sharp._sam is None
    trainer().fit(sharp, loader(), loader(8))
    assert len(seen.losses) == 20 + 2 * 12


# -- the sweep: what is refused ---------------------------------------------------------------------------------------


def refused(match: str, module: Any = None, **settings: Any) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        find_lr(trainer(**settings), module or build(Net), loader(), steps=10)


def test_manual_optimization_is_refused() -> None:
    module = build(Net)
    module.automatic_optimization = False
    refused(r"Net\.automatic_optimization=False", module)


def test_lazy_layers_are_refused() -> None:
    module = build(Net)
    module.layers[0] = torch.nn.LazyLinear(16)
    refused("lazy layers in Net", module)


def test_an_optimizer_without_a_learning_rate_is_refused() -> None:
    class Zero(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
            optimizer.param_groups[0]["lr"] = self.lr
            return optimizer

    for lr in (0.0, None):
        module = build(Zero)
        module.lr = lr
        refused("in SGD: set lr", module)


def test_other_strategies_are_refused() -> None:
    for kind in (DeepSpeedStrategy, FSDPStrategy):
        run = trainer()
        run._accelerator_connector.strategy = object.__new__(kind)
        with pytest.raises(MisconfigurationException, match=f"got {kind.__name__}"):
            find_lr(run, build(Net), loader())
    for strategy in ("ddp_spawn", "ddp_fork", "ddp_notebook"):
        refused("starts others", strategy=strategy, devices=2)


def test_a_fit_in_progress_is_refused() -> None:
    class Inside(Net):
        def on_train_start(self) -> None:
            find_lr(self.trainer, self, loader())

    with pytest.raises(MisconfigurationException, match=r"call it before trainer\.fit"):
        trainer().fit(build(Inside), loader(), loader(8))
    assert TrainerStatus.RUNNING  # the public name that is asked


# -- the sweep: several ranks -----------------------------------------------------------------------------------------


def swept(run: L.Trainer, module: Any) -> tuple[Any, dict[str, Any]]:
    before = weights(module)
    result = find_lr(run, module, rank_loader(), steps=30, max_lr=10.0)
    after = weights(module)
    assert_equal(before, after)
    return result, {"suggestion": result.suggestion(), "losses": result.losses}


def on_two_ranks() -> dict[str, Any]:
    module = build(PlainNet)
    run = trainer(strategy=DDPStrategy(), devices=2, use_distributed_sampler=False)
    _, answer = swept(run, module)
    run.fit(module, rank_loader(), loader(8))
    plain = build(PlainNet)
    trainer(strategy=DDPStrategy(), devices=2, use_distributed_sampler=False).fit(plain, rank_loader(), loader(8))
    assert_equal(weights(module), weights(plain))
    return answer


def test_two_ranks_agree_and_equal_one_process_on_their_batches_together() -> None:
    first, second = run_ranks(on_two_ranks)
    assert first == second
    alone = find_lr(trainer(), build(PlainNet), loader(48, batch_size=16), steps=30, max_lr=10.0)
    assert first["losses"] == pytest.approx(alone.losses, rel=1e-5)


class Sharded(PlainNet):
    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers[2], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def sharded(fails: bool = False) -> dict[str, Any]:
    def run() -> L.Trainer:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return trainer(strategy=strategy, devices=2, use_distributed_sampler=False)

    def whole(module: Any) -> dict[str, Tensor]:
        module.layers.reshard()
        return {name: weight.full_tensor().detach() for name, weight in module.named_parameters()}

    class Fails(Sharded):
        left = 6

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            type(self).left -= 1
            loss = F.cross_entropy(self(batch[0]), batch[1])
            if self.left == 0:
                raise RuntimeError("planned")
            return loss

    mine, module, plain = run(), build(Fails if fails else Sharded), build(Sharded)
    answer = {}
    if fails:
        before = weights(module)
        with pytest.raises(RuntimeError, match="planned"):
            find_lr(mine, module, rank_loader(), steps=30)
        assert_equal(weights(module), before)
    else:
        answer = swept(mine, module)[1]
    assert not isinstance(module.layers, FSDPModule)  # it is whole, as before
    mine.fit(module, rank_loader(), loader(8))
    run().fit(plain, rank_loader(), loader(8))
    trained = whole(plain)
    assert_equal(whole(module), trained)
    if not fails:  # and again from sharded weights
        find_lr(mine, module, rank_loader(), steps=30)
        assert_equal(whole(module), trained)
    return answer


def test_fsdp2_agrees_and_is_whole_again() -> None:
    first, second = run_ranks(sharded)
    assert first == second
    alone = find_lr(trainer(), build(PlainNet), loader(48, batch_size=16), steps=30, max_lr=10.0)
    assert first["losses"] == pytest.approx(alone.losses, rel=1e-5)


def test_fsdp2_is_whole_again_after_an_exception() -> None:
    run_ranks(sharded, True)
