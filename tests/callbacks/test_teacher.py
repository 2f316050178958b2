"""Teacher: an average, a copy or another module that the module calls, which leaves no trace."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.functional import ema_decay
from tests.nets import Net, NormNet, SteppedByHand, assert_close, assert_equal, build, fit, loader, trained, weights
from tests.refusals import assert_refused


class Asks(Net):
    """Records what its teacher says of the same samples in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.said.append(self.teacher(torch.eye(8)))  # type: ignore[operator]
        return super().training_step(batch, batch_idx)


class Unfreezes(Asks):
    """Trains its first layer from the fourth step on."""

    def configure_optimizers(self) -> Any:
        self.layers[0].requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers[0].requires_grad_(self.trainer.global_step >= 3)


def asked(module: Any, teacher: Any, **settings: Any) -> list[Tensor]:
    fit(module, callbacks=[teacher], **settings)
    return module.said


@pytest.mark.parametrize("kind", [Asks, Unfreezes])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_a_copy_says_the_same_in_every_step(kind: Any, settings: dict[str, Any]) -> None:
    module = build(kind)
    with torch.no_grad():
        expected = module.eval()(torch.eye(8))
    said = asked(module.train(), lt.Teacher(decay=1.0), **settings)
    assert len(said) == 12
    assert all(torch.equal(each, expected) for each in said)
    assert not any(each.requires_grad for each in said)
    assert (module(torch.eye(8)) != expected).any()


def test_what_forward_logs_is_of_the_module() -> None:
    class Logs(Asks):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            self.log("size", float(len(x)), on_step=True)
            return z

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = Net.training_step(self, batch, batch_idx)
            self.said.append(self.teacher(torch.eye(8)))  # type: ignore[operator]
            return loss

    run = fit(module := build(Logs), callbacks=[lt.Teacher(0.9)], log_every_n_steps=1, limit_val_batches=0)
    assert module.said
    assert run.callback_metrics["size"] == 4


def test_an_average_says_what_an_average_made_by_hand_says() -> None:
    class Reference(Asks):
        def on_train_start(self) -> None:
            self.average = {name: value.clone() for name, value in self.floats().items()}

        def floats(self) -> dict[str, Tensor]:
            return {name: v.detach() for name, v in self.state_dict().items() if v.is_floating_point()}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step:
                d = ema_decay(self.trainer.global_step - 1, 0.8)
                self.average = {n: torch.lerp(self.average[n], v, 1 - d) for n, v in self.floats().items()}
            theirs = self.teacher(torch.eye(8))  # type: ignore[operator]
            self.eval()
            self.said.append((theirs, torch.func.functional_call(self, self.average, torch.eye(8)).detach()))
            self.train()
            return Net.training_step(self, batch, batch_idx)

    said = asked(build(Reference), lt.Teacher(0.8))
    for found, expected in said:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert (said[-1][0] != said[0][0]).any()


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_start"])
def test_it_begins_with_the_weights_that_hooks_have_drawn(hook: str) -> None:
    def draw(module: Any, *_: Any) -> None:
        if not module.global_step:
            torch.manual_seed(1)
            torch.nn.init.normal_(module.layers[0].weight)

    class Draws(Asks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.drawn = self.layers[0].weight.detach().clone() if not self.said else self.drawn
            return super().training_step(batch, batch_idx)

    module = build(type("Hooked", (Draws,), {hook: draw}))
    (first, *_) = asked(module, lt.Teacher(1.0), max_epochs=1)
    reference = build(Asks).eval()
    reference.layers[0].weight.data = module.drawn
    torch.testing.assert_close(first, reference(torch.eye(8)))


def test_a_copy_of_the_module_says_that_it_has_no_teacher_until_it_is_fitted_with_its_own() -> None:
    class Copied(Asks):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            copies[:] = [copy.deepcopy(self), pickle.loads(pickle.dumps(self.teacher))]

    copies: list[Any] = []
    said = asked(build(Copied), lt.Teacher(0.9), max_epochs=1)
    module, alone = copies
    for ask in (module.teacher, alone):
        with pytest.raises(MisconfigurationException, match="this is a copy of it: call that of the module itself"):
            ask(torch.eye(8))
    asked(module, lt.Teacher(1.0), max_epochs=1)
    assert len(module.said) == 2 * len(said)
    assert all(torch.equal(each, module.said[-1]) for each in module.said[len(said) :])


class Counts(Net):
    """Draws and counts in every forward pass, in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.shape = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += torch.rand(())
        return super().forward(x) * (1 + 0.01 * self.total) * self.scale * self.shape


class AskingCounts(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.teacher(batch[0])  # type: ignore[operator]
        return loss


def test_asking_changes_nothing() -> None:
    module, plain = build(AskingCounts), build(Counts)
    fit(module, callbacks=[lt.Teacher(0.9)])
    fit(plain)
    assert_equal(weights(module), weights(plain))
    assert module.calls == plain.calls
    assert not hasattr(module, "teacher")


class First(NormNet):
    """Asks before it computes, and computes with weights of which autocast could keep the teacher's casts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        theirs = self.teacher(x)  # type: ignore[operator]
        return F.cross_entropy(self(x), y) + (self(x) - theirs).square().mean()


class After(First):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss, mine = F.cross_entropy(self(x), y), self(x)
        return loss + (mine - self.teacher(x)).square().mean()  # type: ignore[operator]


class OwnCast:
    """Casts by itself; torch then keeps casts of weights, which Lightning's own autocast does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)  # type: ignore[misc]


@pytest.mark.parametrize("base", [(), (OwnCast,)], ids=["fp32", "own autocast"])
def test_it_does_not_matter_whether_the_teacher_or_the_module_computes_first(base: Any) -> None:
    ended = []
    for kind in (First, After):
        fit(module := build(type("Cast", (*base, kind), {})), callbacks=[lt.Teacher(0.5)])
        ended.append({name: p.detach() for name, p in module.named_parameters()})
    assert_close(*ended, tolerance=1e-6)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
def test_another_module_computes_in_its_own_precision(precision: Any) -> None:
    other = nn.Linear(8, 2).double().eval()

    class Other(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            said = self.teacher(batch[0])  # type: ignore[operator]
            assert said.dtype == torch.float64
            torch.testing.assert_close(said, other(batch[0].double()))
            return super().training_step(batch, batch_idx) * (1 + 0 * said.mean())

    before = weights(other)
    run = fit(build(Other), callbacks=[lt.Teacher(module=other)], precision=precision, max_steps=2)
    assert run.global_step == 2
    assert_equal(weights(other), before)


def test_in_manual_optimization_it_is_asked_alike(tmp_path: Path) -> None:
    class ByHand(SteppedByHand, Asks):
        """Steps by itself."""

    by_hand, automatic = asked(build(ByHand), lt.Teacher(0.8)), asked(build(Asks), lt.Teacher(0.8))
    assert all(torch.equal(*pair) for pair in zip(by_hand, automatic, strict=True))


def test_a_resumed_fit_has_the_same_teacher(tmp_path: Path) -> None:
    class Plain(Asks):
        def __init__(self) -> None:
            super().__init__()
            self.layers = NormNet().layers

    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=6, save_top_k=-1)
    whole, rest = build(Plain), build(Plain)
    fit(whole, callbacks=[lt.Teacher(0.8), save], enable_checkpointing=True)
    said = asked(rest, lt.Teacher(0.8), ckpt_path=tmp_path / "step=6.ckpt")
    assert all(torch.equal(*pair) for pair in zip(said, whole.said[6:], strict=True))


def test_wrong_arguments_are_refused() -> None:
    cases = [
        (ValueError, {"decay": 1.5}, r"decay must be in \[0.0, 1.0\], got 1.5"),
        (TypeError, {"decay": "0.9"}, "decay must be a number"),
        (TypeError, {"module": 3}, "module must be Module or None, got 3"),
    ]
    assert_refused(lt.Teacher, cases)


def test_lazy_layers_join_once_they_have_weights() -> None:
    class Lazy(Asks):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = Net.training_step(self, batch, batch_idx)
            with torch.no_grad():
                self.said.append((self.teacher(torch.eye(8)), self(torch.eye(8))))  # type: ignore[operator]
            return loss

    (first, *others) = asked(build(Lazy), lt.Teacher(0.8), train=loader(24), limit_val_batches=0)
    assert torch.equal(*first)
    assert all((theirs != mine).any() for theirs, mine in others)


def test_statistics_of_a_lazy_norm_join_once_there_are_some() -> None:
    class LazyNorm(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(8, 2))

    teacher = lt.Teacher(0.8)
    module = trained(LazyNorm, teacher, max_epochs=1)
    (average,) = teacher.running().values()
    assert average.tensors.keys() == module.keys() - {"layers.0.num_batches_tracked"}


def written_in_memory() -> Any:
    file = io.BytesIO()
    return file, lambda: file.write(b"line")


def written_tensor() -> Any:
    seen = {"sum": torch.zeros(())}
    return seen, lambda: seen["sum"].add_(1)


@pytest.mark.parametrize("make", [written_in_memory, written_tensor])
def test_what_a_call_of_the_module_leaves_for_good_is_refused(make: Any) -> None:
    module = build(Asks)
    module.held, write = make()
    module.layers.register_forward_hook(lambda *_: write() and None)
    with pytest.raises(MisconfigurationException, match=r"Teacher\(decay=0.9\) runs the module a second time: .*held"):
        asked(module, lt.Teacher(0.9))
