"""SWA against a naive mean, BatchNorm statistics against ``torch.optim.swa_utils.update_bn``, and where both end up."""

from __future__ import annotations

import io
import signal
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import update_bn

import lightning_tricks as lt
from lightning_tricks.callbacks.swa import SWA
from tests.callbacks.test_lr_schedule import LearningRates
from tests.conformance.engines import cpu_deepspeed
from tests.device.devices import CUDA, device
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    SaveAt,
    SteppedByHand,
    assert_close,
    assert_equal,
    build,
    fit,
    loader,
    rank_loader,
    trained,
    trainer,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.swa import NaiveSWA, naive_statistics
from tests.refusals import assert_refused


def load(path: Any) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def statistics(module: Any) -> dict[str, Tensor]:
    return {name: value for name, value in weights(module).items() if "running" in name}


def parameters(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def assert_recalibrated(module: Net) -> None:
    """BatchNorm statistics are those that torch finds for the module's parameters."""
    bare = build(type(module))
    bare.load_state_dict(module.state_dict())
    update_bn(loader(), bare)
    assert_close(statistics(module), statistics(bare))


# ---- the average itself


@pytest.mark.few(8)
@pytest.mark.parametrize("every", [None, 1, 4])
@pytest.mark.parametrize("start", [0, 3, 6, 7])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("cut", [{}, {"max_steps": 7}], ids=["whole", "cut"])
def test_equals_a_naive_mean(every: Any, start: int, accumulate: int, cut: dict[str, Any]) -> None:
    naive, swa, module = NaiveSWA(start, every), SWA(start, every_n_steps=every), build()
    fit(module, callbacks=[swa, naive], max_epochs=4, accumulate_grad_batches=accumulate, **cut)  # 24 or 8 steps
    assert swa._running.updates == len(naive.snapshots())
    naive.assert_equals(module.state_dict())
    naive.assert_equals(swa.averaged_state_dict())
    assert_recalibrated(module)


def test_every_validation_sees_the_mean_so_far_with_the_current_statistics_and_the_last_one_its_own() -> None:
    class Seen(Net):
        def on_validation_epoch_end(self) -> None:
            seen.append((self.trainer.global_step, weights(self), self.layers[1].running_mean.clone()))

    class Raw(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            raw[trainer.global_step] = pl_module.layers[1].running_mean.clone()

    seen: list[tuple[int, dict[str, Tensor], Tensor]] = []
    raw: dict[int, Tensor] = {}
    naive, module = NaiveSWA(12), build(Seen)
    fit(module, callbacks=[SWA(0.5), naive, Raw()], max_epochs=4)
    assert [step for step, _, _ in seen] == [6, 12, 18, 24]
    for step, validated, mean in seen[:-1]:
        assert torch.equal(mean, raw[step])
        if step >= 12:
            naive.assert_equals(validated, last=step)
    assert_equal(seen[-1][1], weights(module))
    assert_recalibrated(module)


@pytest.mark.parametrize("kind", [PlainNet, Net])
def test_start_at_the_end_gives_the_last_weights(kind: Any) -> None:
    plain, averaged = build(kind), build(kind)
    fit(plain, max_epochs=3)
    fit(averaged, callbacks=[SWA(1.0)], max_epochs=3)
    assert_equal(parameters(plain), parameters(averaged))
    if kind is Net:
        assert_recalibrated(averaged)


def test_the_learning_rate_schedule_is_left_alone() -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            return lt.cosine(super().configure_optimizers(), self, warmup=3)

    plain, averaged = LearningRates(), LearningRates()
    fit(build(Scheduled), callbacks=[plain], max_epochs=4)
    fit(build(Scheduled), callbacks=[SWA(0.5), averaged], max_epochs=4)
    assert plain.seen == averaged.seen


def test_early_stopping_keeps_the_average_and_the_last_weights(tmp_path: Any) -> None:
    naive, module, stop = NaiveSWA(6, every=4), build(), EarlyStopping("val_loss", mode="max", patience=1)
    run = fit(module, callbacks=[SWA(6, every_n_steps=4), naive, stop], max_epochs=9)
    assert naive.snapshots() == [6, 10, 12]
    assert run.global_step == 12
    naive.assert_equals(module.state_dict())
    assert_recalibrated(module)
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert_equal(load(tmp_path / "x.ckpt")["state_dict"], weights(module))


@pytest.mark.parametrize(("every", "snapshots"), [(None, [6, 12, 15]), (4, [6, 10, 14, 15])])
@pytest.mark.parametrize("timed", [False, True])
def test_a_stop_in_mid_epoch_includes_the_last_weights(every: Any, snapshots: list[int], timed: bool) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 15

    class StepTimer(Timer):  # a step takes a second
        def time_elapsed(self, *_: Any) -> float:
            return float(run.global_step)

    naive, module = NaiveSWA(6, every), build()
    stop = StepTimer({"seconds": 15}, verbose=False) if timed else Stop()
    run = trainer(callbacks=[SWA(6, every_n_steps=every), naive, stop], max_epochs=9)
    run.fit(module, loader(), loader(24))
    assert naive.snapshots() == snapshots
    assert run.global_step == 15
    naive.assert_equals(module.state_dict())
    assert_recalibrated(module)


def test_an_epoch_that_its_module_ends_counts() -> None:
    class Short(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    naive, module = NaiveSWA(), build(Short)
    fit(module, callbacks=[SWA(0), naive], max_epochs=3)
    naive.epoch_ends = [3, 6, 9]
    naive.assert_equals(module.state_dict())


def test_an_epoch_whose_last_batch_makes_no_step_counts_before_its_validation() -> None:
    class Manual(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx % 4 == 3:  # of 6
                self.optimizers().step()
                self.optimizers().zero_grad()

        def on_validation_start(self) -> None:
            naive.assert_equals(self.state_dict(), last=self.trainer.global_step)

    naive, swa, module = NaiveSWA(), SWA(0), build(Manual)
    fit(module, callbacks=[swa, naive], max_epochs=3)
    assert swa._running.updates == 3
    naive.assert_equals(module.state_dict())


def test_without_an_optimizer_step_there_is_no_pass() -> None:
    class Overflow(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch_idx)
            return super().training_step(batch, batch_idx) * float("inf")

    seen: list[int] = []
    module, scaler = build(Overflow), torch.amp.GradScaler("cpu", init_scale=256.0)
    fit(module, callbacks=[SWA(0)], max_epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert seen == [*range(6)]
    assert_equal(parameters(module), parameters(build(Overflow)))


@pytest.mark.parametrize("at_end", ["raw", "averaged"])
@pytest.mark.parametrize("validate", ["raw", "averaged"])
def test_what_is_validated_and_kept_can_be_chosen(at_end: Any, validate: Any, tmp_path: Any) -> None:
    plain, module, swa = build(), build(), SWA(0.5, validate=validate, at_end=at_end)
    plain_run = fit(plain)
    run = fit(module, callbacks=[swa, ModelCheckpoint(tmp_path, filename="x")], enable_checkpointing=True)
    assert (run.callback_metrics["val_loss"] == plain_run.callback_metrics["val_loss"]) == (validate == "raw")
    wanted = {"raw": weights(plain), "averaged": swa.averaged_state_dict()}
    assert_equal(weights(module), wanted[at_end])
    assert_equal(load(tmp_path / "x.ckpt")["state_dict"], wanted[validate])
    with swa.averaged(module):
        assert_recalibrated(module)


# ---- the BatchNorm statistics


def test_statistics_are_the_mean_of_the_batches_statistics() -> None:
    module = build()
    fit(module, callbacks=[SWA(0.5)])
    mean, variance = naive_statistics(module.layers, 1, [x for x, _ in loader()])
    torch.testing.assert_close(module.layers[1].running_mean.double(), mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(module.layers[1].running_var.double(), variance, atol=1e-6, rtol=1e-6)


def test_without_recalibration_the_statistics_are_the_current_ones() -> None:
    plain, module = build(), build()
    fit(plain)
    fit(module, callbacks=[SWA(0.5, recalibrate_batchnorm=False)])
    assert_equal(statistics(plain), statistics(module))
    assert not torch.equal(plain.layers[0].weight, module.layers[0].weight)


@pytest.mark.parametrize(("kind", "epochs"), [(PlainNet, 2), (Net, 3)])
def test_the_loader_is_read_once_more_only_for_batchnorm(kind: Any, epochs: int) -> None:
    class Counted(kind):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            counts.append(batch_idx)
            return super().training_step(batch, batch_idx)

    counts: list[int] = []
    fit(build(Counted), callbacks=[SWA(0.5)])
    assert counts == [*range(6)] * epochs


def test_logs_metrics_and_random_numbers_do_not_notice(tmp_path: Any) -> None:
    class After(Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            numbers.append(torch.rand(3))

    numbers: list[Tensor] = []
    rows, metrics = [], []
    for name, callbacks in (("plain", []), ("averaged", [SWA(1.0, validate="raw")])):
        logger = CSVLogger(tmp_path, name)
        run = fit(build(), callbacks=[*callbacks, After()], logger=logger, log_every_n_steps=1)
        ours = [{k: v for k, v in row.items() if not k.startswith("tricks/")} for row in logger.experiment.metrics]
        rows.append([row for row in ours if row.keys() != {"step"}])
        metrics.append({k: v for k, v in run.callback_metrics.items() if not k.startswith("tricks/")})
    assert rows[0] == rows[1]
    assert metrics[0] == metrics[1]
    assert torch.equal(*numbers)


class FailingPass(NormNet):
    """Raises in the pass that takes the statistics, by an error or by Ctrl-C."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 4 and not torch.is_grad_enabled() and self.error is not None:
            if self.error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise self.error("planned")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("early", [False, True])
def test_an_exception_in_the_pass_leaves_the_module_raw_and_the_average_whole(
    error: type[BaseException], early: bool, tmp_path: Any
) -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.should_stop = early and trainer.current_epoch == 1

    module, swa, naive = build(FailingPass, error=error), SWA(0), NaiveSWA()
    plain = trained(NormNet, max_epochs=2)
    saved = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_epochs=99)
    handler, epochs = signal.getsignal(signal.SIGINT), 4 if early else 2
    with pytest.raises((RuntimeError, SystemExit)):
        fit(module, callbacks=[naive, swa, Stop(), saved], max_epochs=epochs, enable_checkpointing=True)
    signal.signal(signal.SIGINT, handler)  # which Lightning ignores from the first Ctrl-C on
    assert_equal(weights(module), plain)
    assert module.layers[1].momentum == 0.1
    assert "log" not in vars(module)
    naive.assert_equals(swa.averaged_state_dict())
    (path,) = tmp_path.glob("*.ckpt")
    naive.assert_equals(load(path)["state_dict"])


# ---- checkpoints and resume


def test_a_checkpoint_after_the_fit_scores_what_validate_says(tmp_path: Any) -> None:
    module, last = build(), ModelCheckpoint(tmp_path, save_last=True)
    run = fit(module, callbacks=[SWA(0.5), last], enable_checkpointing=True, max_epochs=4)
    ended = run.callback_metrics["val_loss"].item()
    run.save_checkpoint(tmp_path / "x.ckpt")
    for path in (tmp_path / "x.ckpt", tmp_path / "last.ckpt"):
        bare = build()
        bare.load_state_dict(load(path)["state_dict"])
        assert_recalibrated(bare)
        assert_equal(weights(bare), weights(module))
        assert trainer().validate(bare, loader(24), verbose=False)[0]["val_loss"] == pytest.approx(ended, abs=1e-7)
    assert run.validate(module, loader(24), verbose=False)[0]["val_loss"] == pytest.approx(ended, abs=1e-7)


@pytest.mark.few(4)
@pytest.mark.parametrize("settings", [*({"start": n} for n in (0, 7, 12)), {"start": 5, "every_n_steps": 4}], ids=str)
@pytest.mark.parametrize("ended", [6, 12, 18])
@pytest.mark.parametrize("first", [False, True])
def test_resume_from_a_checkpoint_of_the_run_is_bit_exact(
    settings: dict[str, Any], ended: int, first: bool, tmp_path: Any
) -> None:
    swa, resumed = SWA(**settings), SWA(**settings)
    save = SaveAt(tmp_path / "x.ckpt", step=ended)  # before and after the callback has had its turn
    whole = trained(NormNet, *([save, swa] if first else [swa, save]), max_epochs=4)
    rest = trained(NormNet, resumed, max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert swa._running.updates == resumed._running.updates
    assert_equal(whole, rest)
    assert_equal(swa._running.tensors, resumed._running.tensors)


def test_a_fit_that_goes_on_has_its_own_statistics_again() -> None:
    class Start(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                started.append(weights(pl_module))

    module, started, naive = build(NormNet), [], NaiveSWA(6)
    plain = trained(NormNet)
    run = fit(module, callbacks=[SWA(6), naive, Start()])
    run.fit_loop.max_epochs = 4
    run.fit(module, loader(), loader(24))
    assert len(started) == 4
    assert_equal(started[2], plain)
    assert naive.snapshots() == [6, 12, 18, 24]
    naive.assert_equals(module.state_dict())
    assert_recalibrated(module)


@pytest.mark.parametrize("saved", ["validation", "train_end"])
def test_a_finished_fit_is_resumed_exactly(saved: str, tmp_path: Any) -> None:
    half, save, path = build(NormNet), ModelCheckpoint(tmp_path, filename="validation"), tmp_path / f"{saved}.ckpt"
    fit(half, callbacks=[SWA(6), save], enable_checkpointing=True).save_checkpoint(tmp_path / "train_end.ckpt")
    assert_equal(load(path)["state_dict"], weights(half))
    assert_equal(trained(NormNet, SWA(6), ckpt_path=path), weights(half))  # nothing left to do
    assert_equal(trained(NormNet, SWA(6), max_epochs=4, ckpt_path=path), trained(NormNet, SWA(6), max_epochs=4))


# ---- with others


def test_with_sharpness_aware_minimization() -> None:
    class SharpNet(lt.SAMMixin, NormNet):
        sam = lt.SAM(rho=0.05)

    naive, module, plain = NaiveSWA(6), build(SharpNet), build(SharpNet)
    fit(module, callbacks=[SWA(6), naive])
    naive.assert_equals(module.state_dict())
    fit(plain)
    assert torch.equal(naive.weights[12]["layers.0.weight"], plain.layers[0].weight.double())
    mean, _ = naive_statistics(module.layers, 1, [x for x, _ in loader()])
    torch.testing.assert_close(module.layers[1].running_mean.double(), mean, atol=1e-6, rtol=1e-6)


# ---- arguments and what is refused


def test_bad_arguments_name_the_argument_the_value_and_what_is_allowed() -> None:
    cases = [
        (ValueError, {"start": 1.5}, "start must be an int"),
        (ValueError, {"start": -1}, "start"),
        (TypeError, {"start": "0.5"}, "start must be an int"),
        (ValueError, {"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        (TypeError, {"every_n_steps": 1.5}, "every_n_steps must be an integer, got 1.5"),
        (TypeError, {"every_n_steps": True}, "every_n_steps"),
        (TypeError, {"every_n_steps": "epoch"}, "every_n_steps"),
        (TypeError, {"recalibrate_batchnorm": 1}, "recalibrate_batchnorm must be True or False, got 1"),
        (ValueError, {"validate": "avg"}, "validate must be one of 'averaged', 'raw', 'both', got 'avg'"),
        (ValueError, {"at_end": None}, "at_end"),
    ]
    assert_refused(SWA, cases)


class Manual(SteppedByHand, Net):
    """Steps by itself."""


class Pulling(Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        (x, y), _, _ = next(dataloader_iter)
        return F.cross_entropy(self(x), y)


class Files(Net):
    """Has a file and a tensor in a list, into which it writes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.file, self.counts = io.BytesIO(), [torch.zeros(1)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.file.write(b"line")
        self.counts[0] += 1
        return super().training_step(batch, batch_idx)


class Iterates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.source = iter(range(99))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Files, r"SWA.*Files.file \(BytesIO\) has changed in a step .* pass recalibrate_batchnorm=False"),
        (Iterates, r"SWA.*Iterates.source is an iterator.* pass recalibrate_batchnorm=False"),
        (Manual, r"SWA.*got Manual.automatic_optimization=False: pass recalibrate_batchnorm=False"),
        (Pulling, r"SWA.*got Pulling.training_step\(dataloader_iter\).*recalibrate_batchnorm=False"),
    ],
)
def test_a_step_that_cannot_be_run_for_its_statistics_is_refused_with_the_remedy(kind: Any, message: str) -> None:
    module = build(kind)
    before = weights(module)["layers.0.weight"]
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=[SWA(0)])
    assert torch.equal(weights(module)["layers.0.weight"], before)
    naive, module = NaiveSWA(), build(kind)
    fit(module, callbacks=[SWA(0, recalibrate_batchnorm=False), naive])
    naive.assert_equals(module.state_dict())


def test_weights_that_the_step_writes_into_are_restored_behind_the_run_for_its_statistics() -> None:
    class Decays(NormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.layers[0].weight.mul_(0.9)
            return super().training_step(batch, batch_idx)

    ended = []
    for recalibrate in (True, False):
        module = build(Decays)
        fit(module, callbacks=[lt.SWA(start=0, recalibrate_batchnorm=recalibrate)])
        ended.append({name: weight.detach() for name, weight in module.named_parameters()})
    assert_equal(*ended)


def test_tensors_in_containers_are_restored_behind_the_run_for_its_statistics() -> None:
    class Counts(Files):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.counts[0] += 1
            return Net.training_step(self, batch, batch_idx)

    run = fit(module := build(Counts), callbacks=[SWA(0)])
    assert module.counts[0] == run.global_step


# ---- two processes


def fit_ranks(folder: str, cut: dict[str, Any]) -> dict[str, Any]:
    swa, module = SWA(3), build(NormNet)
    settings: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "max_epochs": 4}
    run = fit(module, callbacks=[swa], train=rank_loader(), **settings, **cut)
    run.save_checkpoint(f"{folder}/x.ckpt")
    return swa.averaged_state_dict()


def assert_as_one_process(ranks: list[dict[str, Any]], **cut: Any) -> dict[str, Tensor]:
    """The ranks agree bit for bit, and have what one process finds on the batches of both."""
    first, second = ranks
    assert_equal(first, second)
    naive, bare = NaiveSWA(3), build(NormNet)
    fit(build(NormNet), callbacks=[naive], train=loader(48), accumulate_grad_batches=2, max_epochs=4, **cut)
    naive.assert_equals(first)
    bare.load_state_dict(first)
    mean, variance = naive_statistics(bare.layers, 1, [x for x, _ in loader(48)])
    torch.testing.assert_close(first["layers.1.running_mean"].double(), mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(first["layers.1.running_var"].double(), variance, atol=1e-6, rtol=1e-6)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, {"max_steps": 7}], ids=["whole", "cut"])
def test_ranks_agree_on_weights_and_statistics(tmp_path: Any, cut: dict[str, Any]) -> None:
    ended = assert_as_one_process(run_ranks(fit_ranks, str(tmp_path), cut), **cut)
    assert_equal(load(tmp_path / "x.ckpt")["state_dict"], ended)


class ShardedNet(NormNet):
    def configure_model(self) -> None:
        if not isinstance(self.layers[0].weight, DTensor):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def fit_shards(engine: str, folder: str) -> dict[str, Any]:
    def run(*callbacks: Callback, **settings: Any) -> L.Trainer:
        strategy = ModelParallelStrategy(2, 1) if engine == "fsdp2" else cpu_deepspeed()
        own: dict[str, Any] = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "max_epochs": 4}
        module = build(ShardedNet if engine == "fsdp2" else NormNet)
        return fit(module, callbacks=list(callbacks), train=rank_loader(), **own, **settings)

    whole, rest = SWA(3), SWA(3)
    run(whole, SaveAt(f"{folder}/half.ckpt", epoch=1))
    run(rest, ckpt_path=f"{folder}/half.ckpt")
    assert_equal(whole.averaged_state_dict(), rest.averaged_state_dict())
    return whole.averaged_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_shards_are_averaged_recalibrated_and_resumed_as_one_process(engine: str, tmp_path: Any) -> None:
    assert_as_one_process(run_ranks(fit_shards, engine, str(tmp_path)))


@pytest.mark.parametrize("on", CUDA)
def test_on_a_device_average_and_statistics_equal_naive_ones(on: str) -> None:
    naive, module = NaiveSWA(6), build(NormNet)
    with device(on) as there:
        fit(module, callbacks=[SWA(6), naive], accelerator=there.name, max_epochs=3)
        module.cpu()
        for name, value in naive.mean().items():
            torch.testing.assert_close(module.state_dict()[name].double(), value.cpu(), atol=1e-6, rtol=1e-6)
    assert_recalibrated(module)


def test_both_sets_of_weights_are_validated() -> None:
    swa, plain = SWA(0.5, validate="both"), build(NormNet)
    raw = fit(plain, max_epochs=4).callback_metrics["val_loss"]
    run = fit(build(NormNet), callbacks=[swa], max_epochs=4)
    averaged = fit(build(NormNet), callbacks=[SWA(0.5)], max_epochs=4).callback_metrics["val_loss"]
    assert run.callback_metrics["val_loss_raw"] == raw
    assert run.callback_metrics["val_loss"] == averaged != raw
