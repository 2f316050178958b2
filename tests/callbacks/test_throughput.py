"""Throughput: rates of loops whose time is known, operations counted by hand, and training that is left as it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks.progress import TQDMProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import lightning_tricks as lt
from lightning_tricks.callbacks import throughput
from tests.nets import Net, PlainNet, assert_equal, build, data, fit, loader, trained, trainer, weights
from tests.ranks import run_ranks


class Timed(PlainNet):
    """Steps that take a while, and the clock beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []
        self.ended = self.validated = self.paused = 0.0

    def true_rate(self, first: int = 2) -> float:
        """Samples in a second, from the step behind the counted one to the end of the last, without validation."""
        return 8 * len(self.began[first:]) / (self.ended - self.began[first] - self.paused)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.began.append(time.perf_counter())
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ended, self.paused = time.perf_counter(), self.validated

    def on_validation_start(self) -> None:
        self.validated -= time.perf_counter() if len(self.began) > 2 else 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.05)

    def on_validation_end(self) -> None:
        self.validated += time.perf_counter() if len(self.began) > 2 else 0.0


def rates(module: Any, train: Any = None, callback: Any = None, **settings: Any) -> dict[str, float]:
    settings = {"max_epochs": 1, "log_every_n_steps": 1, **settings}
    run = fit(module, train=train, callbacks=[callback or lt.Throughput()], **settings)
    found = {name.removeprefix("tricks/"): float(value) for name, value in run.callback_metrics.items()}
    return {name: value for name, value in found.items() if "per_second" in name or name in ("teraflops", "mfu")}


def operations(found: dict[str, float]) -> float:
    """Those of a sample."""
    return found["teraflops"] * 1e12 / found["samples_per_second"]


# 8 -> 16 -> 2: forward, gradient of the weights, and of the inputs but for the first layer
BY_HAND = 2 * (8 * 16 * 2 + 16 * 2 * 3)
RATED = [
    (160, {"log_every_n_steps": 20, "val_check_interval": 7}, 0.25),
    (160, {"log_every_n_steps": 4, "accumulate_grad_batches": 5}, 0.25),
    pytest.param(800, {"log_every_n_steps": 100}, 0.05, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("samples", "settings", "tolerance"), RATED)
def test_all_samples_of_a_second_are_counted_without_validation(samples: int, settings: Any, tolerance: float) -> None:
    module = Timed()
    found = rates(module, loader(samples), **settings)
    assert found["samples_per_second"] == pytest.approx(module.true_rate(), rel=tolerance)
    assert found.keys() == {"samples_per_second", "teraflops"}


def test_the_step_whose_operations_are_counted_is_no_part_of_the_rate() -> None:
    class Counted(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(0.4 if batch_idx == throughput.WARMED_UP else 0.0)
            return super().training_step(batch, batch_idx)

    module = Counted()
    found = rates(module, loader(160), log_every_n_steps=20)
    assert found["samples_per_second"] == pytest.approx(module.true_rate(), rel=0.25)


def test_the_operations_are_those_of_the_matrices() -> None:
    assert operations(rates(PlainNet(), loader(80), log_every_n_steps=10)) == pytest.approx(BY_HAND)


class Texts(PlainNet):
    """Batches of a dict with tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["input_ids"].float(), batch["labels"]), batch_idx)


def texts(mask: bool) -> DataLoader[Any]:
    samples = [{"input_ids": x, "labels": y} for x, y in map(data(80).__getitem__, range(80))]
    if mask:
        samples = [{**sample, "attention_mask": torch.tensor([1] * 6 + [0] * 2)} for sample in samples]
    return DataLoader(samples, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mask", "tokens"), [(True, 6), (False, 8)])
def test_tokens_are_those_of_the_mask_or_all(mask: bool, tokens: int) -> None:
    found = rates(Texts(), texts(mask), log_every_n_steps=10)
    assert found["tokens_per_second"] == pytest.approx(found["samples_per_second"] * tokens)
    # operations are scaled by tokens, and the counted batch has as many as the others
    assert operations(found) == pytest.approx(BY_HAND)


def test_a_mask_can_be_named() -> None:
    found = rates(Texts(), texts(True), lt.Throughput(tokens="attention_mask"), log_every_n_steps=10)
    assert found["tokens_per_second"] == pytest.approx(found["samples_per_second"] * 6)
    with pytest.raises(MisconfigurationException, match="Throughput\\(tokens='mask'\\) names no tensor"):
        rates(Texts(), texts(True), lt.Throughput(tokens="mask"))


def test_the_share_of_what_the_device_could_do(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def peak(device: torch.device, dtype: torch.dtype) -> float:
        asked.append((device.type, dtype))
        return 1e6

    monkeypatch.setattr(throughput, "get_available_flops", peak)
    found = rates(PlainNet(), loader(80), precision="bf16-mixed", log_every_n_steps=10)
    assert found["mfu"] == pytest.approx(found["teraflops"] * 1e12 / 1e6)
    assert set(asked) == {("cpu", torch.bfloat16)}


def test_it_changes_nothing_and_leaves_nothing() -> None:
    assert_equal(trained(Net, lt.Throughput(), log_every_n_steps=1), trained(Net))
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_step_that_fails_while_it_is_counted_leaves_no_counter() -> None:
    class Failing(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise RuntimeError("no power")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="no power"):
        fit(Failing(), callbacks=[lt.Throughput()])
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_compiled_modules_have_no_operations() -> None:
    class Compiled(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            compiled: Any = torch.compile(nn.Linear(8, 16), backend="eager")
            self.layers[0] = compiled

    assert rates(Compiled(), loader(80)).keys() == {"samples_per_second"}


def test_the_progress_bar_shows_the_rates(tmp_path: Path) -> None:
    shown: list[Any] = []

    class Bar(TQDMProgressBar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            shown.append(self.get_metrics(trainer, pl_module))

    settings = {"enable_progress_bar": True, "log_every_n_steps": 2, "max_epochs": 1}
    trainer(**settings, callbacks=[lt.Throughput(), Bar()]).fit(PlainNet(), loader(80), loader(8))
    assert {"tricks/samples_per_second", "tricks/teraflops"} <= shown[-1].keys()


def on_ranks() -> tuple[float, float]:
    module = Timed()
    found = rates(module, loader(320), devices=2, strategy="ddp", log_every_n_steps=20)
    return found["samples_per_second"], module.true_rate()


@pytest.mark.slow
def test_the_rates_are_of_all_devices() -> None:
    for rate, true_rate in run_ranks(on_ranks):
        assert rate == pytest.approx(2 * true_rate, rel=0.15)


@pytest.mark.parametrize("batch", [{"t": torch.tensor(0.5), "x": torch.zeros(6, 8)}, {"x": torch.zeros(6, 8)}])
def test_samples_are_those_of_the_inputs(batch: Any) -> None:
    assert throughput.samples_in(batch) == 6


def test_a_batch_without_tensors_is_refused_by_name_before_a_step() -> None:
    class Fixed(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(data(8)[:][0]).sum()

    module, before = build(Fixed), weights(build(Fixed))
    for batch, told in (({"names": ["a", "b"]}, ", which has names: 2"), (type("Opaque", (), {})(), "")):
        train: Any = DataLoader([batch], batch_size=None, collate_fn=lambda batch: batch)
        with pytest.raises(MisconfigurationException, match=f"Throughput finds no tensor in the batch{told}"):
            rates(module, train)
    assert_equal(weights(module), before)


def test_a_batch_that_the_step_empties_is_counted_before_it() -> None:
    class Takes(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch.pop("x")), batch.pop("y"))

    batches = DataLoader(data(), 8, collate_fn=lambda samples: dict(zip("xy", default_collate(samples), strict=True)))
    assert rates(Takes(), batches).keys() == {"samples_per_second", "teraflops"}


def test_operations_are_counted_beside_lean_loss() -> None:
    class Lean(PlainNet):
        def configure_callbacks(self) -> Any:
            return [lt.LeanLoss("layers.2")]

    assert operations(rates(build(Lean))) == pytest.approx(operations(rates(build(PlainNet))), rel=1e-3)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor", "ignore:Found `dataloader_iter`")
def test_steps_that_take_an_iterator_are_counted_too() -> None:
    class Own(PlainNet):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            x, y = next(dataloader_iter)[0]
            return F.cross_entropy(self(x), y)

    assert rates(Own()).keys() == {"samples_per_second", "teraflops"}


# -- counting changes no number ---------------------------------------------------------------------------------------


class Forces(PlainNet):
    """Fits an energy and the forces that are its gradient."""

    activation: type[nn.Module] = nn.SiLU

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        layers = (nn.Linear(8, 32), self.activation(), nn.Linear(32, 32), self.activation())
        self.layers = nn.Sequential(*layers, nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        energy = self.layers(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (forces + x.detach()).square().mean() + F.mse_loss(energy[:, 0], batch[1].float())


def forces(activation: type[nn.Module]) -> type[Forces]:
    return type(f"Forces{activation.__name__}", (Forces,), {"activation": activation})


class Recurrent(PlainNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.LSTM(2, 2, 2, batch_first=True, dropout=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0].view(-1, 4, 2))[0][:, -1], batch[1])


class Attends(PlainNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.TransformerEncoderLayer(2, 2, 8, batch_first=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[0].view(-1, 4, 2)).mean(1), batch[1])


class Convolves(PlainNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        body = (nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Hardswish(), nn.AvgPool2d(2), nn.Flatten())
        self.layers = nn.Sequential(nn.Unflatten(1, (1, 2, 4)), *body, nn.Linear(8, 2), nn.GLU())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self(batch[0])[:, 0], batch[1].float())


class Infers(PlainNet):
    """Has a teacher in inference mode, where torch tells the counter of linear layers as they are."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.teacher = nn.Linear(8, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            taught = self.teacher(batch[0])
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), taught.clone())


ACTIVATIONS = (nn.SiLU, nn.GELU, nn.Softplus, nn.ELU, nn.Mish, nn.LogSigmoid, nn.LeakyReLU)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [*map(forces, ACTIVATIONS), Recurrent, Attends, Convolves, Infers, Net])
def test_a_step_whose_operations_are_counted_is_the_same_bit_for_bit(kind: type[PlainNet]) -> None:
    counted, has_formula = build(kind), kind is not Recurrent
    plain = trained(kind, max_epochs=1, limit_val_batches=0)
    assert ("teraflops" in rates(counted, limit_val_batches=0)) is has_formula
    assert_equal(weights(counted), plain)


def test_a_teacher_in_inference_mode_is_counted() -> None:
    with_teacher, without = (operations(rates(build(kind), loader(80))) for kind in (Infers, PlainNet))
    # The student's forward pass once more, with a gradient of its weights and of what it hands on; the teacher's.
    assert with_teacher - without == pytest.approx(BY_HAND + 2 * 8 * 2)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_step_that_cannot_be_counted_is_taken_all_the_same() -> None:
    class Traces(Net):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.calls += 1
            self.log("calls", float(self.calls), on_step=False, on_epoch=True, reduce_fx="sum")
            twice = torch.jit.trace(lambda x: x * 2, batch[0])  # which raises where operations are counted
            return super().training_step([twice(batch.pop(0)), batch[0]], batch_idx)

    plain, counted = build(Traces), build(Traces)
    expected = fit(plain, max_epochs=1, limit_val_batches=0).callback_metrics["calls"]
    found = rates(counted, limit_val_batches=0)
    assert found.keys() == {"samples_per_second"}
    assert_equal(weights(counted), weights(plain))
    assert counted.calls == plain.calls == 6
    assert counted.trainer.callback_metrics["calls"] == expected


def test_an_error_of_the_step_itself_is_the_one_that_is_seen() -> None:
    class Fails(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == throughput.WARMED_UP:
                raise KeyError("planned")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="planned"):
        rates(build(Fails))


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(TypeError, match="tokens must be a key"):
        lt.Throughput(tokens=1.5)  # type: ignore[arg-type]
