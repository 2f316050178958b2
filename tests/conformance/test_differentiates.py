"""Steps that differentiate inside, for forces, a penalty or an inner step, where tricks run them without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, assert_equal, build, data, fit, loader, rank_loader, weights
from tests.ranks import run_ranks

FEW: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}


class Forces(PlainNet):
    """Trains energies that sort samples, and the forces that are their gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        z = self(x)
        (forces,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        self.log("force", forces.norm(), on_epoch=True)
        return F.cross_entropy(z, y) + 0.1 * (forces + x.detach()).square().mean()


class Lazily(Forces):
    """Has its penalty in every third batch only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (Forces if batch_idx % 3 == 2 else PlainNet).training_step(self, batch, batch_idx)


class Residual(PlainNet):
    """The residual of a differential equation, by two derivatives."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        z = self(x)
        (slope,) = torch.autograd.grad(z[:, 0].sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return F.cross_entropy(z, y) + 0.01 * (curve + slope).square().mean()


class Adversarial(PlainNet):
    """Moves its inputs by the gradient that a backward pass leaves in them, and clears that of the weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        (self(x).square().sum()).backward()
        moved = (x + 0.1 * x.grad.sign()).detach()
        for weight in self.parameters():
            weight.grad = None
        return F.cross_entropy(self(moved), y)


class Inner(PlainNet):
    """Takes a step of its weights inside, as meta-learning does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        own = dict(self.layers.named_parameters())
        gradients = torch.autograd.grad(self(x).square().mean(), list(own.values()), create_graph=True)
        moved = {name: own[name] - 0.1 * gradient for name, gradient in zip(own, gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.layers, moved, (x,)), y)


class Hooked(PlainNet):
    """Asks for gradients without computing any yet."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        z.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return F.cross_entropy(z, batch[1])


KINDS = {kind.__name__: kind for kind in (Forces, Lazily, Residual, Adversarial, Inner, Hooked)}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def hardest(module: Any, batch: Any, count: int) -> list[Tensor]:
    """The samples with the largest losses, each computed by itself from the same function that the step has."""
    x, y = batch
    losses = scores(module, x, y)
    kept = sorted(sorted(range(len(y)), key=lambda place: -losses[place].item())[:count])
    return [x[kept], y[kept]]


def scores(module: Any, x: Tensor, y: Tensor) -> Tensor:
    if isinstance(module, Adversarial):
        moved = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(moved).square().sum(), moved)
        return F.cross_entropy(module(x + 0.1 * slope.sign()), y, reduction="none").detach()
    if isinstance(module, Inner):
        own = dict(module.layers.named_parameters())
        gradients = torch.autograd.grad(module(x).square().mean(), list(own.values()))
        moved = {name: own[name] - 0.1 * gradient for name, gradient in zip(own, gradients, strict=True)}
        return F.cross_entropy(torch.func.functional_call(module.layers, moved, (x,)), y, reduction="none").detach()
    return F.cross_entropy(module(x), y, reduction="none").detach()


@kinds
def test_pruning_trains_on_the_hardest_samples(kind: type[PlainNet]) -> None:
    ours, naive = build(kind), build(kind)
    optimizer = naive.configure_optimizers()
    naive.log = lambda *_, **__: None
    for number, batch in enumerate(loader(40)):
        optimizer.zero_grad()
        kept = hardest(naive, batch, 4)
        loss = naive.training_step(kept, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fit(ours, train=loader(40), callbacks=[lt.HardExampleFilter(0.5)], **FEW)
    assert_close(weights(ours), weights(naive))


RANKS: dict[str, Any] = {**FEW, "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}


def on_two_ranks() -> dict[str, Any]:
    module = build(Forces)
    fit(module, train=rank_loader(), callbacks=[lt.HardExampleFilter(0.5)], **RANKS)
    return {name: value.numpy() for name, value in weights(module).items()}


def test_pruning_on_two_ranks_has_the_mean_of_their_gradients() -> None:
    naive = build(Forces)
    optimizer, naive.log = naive.configure_optimizers(), lambda *_, **__: None
    for number, (x, y) in enumerate(loader(48, 16)):
        optimizer.zero_grad()
        for rank in (slice(0, 8), slice(8, 16)):
            (naive.training_step(hardest(naive, (x[rank], y[rank]), 4), number) / 2).backward()
        optimizer.step()
    for found in run_ranks(on_two_ranks):
        assert_close({name: torch.from_numpy(value) for name, value in found.items()}, weights(naive))


def test_scoring_has_no_gradients_where_it_needs_none_and_leaves_those_that_accumulate() -> None:
    seen: list[bool] = []

    class Plain(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return super().training_step(batch, batch_idx)

    fit(build(Plain), callbacks=[lt.HardExampleFilter()], limit_train_batches=3, **FEW)
    assert seen == [False, True] * 3
    plain, ours = build(Forces), build(Forces)
    fit(plain, accumulate_grad_batches=2, **FEW)
    run = fit(ours, callbacks=[lt.HardExampleFilter(0.999)], accumulate_grad_batches=2, **FEW)
    assert_equal(weights(ours), weights(plain))
    theirs = plain.trainer.callback_metrics
    assert {name: value for name, value in run.callback_metrics.items() if name in theirs} == theirs


def test_an_error_of_the_step_is_the_one_that_is_seen() -> None:
    class Fails(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("planned")

    for trick in (lt.HardExampleFilter(), lt.SAMCallback(micro_batch_size=4)):
        module = build(Fails)
        with pytest.raises(RuntimeError, match="planned"):
            fit(module, callbacks=[trick], **FEW)
        assert not {"log", "training_step"} & set(vars(module))


def test_micro_batches_have_the_hooks_that_a_step_sets() -> None:
    parts, whole = (build(Hooked) for _ in range(2))
    fit(parts, callbacks=[lt.SAMCallback(rho=0.1, micro_batch_size=100)], **FEW)
    fit(whole, callbacks=[lt.SAMCallback(rho=0.1)], **FEW)
    assert_close(weights(parts), weights(whole))


@pytest.mark.parametrize("kind", [Forces, Residual])
def test_micro_batches_of_sam_are_those_of_the_whole_batch(kind: type[PlainNet]) -> None:
    plain, ours = build(kind), build(kind)
    expected = fit(plain, **FEW).callback_metrics
    run = fit(ours, callbacks=[lt.SAMCallback(rho=0.0, micro_batch_size=3)], **FEW)
    assert_close(weights(ours), weights(plain))
    found = {name: value for name, value in run.callback_metrics.items() if name in expected}
    torch.testing.assert_close(found, dict(expected), atol=1e-5, rtol=1e-5)


class Normed(Forces):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


@pytest.mark.parametrize("trick", [lambda: lt.SWA(start=0), lambda: lt.ScheduleFree()], ids=["SWA", "ScheduleFree"])
def test_statistics_of_averaged_weights_are_recalculated(trick: Callable[[], Any]) -> None:
    class Free(Normed):
        def configure_optimizers(self) -> Any:
            if isinstance(trick(), lt.ScheduleFree):
                return lt.optimizer("schedulefree_sgd", self, lr=0.1)
            return super().configure_optimizers()

    module = build(Free)
    fit(module, callbacks=[trick()], max_epochs=2, limit_val_batches=0)
    layer, norm = module.layers[0], module.layers[1]
    with torch.no_grad():
        sizes = [layer(x) for x, _ in loader()]
    torch.testing.assert_close(norm.running_mean, torch.stack([size.mean(0) for size in sizes]).mean(0))
    assert all(weight.requires_grad for weight in module.parameters())


class Contrasts(L.LightningModule):
    """Embeds samples with the slope of a potential."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def embed(self, batch: Any) -> tuple[Tensor, ...]:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope, 2 * slope + batch[0]

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        return lt.clip_loss(a, b, temperature=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.contrast(*self.embed(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Chunked(lt.GradCacheMixin, Contrasts):
    chunk = 3
    training_step = lt.GradCacheMixin.training_step


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_chunks_may_differentiate_in_embed() -> None:
    plain, ours = build(Contrasts), build(Chunked)
    fit(plain, **FEW), fit(ours, **FEW)
    assert_close(weights(ours), weights(plain))
    assert len(data(44)) % 3
