"""BatchNorm statistics of the present weights: right for every kind of loader and step, and nothing else has moved."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import Accuracy

import lightning_tricks as lt
from lightning_tricks.core.averaging.batchnorm import batchnorm_layers, recalibrate
from tests.device.devices import CUDA, Device, device
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    rank_loader,
    spelled,
    trainer,
    weights,
)
from tests.ranks import run_ranks
from tests.reference.swa import naive_statistics

MEAN, VARIANCE = "layers.1.running_mean", "layers.1.running_var"


class Recalibrate(Callback):
    """Takes the statistics where SWA does, and what ``probe`` returns before and after."""

    def __init__(self, *, at_train_end: bool = False, probe: Callable[[L.Trainer, Any], Any] | None = None) -> None:
        self.at_train_end, self.probe = at_train_end, probe
        self.found: dict[str, Tensor] = {}
        self.seen: list[Any] = []

    def take(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen = [self.probe(trainer, pl_module)] if self.probe else []
        self.found = recalibrate(trainer, pl_module)
        self.seen += [self.probe(trainer, pl_module)] if self.probe else []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if (last or trainer.global_step == trainer.max_steps) and not self.at_train_end:
            self.take(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.at_train_end:
            self.take(trainer, pl_module)


def take(kind: type[Net] = NormNet, module: Any = None, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """Fit a module, and give it and the statistics found for its last weights."""
    callback, module = Recalibrate(), build(kind) if module is None else module
    fit(module, callbacks=[callback], **settings)
    return module, callback.found


def assert_statistics(module: Any, found: dict[str, Tensor], inputs: list[Tensor], tolerance: float = 1e-6) -> None:
    mean, variance = naive_statistics(module.layers, 1, inputs)
    torch.testing.assert_close(found[MEAN].double(), mean, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(found[VARIANCE].double(), variance, atol=tolerance, rtol=tolerance)


def inputs(size: int = 44, batch_size: int = 8) -> list[Tensor]:
    return [x for x, _ in loader(size, batch_size)]


# ---- the statistics


@pytest.mark.parametrize("at_train_end", [False, True])
def test_equal_those_of_update_bn_and_of_a_naive_mean(at_train_end: bool) -> None:
    module, callback = build(), Recalibrate(at_train_end=at_train_end)
    fit(module, callbacks=[callback])
    assert callback.found.keys() == {MEAN, VARIANCE}
    assert_statistics(module, callback.found, inputs())
    update_bn(loader(), module)
    assert_close(callback.found, {name: module.state_dict()[name] for name in callback.found})


def test_a_step_of_one_argument() -> None:
    class Short(NormNet):
        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch, 0)

    assert_statistics(*take(Short), inputs())


def test_the_batch_index_is_that_of_the_batch() -> None:
    class Indexed(NormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            indices.append(batch_idx)
            return super().training_step(batch, batch_idx)

    indices: list[int] = []
    take(Indexed, max_epochs=1)
    assert indices == [*range(6), *range(6)]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_batches_as_dictionaries_of_several_loaders(mode: Any) -> None:
    class Two(NormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batches = [each for each in batch.values() if each is not None]
            return sum(F.cross_entropy(self(x), y) for x, y in batches)

    shorter = DataLoader(data(24, seed=1), 8)
    a, b = inputs(), [x for x, _ in shorter]
    module, found = take(Two, train=CombinedLoader({"a": loader(), "b": shorter}, mode))
    wanted = {"min_size": a[:3] + b, "max_size_cycle": a + b + b, "max_size": a + b}[mode]
    assert_statistics(module, found, wanted)  # a layer that is called twice in a step counts twice


class Stream(IterableDataset):
    """Without a length; endless if asked."""

    def __init__(self, endless: bool = False) -> None:
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        yield from data()
        while self.endless:
            yield from data()


@pytest.mark.parametrize(
    ("settings", "batches"),
    [
        ({"train": DataLoader(Stream(), 8)}, 6),
        ({"train": DataLoader(Stream(), 8), "limit_train_batches": 4}, 4),
        ({"train": DataLoader(Stream(endless=True), 4), "max_steps": 5}, 5),
        ({"train": DataLoader(Stream(endless=True), 4), "max_steps": 5, "accumulate_grad_batches": 2}, 10),
        ({"limit_train_batches": 4}, 4),
        ({"limit_train_batches": 0.5}, 3),
        ({"overfit_batches": 2}, 2),
        ({"max_steps": 8}, 6),
        ({"fast_dev_run": 3}, 3),
    ],
    ids=spelled,
)
def test_as_many_batches_as_an_epoch_has(settings: dict[str, Any], batches: int) -> None:
    module, found = take(**{"max_epochs": 2, **settings})
    assert_statistics(module, found, inputs(batch_size=getattr(settings.get("train"), "batch_size", 8))[:batches])


def test_a_loader_that_can_be_read_only_once_is_an_error_that_names_the_remedy() -> None:
    once = iter(list(loader()))
    with pytest.raises(RuntimeError, match=r"read only once, leave them out: SWA\(recalibrate_batchnorm=False\)"):
        take(train=once, max_epochs=1)


def test_batches_go_through_the_hooks_of_the_data_module_and_the_precision() -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def val_dataloader(self) -> Any:
            return loader(24)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] + 1, batch[1]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch[0].dtype == torch.float64
            return batch[0] * 2, batch[1]

    callback, module = Recalibrate(), build(NormNet)
    trainer(max_epochs=1, precision="64-true", callbacks=[callback]).fit(module, datamodule=Data())
    assert callback.found[MEAN].dtype == torch.float64
    assert_statistics(module, callback.found, [(x.double() + 1) * 2 for x in inputs()], tolerance=1e-12)


def test_a_batch_that_is_none_is_skipped() -> None:
    class Holes(NormNet):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return None if self.trainer.training and torch.equal(batch[0], second) else batch

    second = inputs()[1]
    with pytest.warns(UserWarning, match="yielded None"):
        module, found = take(Holes)
    assert_statistics(module, found, inputs()[:1] + inputs()[2:])


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_mean_of_many_batches_is_exact_in_bf16_too(precision: Any) -> None:
    class Still(NormNet):  # so that the reference can be taken batch by batch
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module, found = take(Still, train=DataLoader(data(2400), 4), max_epochs=1, precision=precision)
    layer, kept = module.layers[1], []
    layer.momentum = None
    for x in (x for x, _ in DataLoader(data(2400), 4)):
        layer.reset_running_stats()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            module.train()(x.to(layer.weight.dtype))
        kept.append(layer.running_mean.double())
    torch.testing.assert_close(found[MEAN].double(), torch.stack(kept).mean(0), atol=1e-6, rtol=1e-5)


def test_layers_of_every_dimension_shared_lazy_and_unused() -> None:
    class Conv(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Unflatten(1, (1, 2, 2, 2)), nn.LazyBatchNorm3d(), nn.Flatten(1, 2), nn.Conv2d(2, 8, 1),
                nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), nn.Conv1d(8, 4, 1), nn.BatchNorm1d(4), nn.Flatten(),
                nn.LazyBatchNorm1d(momentum=None), nn.Linear(16, 2),
            )  # fmt: skip
            self.again = self.layers[4]
            self.unused = nn.BatchNorm1d(3)
            self.plain = nn.BatchNorm1d(3, track_running_stats=False)
            self.layers(data()[:4][0])

    module, found = take(Conv)
    reference = build(Conv)
    reference.load_state_dict(module.state_dict())
    update_bn(loader(), reference)
    wanted = {n: v for n, v in dict(reference.named_buffers()).items() if "running" in n and "unused" not in n}
    assert_close(found, wanted)
    assert module.layers[10].momentum is None


def test_a_layer_compiled_without_graph_breaks() -> None:
    class Compiled(NormNet):
        def __init__(self) -> None:
            super().__init__()
            torch.compiler.reset()  # the limit of recompilations may have been reached by other tests
            self.compiled = torch.compile(self.layers, backend="eager", fullgraph=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.compiled(x)

    module, found = take(Compiled)
    assert_statistics(module, found, inputs())


def test_layers_that_take_no_statistics_in_training_are_left_out() -> None:
    class Counted(NormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    class Evaluated(Counted):
        def on_train_epoch_start(self) -> None:
            self.layers[1].eval()

    class Frozen(Counted):  # as by Lightning's BaseFinetuning.freeze
        def on_train_epoch_start(self) -> None:
            self.layers[1].track_running_stats = False

    class Unused(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.BatchNorm1d(3)

    steps: list[int] = []
    assert [take(kind)[1] for kind in (Evaluated, Frozen, PlainNet, Unused)] == [{}, {}, {}, {}]
    assert len(steps) == 2 * 12  # no pass


def test_sync_batchnorm_is_found() -> None:
    assert batchnorm_layers(
        nn.Sequential(nn.SyncBatchNorm(3), nn.InstanceNorm1d(3, track_running_stats=True))
    ).keys() == {"0"}


# ---- what must not move

everywhere = pytest.mark.parametrize("on", ["host cpu", *CUDA])


class Busy(Net):
    """A step that changes whatever a step can: metrics, attributes, a teacher, logs, gradients, requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy("binary")
        self.teacher = nn.Linear(8, 16)
        self.teacher.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.history: list[float] = []
        self.numbers = torch.Generator()
        self.later = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.1 * torch.rand(x.shape, generator=self.numbers).to(x) + random.random() + np.random.rand()
        loss = F.cross_entropy(self(x), y)
        with torch.enable_grad():
            F.cross_entropy(self.layers(x.clone().requires_grad_()), y).backward()
        self.accuracy(self(x).argmax(1), y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"accuracy": self.accuracy, "history": float(len(self.history))})
        if self.logger:
            self.logger.log_metrics({"direct": float(batch_idx)})
            self.logger.experiment.log_metrics({"straight": 1.0}, 0)
        self.calls += 1
        self.history.append(loss.item())
        self.teacher.weight.lerp_(self.layers[0].weight.detach(), 0.1)
        self.later.requires_grad_(len(self.history) <= 12)
        self.added = batch_idx
        return loss


def snapshot(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    """Everything that somebody could notice."""
    loop, shuffled = trainer.fit_loop, trainer.train_dataloader.generator
    return {
        "weights": weights(module),
        "modes": [each.training for each in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in module.parameters()],
        "momentum": module.layers[1].momentum,
        "attributes": (module.history[:], module.added, module.numbers.get_state(), sorted(vars(module))),
        "metric": {k: v.clone() for k, v in module.accuracy.metric_state.items()},
        "metric_updates": module.accuracy._update_count,
        "loops": (loop.state_dict(), trainer.global_step, trainer.current_epoch, loop.batch_idx, trainer.is_last_batch),
        "logger_step": loop.epoch_loop._batches_that_stepped,
        "metrics": {k: v.clone() for k, v in trainer.callback_metrics.items()},
        "logged": {k: v.value.clone() for k, v in loop.epoch_loop._results.items() if isinstance(v.value, Tensor)},
        "rows": [dict(row) for row in trainer.logger.experiment.metrics],
        "loggers": list(trainer.loggers),
        "shuffle": shuffled.get_state(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
        "stage": (trainer.training, torch.is_grad_enabled()),
        "iterator": id(loop._combined_loader._iterator),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b))


@pytest.mark.few(1)
@everywhere
def test_nothing_has_moved_afterwards(on: str, tmp_path: Any) -> None:
    train = DataLoader(data(), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
    callback, module = Recalibrate(probe=snapshot), build(Busy)
    settings = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "max_epochs": 2}
    with device(on) as there:
        fit(module, callbacks=[callback], train=train, accelerator=there.name, **settings)
        before, after = callback.seen
        assert not [what for what in before if not same(before[what], after[what])]
    assert len(module.history) == 12
    assert callback.found.keys() == {MEAN, VARIANCE}


@pytest.mark.few(1)
@everywhere
def test_training_that_goes_on_elsewhere_is_as_without(on: str) -> None:
    def draw(trainer: L.Trainer, *_: Any) -> None:
        drawn = torch.rand(2).tolist(), torch.rand(2, device=trainer.strategy.root_device).tolist()
        numbers.append((*drawn, random.random(), np.random.rand()))

    numbers: list[Any] = []
    last = LambdaCallback(on_fit_end=draw)
    plain, module = build(Busy), build(Busy)
    with device(on) as there:
        first = fit(plain, callbacks=[last], accelerator=there.name)
        second = fit(module, callbacks=[last, Recalibrate()], accelerator=there.name)
    assert numbers[0] == numbers[1]
    assert_equal(weights(plain), weights(module))
    assert first.callback_metrics == second.callback_metrics


def test_no_hooks_run_but_those_of_batch_transfer() -> None:
    def noting(name: str) -> Callable[..., None]:
        return lambda *_, **__: ran.append(name)

    ran: list[str] = []
    own = {"on_train_batch_end", "on_train_end", "state_key"}
    hooks = [name for name in vars(Callback) if name.startswith(("on_", "setup", "teardown")) and name not in own]
    spy = type("Spy", (Callback,), {name: noting(name) for name in hooks})()
    of_module = [name for name in dir(L.LightningModule) if name.startswith("on_") and "checkpoint" not in name]
    transfer = {"on_before_batch_transfer", "on_after_batch_transfer", "on_gpu"}
    watched = type("Watched", (NormNet,), {n: noting(f"module.{n}") for n in of_module if n not in transfer})
    callback = Recalibrate(probe=lambda *_: len(ran))
    fit(build(watched), callbacks=[spy, callback])
    assert callback.seen[0] == callback.seen[1] > 0


def test_the_state_of_a_stateful_loader_is_that_of_training() -> None:
    class Stateful:
        def __init__(self) -> None:
            self.read = 0

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Any:
            for batch in loader():
                self.read += 1
                yield batch

        def state_dict(self) -> dict[str, Any]:
            return {"read": self.read}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.read = state["read"]

    train, callback = Stateful(), Recalibrate(probe=lambda *_: train.read)
    fit(build(NormNet), callbacks=[callback], train=train)
    assert callback.seen == [12, 12]


class Slow(TensorDataset):
    """Shows in which process it is read."""

    def __getitem__(self, index: int) -> Any:
        assert multiprocessing.parent_process() is not None
        return super().__getitem__(index)


@pytest.mark.few(1)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("cut", [{}, {"max_steps": 8}, {"limit_train_batches": 3}], ids=spelled)
def test_worker_processes_serve_the_pass_and_the_next_fit_and_end(persistent: bool, cut: dict[str, Any]) -> None:
    train = DataLoader(Slow(*data().tensors), 8, num_workers=1, persistent_workers=persistent)
    for _ in range(2):
        assert_statistics(*take(train=train, **cut), inputs()[: cut.get("limit_train_batches", 6)])
    assert not multiprocessing.active_children()


# ---- ranks


def rank_statistics() -> Any:
    class Uneven(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.is_last_batch and pl_module.layers[1].running_mean is not None:
                own.append(pl_module.layers[1].running_mean.clone())

    own: list[Tensor] = []
    callback, module = Recalibrate(probe=lambda _, module: weights(module)), build(NormNet)
    fit(module, callbacks=[callback, Uneven()], train=rank_loader(), strategy="ddp", devices=2,
        use_distributed_sampler=False)  # fmt: skip
    assert_equal(*callback.seen)
    mean, variance = naive_statistics(module.layers, 1, inputs(48))
    return [t.numpy() for t in (callback.found[MEAN], callback.found[VARIANCE], mean, variance, own[-1])]


def test_ranks_agree_on_the_mean_over_all_of_their_batches() -> None:
    first, second = run_ranks(rank_statistics)
    for ours, theirs, wanted in zip(first[:2], second[:2], first[2:4], strict=True):
        assert (ours == theirs).all()
        np.testing.assert_allclose(ours, wanted, atol=1e-6, rtol=1e-6)
    assert (first[4] != second[4]).any()  # the ranks' own statistics differ


class Twice(NormNet):
    """A layer with statistics is called twice in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self(2 * batch[0])
        return super().training_step(batch, batch_idx)


class Quiet(Recalibrate):
    """Takes the statistics without waiting for the device for each of them."""

    def __init__(self, there: Device) -> None:
        super().__init__()
        self.there = there

    def take(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self.there.waits(at_most=1):  # which layers were called
            super().take(trainer, pl_module)


@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("kind", [NormNet, Twice])
def test_on_a_device_statistics_equal_naive_ones(kind: Any, on: str) -> None:
    expected, module = take(kind)[1], build(kind)
    with device(on) as there:
        callback = Quiet(there)
        fit(module, callbacks=[callback], accelerator=there.name)
        found = {name: value.cpu() for name, value in callback.found.items()}
    assert_close(found, expected, 1e-5)


def test_a_batch_that_is_not_finite_does_not_count() -> None:
    samples, take = data(32), Recalibrate()
    samples.tensors[0][8:16] = torch.nan
    module = build(NormNet, lr=0.0)
    fit(module, train=DataLoader(samples, batch_size=8), callbacks=[take, lt.SkipNonFinite()], max_epochs=1)
    inputs = [samples.tensors[0][first : first + 8] for first in (0, 16, 24)]
    assert_statistics(module, take.found, inputs, tolerance=1e-5)


def test_steps_are_looked_at_in_the_first_one_alone() -> None:
    wrapped: list[bool] = []
    note = LambdaCallback(on_train_batch_end=lambda run, *_: wrapped.append("training_step" in vars(run.strategy)))
    fit(build(NormNet), callbacks=[lt.SWA(0.5), note], max_steps=3)
    assert wrapped == [False] * 3
