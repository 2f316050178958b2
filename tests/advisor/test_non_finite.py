"""find_non_finite: the operation, the module and the line of the first value that is not finite, in a real fit."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, SteppedByHand, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks


def line_of(function: Any, text: str) -> str:
    """The place of a line of code as it is reported."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (number for number, line in enumerate(lines, first) if text in line)
    return f"{__file__}:{number}, in {function.__name__}: {lines[number - first].strip()}"


class Layer(nn.Module):
    """Finite in both passes but in one way, once ``bad`` is set."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.bad = how, False

    def forward(self, x: Tensor) -> Tensor:
        if not self.bad:
            return x
        zero = x - x
        if self.how == "forward":
            lowest = zero.log()
            return x + lowest - lowest
        if self.how == "backward":
            return x + zero.sqrt() * zero.detach()
        if self.how == "nested":
            return x + 0 * torch.linalg.vector_norm(zero, dim=-1, keepdim=True).pow(0.5)
        if self.how == "large":
            return 0 * (70_000 * x.sign().half()) + x
        if self.how == "in place":
            return x + zero.log_().mul_(0)
        hidden = torch.full_like(x, float("-inf")).softmax(-1)  # the mask itself is not what is wrong
        return x + hidden


class Suspect(PlainNet):
    """A network in which a layer goes wrong at the third step."""

    how = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Tanh(), Layer(self.how)), nn.Linear(16, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers[1][1].bad = self.trainer.global_step >= 2
        return super().training_step(batch, batch_idx)


def suspect(how: str, kind: type[L.LightningModule] = Suspect) -> Any:
    return build(type("Spoiled", (kind,), {"how": how}))


def kept(module: L.LightningModule, folder: Path, callbacks: Any = (), **settings: Any) -> Path:
    """The folder that TerminateOnNonFinite leaves."""
    with pytest.raises(FloatingPointError):
        fit(module, callbacks=[*callbacks, lt.TerminateOnNonFinite(str(folder))], **settings)
    (made,) = folder.iterdir()
    return made


FOUND = {
    "forward": [("torch.Tensor.log", "inf", "zero.log()"), ("torch.Tensor.sub", "nan", "x + lowest - lowest")],
    "backward": [("torch.Tensor.sqrt", "nan", "zero.sqrt() * zero.detach()")],
    "nested": [("torch.Tensor.pow", "nan", "vector_norm")],
    "in place": [("torch.Tensor.log_", "inf", "zero.log_()"), ("torch.Tensor.mul_", "nan", "zero.log_().mul_(0)")],
    "mask": [("torch.Tensor.softmax", "nan", ".softmax(-1)")],
}


@pytest.mark.parametrize("how", FOUND)
def test_the_operation_its_module_and_its_line(how: str, tmp_path: Path) -> None:
    folder = kept(suspect(how), tmp_path)
    found = lt.find_non_finite(trainer(), suspect(how), folder)
    assert found
    assert (found.batch, found.weights) == ((), ())
    assert found.path == str(folder / "batch-rank=0.pt")
    backward = how in ("backward", "nested")
    for operation, (name, made, code) in zip(found.operations, FOUND[how], strict=True):
        assert (operation.operation, operation.made, operation.backward) == (name, made, backward)
        assert operation.module == "layers.1.1"
        assert operation.line == line_of(Layer.forward, code)
        assert f"{name} made {made}, in layers.1.1 ({__file__}" in str(found)


def test_everything_is_as_before(tmp_path: Path) -> None:
    folder = kept(suspect("forward"), tmp_path)
    module, run = suspect("forward"), trainer(callbacks=[lt.EMA()], max_steps=2, limit_train_batches=0.5)
    before, callbacks, random = weights(module), list(run.callbacks), torch.random.get_rng_state()
    assert lt.find_non_finite(run, module, folder)
    assert_equal(weights(module), before)
    assert run.callbacks == callbacks
    assert (run.global_step, run.limit_train_batches, run.max_steps) == (0, 0.5, 2)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not torch.is_anomaly_enabled()
    other = fit(suspect("forward"), callbacks=[lt.EMA()], max_steps=2)
    L.seed_everything(7, verbose=False)
    run.limit_train_batches = 1.0
    run.fit(module, loader(), loader(24))
    assert run.global_step == other.global_step == 2
    assert_equal(weights(module), weights(other.lightning_module))
    assert list(folder.parent.iterdir()) == [folder]


def test_a_sample_that_is_not_finite_is_named(tmp_path: Path) -> None:
    x, y = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    x[11, 2] = torch.nan
    batches = DataLoader(TensorDataset(x, y), batch_size=8)
    found = lt.find_non_finite(trainer(), build(PlainNet), kept(build(PlainNet), tmp_path, train=batches))
    assert found.batch == ("batch[0]: samples 3",)
    assert (found.operations, found.reached) == ((), ("the loss",))
    assert str(found).endswith("batch-rank=0.pt is not finite: batch[0]: samples 3")


def test_weights_that_were_not_finite_are_named(tmp_path: Path) -> None:
    """The head is infinite before the first step."""
    ruin = LambdaCallback(on_train_start=lambda _, module: nn.init.constant_(module.layers[2].bias, torch.inf))
    found = lt.find_non_finite(trainer(), build(PlainNet), kept(build(PlainNet), tmp_path, [ruin]))
    assert found.weights == ("layers.2.bias",)
    assert "Before the step these weights were not finite: layers.2.bias" in str(found)


class Grown(PlainNet):
    """Infinite where a weight that trains has moved, which its average has not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        moved = (self.layers[2].bias.detach() - self.first).abs().sum() > 0.02
        return super().training_step(batch, batch_idx) / (0.0 if moved else 1.0)

    def on_fit_start(self) -> None:
        self.first = torch.tensor([0.1, -0.1])
        with torch.no_grad():
            self.layers[2].bias.copy_(self.first)


def test_beside_ema_the_step_has_the_weights_that_were_trained(tmp_path: Path) -> None:
    folder = kept(build(Grown), tmp_path, [lt.EMA(decay=0.9999)])
    found = lt.find_non_finite(trainer(), build(Grown), folder)
    assert [operation.made for operation in found.operations] == ["inf"]
    assert found.operations[0].module == ""
    assert found.operations[0].operation == "torch.Tensor.div"


def test_the_precision_is_the_trainers(tmp_path: Path) -> None:
    class Product(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.layers(x) + 0 * F.linear(x.abs() + 300, torch.full((2, 8), 300.0)), y)
            return loss if batch_idx > 1 else F.cross_entropy(self.layers(x), y)

    def half() -> dict[str, Any]:
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))]}

    folder = kept(build(Product), tmp_path, **half())
    found = lt.find_non_finite(trainer(**half()), build(Product), folder)
    first = found.operations[0]
    assert (first.operation, first.made) == ("torch.nn.functional.linear", "inf")
    nothing = lt.find_non_finite(trainer(), build(Product), folder)
    assert not nothing
    assert "is finite in this Trainer" in str(nothing)


class ByHand(SteppedByHand, Suspect):
    """Steps by itself."""


class Checkpointed(Suspect):
    """Its middle is computed again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](checkpoint(self.layers[1], self.layers[0](x), use_reentrant=False))


@pytest.mark.parametrize("kind", [ByHand, Checkpointed])
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_other_steps(kind: type[L.LightningModule], how: str, tmp_path: Path) -> None:
    found = lt.find_non_finite(trainer(), suspect(how, kind), kept(suspect(how, kind), tmp_path))
    expected = [(name, made, "layers.1.1") for name, made, _ in FOUND[how]]
    assert [(each.operation, each.made, each.module) for each in found.operations] == expected


def test_a_module_that_refuses_such_values_itself(tmp_path: Path) -> None:
    class Careful(Suspect):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.careful and not loss.isfinite():
                raise ValueError("the loss is NaN")
            return loss

        careful = False

    folder, module = kept(build(Careful), tmp_path), build(Careful)
    module.careful = True
    assert lt.find_non_finite(trainer(), module, folder).operations[0].operation == "torch.Tensor.log"

    class Broken(Suspect):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        lt.find_non_finite(trainer(), build(Broken), folder)


def test_the_batch_is_not_changed_by_hooks_again(tmp_path: Path) -> None:
    class Doubled(Suspect):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch[0] * 2, batch[1]

    seen = []

    class Look(Doubled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[0].clone())
            return super().training_step(batch, batch_idx)

    folder = kept(build(Doubled), tmp_path, [lt.Mixup(alpha=1.0)])
    assert lt.find_non_finite(trainer(), build(Look), folder)
    (batch, _) = torch.load(folder / "batch-rank=0.pt", weights_only=False)
    assert len(seen) == 1
    assert torch.equal(seen[0], batch)


def test_compiled_code_runs_uncompiled(tmp_path: Path) -> None:
    folder = kept(suspect("forward"), tmp_path)
    module = suspect("forward")
    module.layers.compile(backend="eager")
    found = lt.find_non_finite(trainer(), torch.compile(module, backend="eager"), folder)
    assert found.operations[0].module == "layers.1.1"


class Odd(PlainNet):
    """A loss with something odd in it, which is NaN in the third step."""

    odd: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers(x)
        return F.cross_entropy(hidden, y) + (type(self).odd(self, x, hidden) if batch_idx == 2 else 0.0)


class Doubling(torch.autograd.Function):
    """Its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("nan")


def hooked(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
    hidden.register_hook(lambda gradient: gradient * torch.nan)
    return hidden.sum()


def metric(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
    x[:0].mean()  # a metric of an empty class, which no loss has
    return (hidden - hidden).sum().sqrt() * 0


def masked(module: Any, x: Tensor, hidden: Tensor) -> Tensor:
    x.to(torch.float8_e4m3fn)
    torch.tensor(range(4))
    torch.func.vmap(lambda row: row * 2)(x)
    (torch.zeros(3, 3).tril().log() + torch.ones(3)).softmax(-1)
    return hidden.sum() / 0 - hidden.sum() / 0


ODD = {
    "metric": (metric, [("torch.Tensor.mean", False), ("torch.Tensor.sqrt", True)]),
    "function": (lambda module, x, hidden: Doubling.apply(hidden).sum(), [("Doubling", True)]),
    "masked": (
        masked,
        [("torch.Tensor.log", False), ("torch.Tensor.softmax", False)]
        + [("torch.Tensor.div", False)] * 2
        + [("torch.Tensor.sub", False)],
    ),
    "row beside": (
        lambda module, x, hidden: (x.new_full((2,), torch.inf) - x.new_tensor([0.0, torch.inf])).sum(),
        [("torch.Tensor.sub", False)],
    ),
    "row": (lambda module, x, hidden: x.new_tensor([1.0, -1.0]).log().sum(), [("torch.Tensor.log", False)]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_losses(name: str, tmp_path: Path) -> None:
    odd, expected = ODD[name]
    kind = type("Oddity", (Odd,), {"odd": odd})
    found = lt.find_non_finite(trainer(), build(kind), kept(build(kind), tmp_path))
    assert found
    names = [(each.operation, each.backward) for each in found.operations]
    assert list(dict.fromkeys(names)) == list(dict.fromkeys(expected))
    if "row" in name:  # the second; beside it, the first is infinite by its inputs
        assert found.operations[0].rows == (1,)
    if name == "row":
        assert "torch.Tensor.log made nan in rows 1, in the LightningModule" in str(found)


@pytest.mark.parametrize(
    ("odd", "reached"),
    [(hooked, "the gradient of layers.0.weight"), (lambda _, x, hidden: hidden.sum() * (torch.inf * 0.0), "the loss")],
)
def test_what_is_not_seen_is_never_called_finite(odd: Any, reached: str, tmp_path: Path) -> None:
    kind = type("Oddity", (Odd,), {"odd": odd})
    found = lt.find_non_finite(trainer(), build(kind), kept(build(kind), tmp_path))
    assert found
    assert found.reached[0] == reached
    assert found.operations == ()
    assert f"Not finite: {reached}" in str(found)
    assert "No operation that was seen has made it" in str(found)


class Kept(PlainNet):
    """What it does depends on its own checkpoint, takes its labels out of the batch, and holds a mask."""

    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.hot = torch.compile(nn.Linear(16, 16), backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = batch.pop("y")
        self.temperature = 0.0 if batch_idx >= 2 else self.temperature
        return F.cross_entropy(self.layers(batch["x"]) / self.temperature, y)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["temperature"] = self.temperature

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.temperature = checkpoint["temperature"]


def test_the_state_of_then(tmp_path: Path) -> None:
    x, y = torch.randn(16, 8), torch.zeros(16, dtype=torch.long)
    batches = DataLoader([{"x": a, "y": b} for a, b in zip(x, y, strict=True)], batch_size=4)
    folder = kept(build(Kept), tmp_path, train=batches, limit_val_batches=0)
    found = lt.find_non_finite(trainer(), build(Kept), folder)
    assert (found.operations[0].operation, found.weights) == ("torch.Tensor.div", ())


class Momentum(PlainNet):
    """The first of two steps of a batch ruins the second by its momentum alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, before = self.optimizers(), self.layers[2].bias.detach().clone()
        optimizer.zero_grad()
        self.manual_backward(self.layers[2].bias.sum() * (0.0 if batch_idx else 1.0))
        optimizer.step()
        moved = (self.layers[2].bias.detach() - before).abs().sum()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx) / (moved == 0 or batch_idx != 2))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_optimizers_have_their_states(tmp_path: Path) -> None:
    found = lt.find_non_finite(trainer(), build(Momentum), kept(build(Momentum), tmp_path))
    assert found.operations[0].operation == "torch.Tensor.div"


def test_errors_of_the_module_are_not_lost(tmp_path: Path) -> None:
    class Masked(Suspect):
        def on_fit_start(self) -> None:
            torch.zeros(1).log()

    with pytest.raises(RuntimeError, match="size mismatch"):
        folder, other = kept(build(Masked), tmp_path), build(Masked)
        other.layers[0] = nn.Linear(8, 20)
        lt.find_non_finite(trainer(), other, folder)

    class Broken(Suspect):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.zeros(1).log()
            raise KeyError("missing")

    found = lt.find_non_finite(trainer(), build(Broken), folder)
    assert found
    assert "The step ended with KeyError: 'missing'" in str(found)


def adapters() -> lt.LoRA:
    return lt.LoRA("layers.0", r=2)


def test_adapters(tmp_path: Path) -> None:
    folder = kept(suspect("forward"), tmp_path, [adapters()])
    found = lt.find_non_finite(trainer(callbacks=[adapters()]), suspect("forward"), folder)
    assert found.operations[0].operation == "torch.Tensor.log"


class Split(Suspect):
    """Sharded under FSDP2."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def two_ranks(folder: Path) -> None:
    for name in ("ddp", "fsdp", "zero"):
        module = build(Split)
        strategy: Any = {"ddp": "ddp", "fsdp": ModelParallelStrategy(2, 1), "zero": cpu_deepspeed()}[name]
        with pytest.raises(FloatingPointError):
            fit(
                module,
                train=rank_loader(),
                callbacks=[lt.TerminateOnNonFinite(str(folder / name))],
                strategy=strategy,
                devices=2,
                use_distributed_sampler=False,
            )


def test_what_two_ranks_left_is_found_by_one(tmp_path: Path) -> None:
    run_ranks(two_ranks, tmp_path)
    for name in ("ddp", "fsdp", "zero"):
        (folder,) = (tmp_path / name).iterdir()
        module = build(Split)
        if name != "ddp":  # a folder has no counts of steps
            module.training_step = partial(_always_bad, module)
        found = lt.find_non_finite(trainer(), module, folder)
        assert found.operations[0].line == line_of(Layer.forward, "zero.log()")
        assert not found.weights


def _always_bad(module: Any, batch: Any, batch_idx: int) -> Tensor:
    module.layers[1][1].bad = True
    return F.cross_entropy(module(batch[0]), batch[1])


@dataclass
class Pair:
    """A batch of a class of the user's."""

    x: Tensor
    y: Tensor


class OfPairs(Suspect):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch.x, batch.y), batch_idx)


def test_classes_of_a_batch_are_loaded_once_they_are_allowed(tmp_path: Path) -> None:
    batches: Any = DataLoader([Pair(*pair) for pair in loader()], batch_size=None)
    folder = kept(build(OfPairs), tmp_path, train=batches, limit_val_batches=0)
    with pytest.raises(
        ValueError, match=r"tests\.advisor\.test_non_finite\.Pair\..* torch.serialization.add_safe_globals\(\[Pair\]\)"
    ):
        lt.find_non_finite(trainer(), build(OfPairs), folder)
    with torch.serialization.safe_globals([Pair]):
        found = lt.find_non_finite(trainer(), build(OfPairs), folder)
    assert found.operations[0].operation == "torch.Tensor.log"


def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no last_good\.ckpt with a batch"):
        lt.find_non_finite(trainer(), build(PlainNet), tmp_path)
    folder = kept(suspect("forward"), tmp_path)
    with pytest.raises(MisconfigurationException, match="repeats the step on one device, got DDPStrategy"):
        lt.find_non_finite(trainer(strategy="ddp"), suspect("forward"), folder)
    with pytest.raises(RuntimeError, match="Missing key"):
        lt.find_non_finite(trainer(), BoringModel(), folder)
    (folder / "last_good.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match="last_good"):
        lt.find_non_finite(trainer(), suspect("forward"), folder)
