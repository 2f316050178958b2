"""``functional.sam_step``: the step of ``SAMMixin`` in a plain loop and under Fabric, and what it leaves as it was."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_tricks as lt
from lightning_tricks.functional import sam_step
from tests.nets import Net, PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, weights
from tests.ranks import Cases, run_cases


class Noisy(Net):
    """BatchNorm, dropout, and a count of its own steps, which a second run must not repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), *self.layers[1:]
        )  # its power iteration moves a buffer in every forward pass
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + 0.01 * self.calls * torch.rand(2)


def train(net: Any, batches: Any = None, epochs: int = 2, **settings: Any) -> list[float]:
    optimizer = net.configure_optimizers()
    losses = []
    for _ in range(epochs):
        for x, y in batches or loader():
            loss = sam_step(lambda x=x, y=y: F.cross_entropy(net(x), y), optimizer, **settings)
            losses.append(float(loss))
    return losses


@pytest.mark.parametrize("settings", [{}, {"rho": 0.2}, {"rho": 0.5, "adaptive": True}, {"rho": 0.0}], ids=str)
def test_a_plain_loop_has_the_weights_of_sam_mixin_bit_for_bit(settings: dict[str, Any]) -> None:
    kind = type("Sharp", (lt.SAMMixin, Noisy), {"sam": lt.SAM(**settings)})
    theirs, ours = build(kind), build(Noisy)
    fit(theirs, limit_val_batches=0)
    L.seed_everything(7, verbose=False)
    train(ours, **settings)
    assert_equal(weights(ours), weights(theirs))
    assert ours.calls == 12


GRAPHS: list[Any] = []  # that were compiled


def counting(graph: Any, _: Any) -> Any:
    GRAPHS.append(graph)
    return graph


def compiled(how: str, **settings: Any) -> tuple[Any, Any]:
    """A network, and what is called in its place."""
    torch.compiler.reset()
    L.seed_everything(7, verbose=False)
    settings["backend"] = counting
    net = build(PlainNet)
    called: Any = net
    net.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
    if how == "wrapped":
        called = torch.compile(net, **settings)
    elif how == "in place":
        net.compile(**settings)
    elif how == "a part":
        net.layers = Layers(net.layers)
        net.layers.compile(**settings)
    return net, called


class Layers(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.few(2)
# of torch, for each call of a compiled module while hooks of all modules look on
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.parametrize(
    ("how", "settings"),
    [("wrapped", {}), ("wrapped", {"fullgraph": True}), ("in place", {}), ("a part", {"fullgraph": True})],
    ids=str,
)
def test_a_compiled_network_trains_as_an_eager_one(how: str, settings: dict[str, Any]) -> None:
    trained = []
    GRAPHS.clear()
    for each in ("not at all", how):
        net, called = compiled(each, **(settings if each == how else {}))
        optimizer = net.configure_optimizers()
        for x, y in [*loader()][:2]:
            sam_step(lambda x=x, y=y, called=called: F.cross_entropy(called(x), y), optimizer)
        trained.append([*weights(net).values()])
    assert all(map(torch.equal, *trained))
    assert len(GRAPHS) == 2, "one with the hook that looks on, and one without"


def test_one_graph_of_a_whole_network_is_refused_with_the_remedy() -> None:
    net, called = compiled("in place", fullgraph=True)
    before = weights(net)
    with pytest.raises(RuntimeError, match=r"sam_step must see .* leave fullgraph=True out, or wrap the module by"):
        train(called, loader(), epochs=1)
    assert_equal(weights(net), before)


def test_the_backward_pass_of_another_is_the_same() -> None:
    ours, theirs = build(Noisy), build(Noisy)
    L.seed_everything(7, verbose=False)
    one = train(ours)
    L.seed_everything(7, verbose=False)
    assert train(theirs, backward=lambda loss: loss.backward()) == one
    assert_close(weights(ours), weights(theirs), 1e-7)


def test_modules_that_are_called_one_after_the_other_are_all_set_back() -> None:
    """Parts of a network, the whole of it afterwards, and a function without a module."""
    parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3)])
    whole = nn.Sequential(nn.Dropout(0.5), parts[0])
    scale = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([*parts.parameters(), scale], lr=0.1)
    seen: list[Tensor] = []

    def closure() -> Tensor:
        outputs = [part(x) for part in parts] + [whole(x)]
        seen.append(torch.stack([norm.running_mean.clone() for _, norm, _ in parts]))
        return (torch.stack(outputs) * scale + torch.rand(4)).square().mean()

    x = torch.randn(16, 8)
    sam_step(closure, optimizer, rho=0.0)  # at the weights themselves the second run is the first
    torch.testing.assert_close(seen[0], seen[1], atol=0, rtol=0)
    assert torch.equal(torch.stack([norm.running_mean for _, norm, _ in parts]), seen[0])
    assert [int(norm.num_batches_tracked) for _, norm, _ in parts] == [2, 1, 1]


def test_gradients_from_before_are_added_to_and_those_of_others_stay() -> None:
    net, other = build(PlainNet), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    x, y = next(iter(loader()))
    seen = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update({n: p.grad.clone() for n, p in net.named_parameters()}))

    def closure() -> Tensor:
        return F.cross_entropy(other(net(x)), y)

    for sent in (None, torch.Tensor.backward):
        other.zero_grad()
        sam_step(closure, optimizer, rho=0.0, backward=sent)
        alone, theirs = dict(seen), other.weight.grad.clone()
        for weight in net.parameters():
            weight.grad = torch.ones_like(weight)
        other.zero_grad()
        sam_step(closure, optimizer, rho=0.0, backward=sent)
        assert_close(seen, {name: gradient + 1 for name, gradient in alone.items()})
        assert torch.equal(other.weight.grad, theirs), "as one backward pass leaves it"
    assert all(weight.grad is None for weight in net.parameters())
    assert_equal(dict(net.named_parameters()), before)


def test_an_error_in_the_second_run_leaves_the_weights_and_the_module() -> None:
    net = build(Noisy)
    before, runs = weights(net), []
    x, y = next(iter(loader()))

    def closure() -> Tensor:
        loss = F.cross_entropy(net(x), y)
        runs.append(net.layers[1].running_mean.clone())
        if len(runs) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        sam_step(closure, torch.optim.SGD(net.parameters(), lr=0.1))
    after = weights(net)
    names = [name for name, _ in net.named_parameters()]
    assert_equal({name: after[name] for name in names}, {name: before[name] for name in names})
    assert torch.equal(net.layers[1].running_mean, runs[0])


def refused(error: type[Exception], message: str, closure: Any, optimizer: Any, **settings: Any) -> None:
    with pytest.raises(error, match=message):
        sam_step(closure, optimizer, **settings)


def test_what_cannot_be_right_is_refused() -> None:
    net = build(PlainNet)
    x, y = next(iter(loader()))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss() -> Tensor:
        return F.cross_entropy(net(x), y)

    def backward() -> Tensor:
        (result := loss()).backward()
        return result

    kept = loss()
    free = nn.Parameter(torch.ones(1))
    before = weights(net)
    refused(TypeError, "needs a function", kept, sgd)
    refused(TypeError, "optimizer must be Optimizer", loss, net)
    refused(ValueError, "LBFGS calls a closure several times", loss, torch.optim.LBFGS(net.parameters()))
    refused(ValueError, "rho must be", loss, sgd, rho=-1.0)
    refused(ValueError, "calls backward itself", backward, sgd)
    sgd.zero_grad()
    refused(ValueError, "calls backward itself", backward, sgd, backward=torch.Tensor.backward)
    sgd.zero_grad()
    refused(MisconfigurationException, "needs a loss from both runs", lambda: None, sgd)
    refused(ValueError, "depends on no weight of the optimizer", loss, torch.optim.SGD([free], lr=0.1))
    refused(ValueError, "by their names", lambda: free.sum(), torch.optim.SGD([free], lr=0.1), adaptive=True)
    refused(ValueError, "none of them requires gradients", loss, torch.optim.SGD([torch.ones(1)], lr=0.1))
    half = nn.Linear(2, 2).bfloat16()
    refused(ValueError, "weights in fp32.*bfloat16", loss, torch.optim.SGD(half.parameters(), lr=0.1))
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse_loss = lambda: sparse(torch.arange(2)).sum()  # noqa: E731
    refused(MisconfigurationException, "dense gradients", sparse_loss, torch.optim.SGD(sparse.parameters(), lr=0.1))
    wide = torch.ones(2, 8, requires_grad=True)
    reentrant = lambda: checkpoint(net, wide, use_reentrant=True).sum()  # noqa: E731
    refused(MisconfigurationException, "use_reentrant=False", reentrant, sgd)
    assert_equal(weights(net), before)


# -- under Fabric -----------------------------------------------------------------------------------------------------


def under_fabric(by_fabric: bool) -> dict[str, Any]:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = build(PlainNet)
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    for _ in range(2):
        for x, y in rank_loader():
            closure = lambda x=x, y=y: F.cross_entropy(model(x), y)  # noqa: E731
            sam_step(closure, optimizer, rho=0.2, **({"backward": fabric.backward} if by_fabric else {}))
    return {name: value.numpy() for name, value in weights(net).items()}


def under_trainer() -> dict[str, Any]:
    net = build(type("Sharp", (lt.SAMMixin, PlainNet), {"sam": lt.SAM(0.2)}))
    fit(net, train=rank_loader(), use_distributed_sampler=False, strategy="ddp", devices=2)
    return {name: value.numpy() for name, value in weights(net).items()}


def on_ranks(way: str) -> dict[str, Any]:
    return under_trainer() if way == "Trainer" else under_fabric(by_fabric=way == "fabric.backward")


@pytest.fixture(scope="module")
def ranks() -> Cases:
    return run_cases(on_ranks, ["Fabric", "fabric.backward", "Trainer"])


def naive(rho: float, shared: bool) -> dict[str, Tensor]:
    """Both ranks in one process, each with its own perturbation or with a shared one."""
    net = build(PlainNet)
    optimizer = net.configure_optimizers()
    parameters = list(net.parameters())
    for _ in range(2):
        for x, y in loader(48, 16):
            parts = list(zip(x.split(8), y.split(8), strict=True))
            own = [torch.autograd.grad(F.cross_entropy(net(a), b), parameters) for a, b in parts]
            if shared:
                own = [[sum(each) / 2 for each in zip(*own, strict=True)]] * 2
            total = [torch.zeros_like(parameter) for parameter in parameters]
            for (a, b), gradient in zip(parts, own, strict=True):
                norm = torch.cat([g.flatten() for g in gradient]).norm()
                moved = [p.detach() + rho * g / norm for p, g in zip(parameters, gradient, strict=True)]
                moved = [p.requires_grad_() for p in moved]
                names = [name for name, _ in net.named_parameters()]
                output = torch.func.functional_call(net, dict(zip(names, moved, strict=True)), a)
                uphill = torch.autograd.grad(F.cross_entropy(output, b), moved)
                total = [t + u / 2 for t, u in zip(total, uphill, strict=True)]
            for parameter, gradient in zip(parameters, total, strict=True):
                parameter.grad = gradient
            optimizer.step()
    return weights(net)


def test_ranks_of_fabric_have_the_weights_of_sam_mixin_under_ddp(ranks: Cases) -> None:
    (ours, other), (theirs, _) = ranks["Fabric"], ranks["Trainer"]
    for name, value in naive(0.2, shared=False).items():
        assert (ours[name] == theirs[name]).all()
        assert (ours[name] == other[name]).all()
        torch.testing.assert_close(torch.tensor(ours[name]), value)


def test_by_the_backward_pass_of_fabric_the_ranks_share_a_perturbation(ranks: Cases) -> None:
    ours, other = ranks["fabric.backward"]
    for name, value in naive(0.2, shared=True).items():
        assert (ours[name] == other[name]).all()
        torch.testing.assert_close(torch.tensor(ours[name]), value)


def test_mixed_precision_of_fabric_asks_for_its_own_backward_pass() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = build(PlainNet)
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    x, y = next(iter(loader()))
    before = weights(net)
    with pytest.raises(RuntimeError, match=r"call `fabric.backward\(loss\)`"):
        sam_step(lambda: F.cross_entropy(model(x), y), optimizer)
    assert_equal(weights(net), before)
    losses = [sam_step(lambda: F.cross_entropy(model(x), y), optimizer, backward=fabric.backward) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.1
