"""Sharpness against known and full Hessians, the naive curve, what it leaves as it was, and what it refuses."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_tricks.modules.sharpness import Sharpness, sharpness
from tests.device.devices import CUDA, device
from tests.nets import Net, NormNet, PlainNet, assert_equal, build, data, fit, loader, weights
from tests.ranks import run_ranks


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Quadratic(nn.Module):
    """The loss ``w'Aw / 2 - b'w`` for every sample; w is in two parts, and a third part takes no part."""

    def __init__(self, matrix: Tensor, slope: float = 0.3) -> None:
        super().__init__()
        self.matrix, self.slope = matrix, slope
        self.first = nn.Parameter(torch.ones(2, dtype=matrix.dtype))
        self.rest = nn.Parameter(torch.ones(1, len(matrix) - 2, dtype=matrix.dtype))
        self.unused = nn.Parameter(torch.ones(3, dtype=matrix.dtype))

    def forward(self) -> Tensor:
        w = torch.cat([self.first, self.rest.flatten()])
        return w @ self.matrix @ w / 2 - self.slope * w.sum()


def quadratic(values: list[float], dtype: torch.dtype = torch.float32) -> Quadratic:
    """With a Hessian of these eigenvalues."""
    rotation, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=torch.Generator().manual_seed(1)))
    return Quadratic((rotation @ torch.diag(torch.tensor(values)) @ rotation.T).to(dtype))


def evaluate(model: nn.Module, batch: Tensor) -> Tensor:
    return model()


BATCHES = [torch.zeros(4), torch.zeros(1)]


def full_hessian(model: nn.Module, batches: list[Any]) -> Tensor:
    """Of the mean loss over all samples at once, by autograd."""
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    shapes = [p.shape for p in named.values()]

    def loss(flat: Tensor) -> Tensor:
        parts = [p.view(s) for p, s in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        return F.cross_entropy(torch.func.functional_call(model, dict(zip(named, parts, strict=True)), (x,)), y)

    return torch.autograd.functional.hessian(loss, torch.cat([p.flatten() for p in named.values()]))


def small() -> tuple[nn.Module, list[Any]]:
    """An MLP in fp64 and its 44 samples in uneven batches."""
    model = build(PlainNet).double()
    return model, [(x.double(), y) for x, y in loader()]


# ---- the eigenvalue


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "values",
    [
        [5.0, 4.9, 1.0, 0.5, 0.0],
        [2.0, 1.0, 0.1, -1.0, -7.0],  # a negative one is the largest in magnitude
        [3.0, 1.0, 0.5, -3.0, -3.0],  # a tie, on which power iteration never settles
        [-1.0, -2.0, -3.0, -4.0, -5.0],  # none is positive but the zeros of the unused weights
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [2e-6, 1e-6, 0.0, 0.0, -5e-6],
        [2e6, 1e6, 0.0, 0.0, -5e6],
    ],
    ids=str,
)
def test_the_eigenvalue_of_a_quadratic_is_exact(values: list[float], dtype: torch.dtype) -> None:
    found = sharpness(quadratic(values, dtype), BATCHES, evaluate)
    scale = max(map(abs, values))
    assert found.eigenvalue == pytest.approx(max(*values, 0.0), abs=1e-4 * min(scale, 1.0) if scale < 1e3 else 10)
    assert found.eigenvalue_error <= 1e-5 * scale


@pytest.mark.parametrize("size", [40, 200])
def test_the_error_holds_the_eigenvalue_however_few_the_iterations(size: int) -> None:
    values = torch.linspace(-3, 2, size).tolist()
    errors = []
    for iterations in (1, 5, 20, 60):
        found = sharpness(quadratic(values, torch.float64), BATCHES, evaluate, iterations=iterations)
        assert found.eigenvalue <= 2 + 1e-5
        nearest = min(abs(found.eigenvalue - value) for value in [*values, 0.0])
        assert nearest <= found.eigenvalue_error + 1e-6
        errors.append(2 - found.eigenvalue)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


def test_rounding_over_many_iterations_finds_no_wrong_eigenvalue() -> None:
    model = quadratic([100.0, 50.0, *torch.linspace(0, 1, 60).tolist()])
    for iterations in range(5, 100, 7):
        assert sharpness(model, BATCHES, evaluate, iterations=iterations).eigenvalue == pytest.approx(100, abs=1e-3)


def test_the_eigenvalue_is_that_of_the_full_hessian() -> None:
    model, batches = small()
    values = torch.linalg.eigvalsh(full_hessian(model, batches))
    found = sharpness(model, batches, cross_entropy, iterations=60)
    assert found.eigenvalue == pytest.approx(values[-1].item(), rel=1e-8)
    assert found.eigenvalue_error <= 1e-5 * values.abs().max()


def test_logistic_regression_has_its_known_hessian() -> None:
    model, (x, y) = nn.Linear(8, 2, bias=False).double(), data().tensors
    x = x.double()
    p = F.softmax(model(x), dim=1).detach()
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    hessian = torch.einsum("nij,nk,nl->ikjl", blocks, x, x).reshape(16, 16) / len(x)
    found = sharpness(model, DataLoader(TensorDataset(x, y), 8), cross_entropy)
    assert found.eigenvalue == pytest.approx(torch.linalg.eigvalsh(hessian)[-1].item(), rel=1e-8)


def test_frozen_weights_have_no_part_in_it() -> None:
    model, batches = small()
    model.layers[0].requires_grad_(False)
    values = torch.linalg.eigvalsh(full_hessian(model, batches))
    assert sharpness(model, batches, cross_entropy).eigenvalue == pytest.approx(values[-1].item(), rel=1e-8)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_batches_count_by_their_samples() -> None:
    model, batches = small()
    whole = [tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))]
    ours, theirs = (sharpness(model, each, cross_entropy) for each in (batches, whole))
    for name in ("loss", "eigenvalue", "rise", "losses"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)


def test_fp32_is_near_fp64_and_the_seed_is_all_that_is_random() -> None:
    model, batches = small()
    exact = sharpness(model, batches, cross_entropy)
    single = sharpness(model.float(), loader(), cross_entropy)
    assert single.eigenvalue == pytest.approx(exact.eigenvalue, rel=1e-4)
    assert single.losses == pytest.approx(exact.losses, rel=1e-5)
    torch.rand(3)
    assert sharpness(model, loader(), cross_entropy) == single
    other = sharpness(model, loader(), cross_entropy, seed=1, iterations=2)
    assert other.eigenvalue != sharpness(model, loader(), cross_entropy, iterations=2).eigenvalue


def test_a_minimum_that_is_sharper_is_found_sharper() -> None:
    flat, sharp = (sharpness(quadratic([scale] * 5), BATCHES, evaluate) for scale in (1.0, 2.0))
    assert sharp.eigenvalue == pytest.approx(2 * flat.eigenvalue)
    assert sharp.rise > flat.rise


# ---- the losses


def test_the_curve_is_that_of_a_naive_loop() -> None:
    model, batches = small()
    found = sharpness(model, batches, cross_entropy, radius=0.3, points=5, iterations=1)
    x, y = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(cross_entropy(model, (x, y)), parameters)
    norm = torch.sqrt(sum((g**2).sum() for g in gradients))
    start, losses = [p.detach().clone() for p in parameters], []
    for distance in (-0.3, -0.15, 0.0, 0.15, 0.3):
        with torch.no_grad():
            for p, s, g in zip(parameters, start, gradients, strict=True):
                p.copy_(s + distance * g / norm)
            losses.append(cross_entropy(model, (x, y)).item())
    assert found.distances == (-0.3, -0.15, 0.0, 0.15, 0.3)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    assert found.loss == found.losses[2]
    assert found.rise == found.losses[4] - found.loss > 0


def test_at_a_stationary_point_nothing_moves() -> None:
    model = quadratic([3.0, 1.0, 1.0, 1.0, 1.0])
    nn.init.zeros_(model.first), nn.init.zeros_(model.rest)
    model.slope = 0.0
    found = sharpness(model, BATCHES, evaluate, points=3)
    assert (found.rise, found.losses) == (0.0, (0.0, 0.0, 0.0))
    assert found.eigenvalue == pytest.approx(3.0, abs=1e-4)


def test_a_linear_loss_has_no_curvature() -> None:
    found = sharpness(nn.Linear(2, 1), [torch.ones(3, 2)], lambda model, batch: model(batch).mean())
    assert (found.eigenvalue, found.eigenvalue_error) == (0.0, 0.0)
    assert found.rise == pytest.approx(0.05 * 3**0.5, rel=1e-4)


def test_it_draws_into_axes_or_a_figure_of_its_own() -> None:
    found = Sharpness(1.0, 4.0, 0.0, 0.5, distances=(-0.1, 0.0, 0.1), losses=(0.6, 1.0, 1.5))
    figure, axes = plt.subplots(1, 2)
    assert found.plot(axes[1]) == (figure, axes[1])
    own, ax = found.plot()
    assert own is not figure
    (line,) = ax.get_lines()
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([-0.1, 0.0, 0.1], [0.6, 1.0, 1.5])
    assert (line.get_label(), ax.get_xlabel()) == ("largest eigenvalue 4", "distance along the gradient")
    plt.close("all")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[plot\]"):
        Sharpness(1.0, 4.0, 0.0, 0.5, distances=(0.0,), losses=(1.0,)).plot()


# ---- everything is as before


class Busy(nn.Module):
    """BatchNorm, dropout, a counter, a frozen teacher that follows: all that a forward may change or draw."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = build(Net).layers, nn.Linear(8, 2).requires_grad_(False)
        self.calls, self.center = 0, torch.zeros(2)
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.teacher.weight.mul_(0.99)
        self.center = self.center + 1
        noise = torch.randn(2, generator=self.own) + random.random() + numpy.random.rand()
        return self.net(x) + 0.1 * noise + 0.1 * self.center


def everything(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": weights(model),
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "flags": [p.requires_grad for p in model.parameters()] + [each.training for each in model.modules()],
        "identity": [(id(p), p.data_ptr(), p._version, id(p.grad)) for p in model.parameters()],
        "random": (torch.rand(3).tolist(), random.random(), numpy.random.rand()),
    }


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name in ("weights", "gradients"):
        assert_equal(a[name], b[name])
    assert [a[name] for name in ("flags", "random")] == [b[name] for name in ("flags", "random")]
    assert a["identity"] == b["identity"]


def seeded(model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    return everything(model)


class Fails:
    """A loss that raises in its nth call."""

    def __init__(self, call: int) -> None:
        self.call = call

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.call -= 1
        model.train(not model.training)
        loss = cross_entropy(model, batch)
        model.train(not model.training)
        if self.call == 0:
            model.eval()
            raise KeyboardInterrupt
        return loss


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", [0, 3, 8, 20, 40], ids=lambda call: f"fails in call {call}" if call else "succeeds")
def test_everything_is_left_as_it_was(training: bool, call: int) -> None:
    model = Busy().train(training)
    model.net[0].weight.requires_grad_(False)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index) if index % 2 else None
    before = seeded(model)
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    own, center = model.own.get_state(), model.center
    run = partial(sharpness, model, loader(shuffle=True), Fails(call), points=5, iterations=2)
    if call:
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        run()
    assert_same(before, everything(model))
    assert model.calls == 0
    assert model.center is center
    assert torch.equal(model.own.get_state(), own)


def test_a_graph_that_waits_for_its_backward_does_not_notice() -> None:
    module = build(PlainNet)
    loss = cross_entropy(module, next(iter(loader())))
    sharpness(module, loader(), cross_entropy, iterations=1, points=3)
    loss.backward()


@pytest.mark.parametrize("sampled", [True, False])
def test_a_loader_goes_on_with_its_own_random_numbers(sampled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    if sampled:
        shuffled = DataLoader(data(), 8, sampler=RandomSampler(data(), generator=generator))
    else:
        shuffled = DataLoader(data(), 8, shuffle=True, generator=generator)
    state = generator.get_state()
    sharpness(build(PlainNet), shuffled, cross_entropy, iterations=1, points=3)
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_is_measured_in_the_mode_of_the_module(training: bool) -> None:
    module, batch = build(NormNet).train(training).double(), tuple(data().tensors)
    batch = (batch[0].double(), batch[1])
    expected = cross_entropy(module, batch).item()
    hessian = full_hessian(build(NormNet).eval().double(), [batch]) if not training else None
    found = sharpness(module, [batch], cross_entropy, iterations=60)
    assert found.loss == pytest.approx(expected, rel=1e-12)
    if hessian is not None:
        assert found.eigenvalue == pytest.approx(torch.linalg.eigvalsh(hessian)[-1].item(), rel=1e-8)
    else:
        other = sharpness(module.eval(), [batch], cross_entropy, iterations=60)
        assert abs(other.eigenvalue / found.eigenvalue - 1) > 0.01


def test_dropout_draws_the_same_in_every_pass() -> None:
    module = build(Net)
    found = sharpness(module, loader(shuffle=True), cross_entropy, radius=1e-6, points=3)
    assert found.losses == pytest.approx([found.loss] * 3, abs=1e-4)


# ---- where it is called


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off_as_in_a_validation_hook(mode: Callable[[], Any]) -> None:
    module = build(PlainNet)
    expected = sharpness(module, loader(), cross_entropy)
    with mode():
        assert sharpness(module, loader(), cross_entropy) == expected
        assert not torch.is_grad_enabled()


def test_casts_that_autocast_keeps_are_made_anew_for_moved_weights() -> None:
    def low(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, batch)

    module = build(PlainNet)
    expected = sharpness(module, loader(), low, radius=3.0)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            before = cross_entropy(module, data().tensors)
        found = sharpness(module, loader(), cross_entropy, radius=3.0)
        assert cross_entropy(module, data().tensors) == before
    assert found.losses == expected.losses
    assert found.eigenvalue == pytest.approx(expected.eigenvalue, rel=1e-2)  # backward is under autocast here
    assert found.rise > 0.1
    assert expected.eigenvalue == pytest.approx(sharpness(module, loader(), cross_entropy).eigenvalue, rel=0.05)


def test_an_exception_leaves_no_casts_of_moved_weights() -> None:
    module = build(PlainNet)
    with torch.autocast("cpu", torch.bfloat16):
        before = cross_entropy(module, data().tensors)
        with pytest.raises(KeyboardInterrupt):
            sharpness(module, loader(), Fails(8), radius=3.0)  # in the first pass over the curve
        assert cross_entropy(module, data().tensors) == before


def test_it_works_in_a_hook_of_a_fit_and_changes_nothing_in_it() -> None:
    def measure(trainer: L.Trainer, module: L.LightningModule) -> None:
        found.append(sharpness(module, loader(), cross_entropy, iterations=2, points=3))

    found: list[Sharpness] = []
    measured, plain = build(Net), build(Net)
    fit(measured, callbacks=[LambdaCallback(on_validation_epoch_end=measure)])
    fit(plain)
    assert len(found) == 2
    assert_equal(weights(measured), weights(plain))


def test_a_loss_may_use_gradients_itself() -> None:
    def penalty(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return cross_entropy(model, (x, batch[1])) + slope.pow(2).mean()

    assert sharpness(build(PlainNet), loader(), penalty).eigenvalue > 0


def test_non_reentrant_checkpointing_changes_nothing() -> None:
    def checkpointed(model: Any, batch: Any) -> Tensor:
        return cross_entropy(lambda x: model.layers[2](checkpoint(model.layers[:2], x, use_reentrant=False)), batch)

    expected = sharpness(build(PlainNet), loader(), cross_entropy)
    assert sharpness(build(PlainNet), loader(), checkpointed) == expected


# ---- refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"iterations": 0}, ValueError, "iterations must be at least 1, got 0"),
        ({"iterations": 2.0}, TypeError, "iterations must be an integer"),
        ({"radius": 0}, ValueError, r"radius must be in \[1e-12, inf\), got 0"),
        ({"radius": -1.0}, ValueError, "radius must be .* got -1.0"),
        ({"radius": float("nan")}, ValueError, "radius must be .* got nan"),
        ({"radius": "0.1"}, TypeError, "radius must be a number"),
        ({"points": 1}, ValueError, "points must be odd and at least 3, got 1"),
        ({"points": 10}, ValueError, "points must be odd and at least 3, got 10"),
        ({"points": "11"}, TypeError, "points must be an integer"),
        ({"seed": 0.5}, TypeError, "seed must be an integer, got 0.5"),
        ({"loader": iter([])}, TypeError, "loader is read many times, got list_iterator: pass a DataLoader"),
        ({"loader": 3}, TypeError, "loader is read many times, got int"),
        ({"loader": []}, ValueError, "loader must yield batches in every pass over it, got none"),
        ({"loader": [{"x": 1.0}]}, ValueError, r"must begin with a tensor of samples, got \{'x': 1.0\}"),
        ({"loader": [(torch.ones(()), torch.ones(3))]}, ValueError, "must begin with a tensor of samples"),
        ({"loss": lambda model, batch: model(batch[0]).sum(1)}, ValueError, "loss must be a finite scalar tensor"),
        ({"loss": lambda model, batch: 0.5}, ValueError, "the mean of a batch, got 0.5"),
        ({"loss": lambda model, batch: model(batch[0]).sum() * float("nan")}, ValueError, "finite .* got tensor.nan"),
        ({"loss": lambda model, batch: cross_entropy(model, batch).detach()}, ValueError, r"avoid detach\(\)"),
        ({"loss": lambda model, batch: cross_entropy(Net(), batch)}, ValueError, "depend on the parameters of model"),
        ({"loss": lambda model, batch: (model(batch[0]) * 0).abs().sqrt().sum()}, ValueError, "finite"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(arguments: Any, error: type[Exception], message: str) -> None:
    module = build(PlainNet)
    before = weights(module)
    with pytest.raises(error, match=message):
        sharpness(module, **{"loader": loader(), "loss": cross_entropy, **arguments})
    assert_equal(before, weights(module))


def test_a_loss_with_an_infinite_second_derivative_is_refused() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with pytest.raises(ValueError, match="second derivative of loss must be finite"):
        sharpness(model, [torch.ones(1, 1)], lambda model, batch: model(batch).abs().pow(1.5).sum())


def test_weights_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="trainable parameters, got PlainNet without any: unfreeze some"):
        sharpness(build(PlainNet).requires_grad_(False), loader(), cross_entropy)
    with pytest.raises(TypeError, match=r"got layers.0.weight in torch.bfloat16"):
        sharpness(build(PlainNet).bfloat16(), loader(), cross_entropy)
    assert run_ranks(sharded, nprocs=1) == ["model must have unsharded weights in fp32 or fp64, got weight in shards"]


def sharded() -> str:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (1,))))
    with pytest.raises(TypeError) as caught:
        sharpness(model, [torch.ones(1, 2)], lambda model, batch: model(batch).sum())
    return str(caught.value).split(":")[0]


def test_a_loader_that_is_read_up_is_refused() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = iter(loader())

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    with pytest.raises(ValueError, match="in every pass over it, got none"):
        sharpness(build(PlainNet), Once(), cross_entropy)


def test_a_loss_that_is_another_in_every_pass_is_refused() -> None:
    def normalizing(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, (batch[0].mul_(0.5), batch[1]))

    with pytest.raises(ValueError, match="loss must be the same in each pass over loader, got"):
        sharpness(build(PlainNet), list(loader()), normalizing)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)[:, None, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0, 0, :2]


def test_an_operation_without_a_second_derivative_is_refused_with_the_remedy() -> None:
    torch.manual_seed(0)
    model = Attention()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=r"flash.*\n.*SDPBackend.MATH"):
        sharpness(model, loader(), cross_entropy)
    with sdpa_kernel(SDPBackend.MATH):
        assert sharpness(model, loader(), cross_entropy).eigenvalue > 0


def test_reentrant_checkpoints_and_sparse_gradients_are_refused() -> None:
    def reentrant(model: Any, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        return F.cross_entropy(model.layers[2](checkpoint(model.layers[:2], x, use_reentrant=True)), batch[1])

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        sharpness(build(PlainNet), loader(), reentrant)
    embedding = nn.Embedding(3, 2, sparse=True)
    with pytest.raises(RuntimeError, match="pass sparse=False"):
        sharpness(embedding, [torch.tensor([0, 2])], lambda model, batch: model(batch).pow(2).mean())


@pytest.fixture
def warned_each_time() -> Iterator[None]:
    """torch warns once of what it does not want to be called."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.slow
@pytest.mark.usefixtures("warned_each_time")
@pytest.mark.parametrize("on", [*CUDA, "simulated mps"])
def test_a_device_finds_what_the_cpu_finds(on: str) -> None:
    expected = sharpness(build(PlainNet), loader(), cross_entropy)
    with device(on) as there:

        def moved(model: nn.Module, batch: Any) -> Tensor:
            return cross_entropy(model, [each.to(there.name) for each in batch])

        random_numbers, module = torch.get_device_module(there.name), build(PlainNet).to(there.name)
        before, state = weights(module), random_numbers.get_rng_state()
        found = sharpness(module, loader(), moved)
        assert_equal(before, weights(module))
        assert torch.equal(random_numbers.get_rng_state(), state)
    assert found.eigenvalue == pytest.approx(expected.eigenvalue, rel=1e-3)
    assert found.losses == pytest.approx(expected.losses, rel=1e-4)
