"""SkipNonFinite: a run with bad batches is the run without them, bit for bit, on every rank."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.runs import fp16
from tests.nets import TWO, NormNet, PlainNet, SaveAt, ShardedLayers, assert_equal, build, data, fit, trained, weights
from tests.ranks import run_ranks

BATCHES = 12


def batches(*left_out: int, rank: int = 0, ranks: int = 1, count: int = BATCHES) -> DataLoader[Any]:
    """Batches of eight samples for a rank, without some."""
    starts = [8 * (ranks * batch + rank) for batch in range(count) if batch not in left_out]
    indices = [sample for start in starts for sample in range(start, start + 8)]
    return DataLoader(Subset(data(8 * ranks * count), indices), batch_size=8)


class Clean(NormNet):
    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=0.02), self, warmup=2, total_steps=40)


class Bad(Clean):
    """Something is infinite or undefined in some batches, on the first rank."""

    how = "gradient"
    when: tuple[int, ...] = (3, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.now = batch_idx in self.when and self.global_rank == 0
        if self.now and self.how == "input":
            x = x * torch.nan  # reaches the statistics of BatchNorm
        loss = super().training_step((x, y), batch_idx)
        return loss + torch.inf if self.now and self.how == "loss" else loss

    def on_after_backward(self) -> None:
        if self.now and self.how == "gradient":
            gradient = self.layers[0].weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).fill_(torch.inf)


def bad(how: str, base: type[L.LightningModule] = Bad, **attributes: Any) -> Any:
    return build(type(base)("Spoiled", (base,), {"how": how, **attributes}))


def optimizer_state(run: L.Trainer) -> dict[str, Tensor]:
    state = run.optimizers[0].state_dict()["state"]
    return {f"{number}/{key}": value for number, each in state.items() for key, value in each.items()}


@pytest.mark.few(4)
@pytest.mark.parametrize("how", ["gradient", "loss", "input"])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}, {"max_steps": 9}], ids=str
)
def test_a_run_with_bad_batches_is_bit_equal_to_the_run_without_them(
    how: str, averaged: bool, settings: dict[str, Any]
) -> None:
    spoiled, clean, skip = bad(how), build(Clean), lt.SkipNonFinite()
    callbacks = [lt.EMA(0.9)] if averaged else []
    with_skip = fit(spoiled, max_epochs=1, train=batches(), callbacks=[skip, *callbacks], **settings)
    callbacks = [lt.EMA(0.9)] if averaged else []
    without = fit(clean, max_epochs=1, train=batches(3, 6), callbacks=callbacks, **settings)
    assert_equal(weights(spoiled), weights(clean))
    assert_equal(optimizer_state(with_skip), optimizer_state(without))
    assert with_skip.optimizers[0].param_groups[0]["lr"] == without.optimizers[0].param_groups[0]["lr"]
    assert with_skip.global_step == without.global_step == settings.get("max_steps", 10)
    assert skip.skipped_steps == with_skip.callback_metrics["tricks/skipped_steps"] == 2


def test_an_accumulated_window_is_dropped_as_a_whole() -> None:
    spoiled, skip = bad("input", when=(3,)), lt.SkipNonFinite()
    fit(spoiled, max_epochs=1, train=batches(), callbacks=[skip], accumulate_grad_batches=2)
    assert_equal(weights(spoiled), trained(Clean, max_epochs=1, train=batches(2, 3), accumulate_grad_batches=2))
    assert skip.skipped_steps == 1


class Manual(Bad):
    """Two steps a batch by hand, of which the second sees the bad gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


def test_manual_optimization() -> None:
    spoiled, clean, skip = bad("input", Manual), bad("input", Manual, when=()), lt.SkipNonFinite()
    run = fit(spoiled, max_epochs=1, train=batches(), callbacks=[skip])
    assert run.global_step == fit(clean, max_epochs=1, train=batches(3, 6)).global_step == 20
    assert_equal(weights(spoiled), weights(clean))
    assert skip.skipped_steps == 4


class Two(Clean):
    """Two optimizers by hand; the gradients of the second are never finite."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(8, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters()) for part in (self.layers, self.other)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        losses = super().training_step(batch, batch_idx), self.other(batch[0]).sum() * torch.nan
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def test_each_optimizer_has_its_own_row() -> None:
    with pytest.raises(FloatingPointError, match=r"skipped 3 .* the gradients of other\.weight, other\.bias;"):
        fit(build(Two), max_epochs=1, train=batches(), callbacks=[lt.SkipNonFinite(max_consecutive=3)])


@pytest.mark.parametrize("how", ["gradient", "loss", "input"])
def test_with_rewinds_the_first_of_the_two_decides(how: str) -> None:
    clean = trained(Clean, max_epochs=1, train=batches(3, 6))
    skip, rewind = lt.SkipNonFinite(), lt.RewindOnSpike(threshold=1e3, window=2, every_n_steps=1)
    for callbacks in ([skip, rewind], [rewind, skip]):
        spoiled = bad(how)
        fit(spoiled, max_epochs=1, train=batches(), callbacks=callbacks)
        assert (skip.skipped_steps, rewind.rewinds) == ((2, 0) if callbacks[0] is skip else (0, 2))
        assert_equal(weights(spoiled), clean)


class Replaces(Bad):
    """Makes a buffer anew in each step, and another in the first."""

    how = "input"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * torch.nan if batch_idx in self.when else batch[0]
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        if not hasattr(self, "first"):
            self.register_buffer("first", self.mean)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("guard", [lt.SkipNonFinite, lambda: lt.RewindOnSpike(every_n_steps=1)])
def test_buffers_that_a_step_makes_anew_are_left_out_too(guard: Any) -> None:
    spoiled, clean = bad("input", Replaces, when=(0, 6)), bad("input", Replaces, when=())
    fit(spoiled, max_epochs=1, train=batches(), callbacks=[guard()])
    fit(clean, max_epochs=1, train=batches(0, 6))
    assert_equal(weights(spoiled), weights(clean))


@pytest.mark.few(8)
@pytest.mark.parametrize("sample", range(8))
@pytest.mark.parametrize("settings", [{}, {"mode": "loss"}], ids=str)
def test_the_filter_drops_no_sample_that_is_not_finite(sample: int, settings: dict[str, Any]) -> None:
    """BatchNorm spreads it over the losses of all, of which none is the largest."""
    given, skip = data(), lt.SkipNonFinite()
    given.tensors[0][16 + sample] = torch.nan
    run = fit(build(NormNet), train=DataLoader(given, 8), callbacks=[lt.HardExampleFilter(**settings), skip])
    assert skip.skipped_steps == 2
    assert run.global_step == 10


def test_sam() -> None:
    sharp, sharp_clean = (type(f"SAM{kind.__name__}", (lt.SAMMixin, kind), {}) for kind in (Bad, Clean))
    for how in ("input", "loss"):
        spoiled, clean, skip = bad(how, sharp), build(sharp_clean), lt.SkipNonFinite()
        fit(spoiled, max_epochs=1, train=batches(), callbacks=[skip])
        fit(clean, max_epochs=1, train=batches(3, 6))
        assert_equal(weights(spoiled), weights(clean))
        assert skip.skipped_steps == 2


def test_under_a_grad_scaler_it_counts_and_gives_buffers_back() -> None:
    ended = []
    for callbacks in ([], [lt.SkipNonFinite()]):
        run = fit(spoiled := bad("gradient"), max_epochs=1, train=batches(), callbacks=callbacks, **fp16())
        ended.append((weights(spoiled), run.global_step))
    (without, steps), (given, same_steps) = ended
    compared = [name for name in given if "layers.1.r" not in name and "num" not in name]
    assert_equal(*({name: each[name] for name in compared} for each in (without, given)))
    assert given["layers.1.num_batches_tracked"] == without["layers.1.num_batches_tracked"] - 2
    assert steps == same_steps == 12
    assert callbacks[0].skipped_steps == 2


@pytest.mark.parametrize(("how", "names"), [("gradient", "layers.0.weight"), ("loss", "the loss, of which every")])
def test_it_stops_after_too_many_in_a_row(how: str, names: str) -> None:
    spoiled = bad(how, when=tuple(range(2, BATCHES)))
    losses: list[float] = []

    class Losses(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            losses.append(loss.item())

    with pytest.raises(FloatingPointError) as caught:
        fit(spoiled, max_epochs=1, train=batches(), callbacks=[Losses(), lt.SkipNonFinite(max_consecutive=3)])
    assert "skipped 3 optimizer steps in a row after step 2" in str(caught.value)
    assert names in str(caught.value)
    last = losses[1] if how == "loss" else losses[-1]
    assert f"last finite loss: {last:.6g}" in str(caught.value)
    assert not spoiled.trainer.strategy.__dict__.keys() & {"optimizer_step"}


def test_a_good_step_starts_the_row_anew() -> None:
    skip = lt.SkipNonFinite(max_consecutive=2)
    fit(bad("input", when=(1, 3, 5, 7)), max_epochs=1, train=batches(), callbacks=[skip])
    assert skip.skipped_steps == 4


def test_a_resumed_run_goes_on_counting_and_is_exact(tmp_path: Any) -> None:
    whole, resumed, skip = bad("input"), bad("input"), lt.SkipNonFinite()
    fit(whole, train=batches(), callbacks=[lt.SkipNonFinite(), SaveAt(tmp_path / "half.ckpt", epoch=0)])
    run = fit(resumed, train=batches(), callbacks=[skip], ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(resumed), weights(whole))
    assert (skip.skipped_steps, run.global_step) == (4, 20)


def test_lbfgs_is_refused() -> None:
    module = build(PlainNet)
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        fit(module, callbacks=[lt.SkipNonFinite()])


@pytest.mark.parametrize("value", [0, -1])
def test_a_wrong_number_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="max_consecutive must be at least 1, got"):
        lt.SkipNonFinite(max_consecutive=value)


class Sharded(ShardedLayers, Bad):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def two_ranks() -> dict[str, Any]:
    rank, ended = int(os.environ["RANK"]), {}
    for name in ("ddp", "fsdp"):
        for how in ("gradient", "loss", "input"):
            ended_weights = []
            for when, left_out in (((3, 6), ()), ((), (3, 6))):
                module, skip = bad(how, Sharded, when=when), lt.SkipNonFinite()
                own = {"train": batches(*left_out, rank=rank, ranks=2), "callbacks": [skip] if when else []}
                strategy = "ddp" if name == "ddp" else ModelParallelStrategy(2, 1)
                fit(module, max_epochs=1, strategy=strategy, **own, **TWO)
                ended[name, how] = max(skip.skipped_steps, ended.get((name, how), 0))
                ended_weights.append(weights(module))
            assert_equal(*ended_weights)
            assert all(value.isfinite().all() for value in ended_weights[0].values())
    return ended


def test_all_ranks_leave_out_what_is_bad_on_one() -> None:
    for ended in run_ranks(two_ranks):
        assert set(ended.values()) == {2}


def never_finite() -> str:
    module, skip = bad("gradient", Sharded, when=tuple(range(BATCHES))), lt.SkipNonFinite(max_consecutive=3)
    settings = {"train": batches(rank=int(os.environ["RANK"]), ranks=2), "max_epochs": 1, **TWO}
    with pytest.raises(FloatingPointError) as caught:
        fit(module, callbacks=[skip], strategy=ModelParallelStrategy(2, 1), **settings)
    return str(caught.value)


def test_both_ranks_stop_and_name_the_parameter_of_one() -> None:
    for said in run_ranks(never_finite):
        assert "layers.0.weight" in said


def refused() -> None:
    for guard in (lt.SkipNonFinite(), lt.RewindOnSpike()):
        strategy = lt.DDPPreset(compression="powersgd", process_group_backend="gloo")
        with pytest.raises(MisconfigurationException, match=rf"{type(guard).__name__} .*PowerSGD"):
            fit(build(PlainNet), callbacks=[guard], strategy=strategy, devices=2)
    with pytest.raises(MisconfigurationException, match=r"SkipNonFinite .* CPUDeepSpeedStrategy"):
        fit(build(PlainNet), callbacks=[lt.SkipNonFinite()], strategy=cpu_deepspeed(), devices=2)


def test_power_sgd_and_deepspeed_are_refused() -> None:
    run_ranks(refused)
