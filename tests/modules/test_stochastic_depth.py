"""add_stochastic_depth equals torchvision's operator and timm's models that have it built in."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer, resnet18
from torchvision.ops import stochastic_depth

import lightning_tricks as lt
from lightning_tricks.modules.stochastic_depth import drop_path
from tests.nets import Net, PlainNet, assert_equal, build, fit, weights

BRANCHES = r"layer\d\.\d\.bn2$"


@pytest.mark.parametrize("shape", [(64,), (64, 3), (16, 4, 5, 5)])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_function_is_torchvisions_and_timms(shape: tuple[int, ...], rate: float) -> None:
    from timm.layers import drop_path as of_timm

    x, given = torch.randn(shape), []
    functions: list[Any] = [
        lambda: drop_path(x, rate),
        lambda: stochastic_depth(x, rate, "row"),
        lambda: of_timm(x, rate, training=True),
    ]
    for function in functions:
        torch.manual_seed(1)
        given.append(function())
    assert torch.equal(given[0], given[1])
    assert torch.equal(given[0], given[2])


def test_a_timm_model_with_its_own_is_the_same_bit_for_bit() -> None:
    import timm

    torch.manual_seed(0)
    ours = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=3, img_size=32)
    theirs = copy.deepcopy(ours)
    rates = lt.add_stochastic_depth(ours, 0.4, modules=r"blocks\.\d+\.(attn|mlp)$")
    assert rates == {f"blocks.{n}.{branch}": 0.4 * (n + 1) / 4 for n in range(4) for branch in ("attn", "mlp")}
    from timm.layers import DropPath

    for n, block in enumerate(theirs.blocks):
        block.drop_path1, block.drop_path2 = DropPath(0.4 * (n + 1) / 4), DropPath(0.4 * (n + 1) / 4)
    x = torch.randn(6, 3, 32, 32)
    for model in (ours, theirs):
        torch.manual_seed(2)
        model.train()(x).square().sum().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_rates_rise_from_block_to_block_and_eval_stays() -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=4)
    plain, names, x = copy.deepcopy(model), list(model.state_dict()), torch.randn(2, 3, 32, 32)
    rates = lt.add_stochastic_depth(model, 0.4, modules=BRANCHES)
    assert [*rates.values()] == pytest.approx([0.4 * n / 8 for n in range(1, 9)])
    assert list(model.state_dict()) == names
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert not torch.equal(model.train()(x), plain.train()(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


def test_the_expectation_of_a_block_stays_and_a_sample_is_dropped_whole() -> None:
    block, x = Residual(), torch.randn(1, 4)
    expected = block(x)
    lt.add_stochastic_depth(block, 0.3, modules="branch")
    many = block(x.expand(100_000, 4))
    dropped = (many == x).all(1)
    assert dropped.float().mean() == pytest.approx(0.3, abs=0.01)
    assert torch.allclose(many[~dropped], x + (expected - x) / 0.7, atol=1e-6)
    torch.testing.assert_close(many.mean(0, keepdim=True), expected, atol=0.02, rtol=0)


def test_attention_that_gives_its_weights_as_well_is_dropped() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2, batch_first=True)})
    lt.add_stochastic_depth(model, 0.5, modules="^attention$")
    x = torch.randn(64, 3, 4)
    output, attended = model["attention"](x, x, x)
    dropped = (output == 0).flatten(1).all(1)
    assert 10 < dropped.sum() < 54
    assert (attended.sum(-1) - 1).abs().max() < 1e-5


class Deep(PlainNet):
    def __init__(self, lr: float = 0.1, rate: float | None = None) -> None:
        super().__init__(lr)
        blocks = [nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)) for _ in range(2)]
        self.blocks, self.layers = nn.ModuleList(blocks), nn.Linear(8, 2)
        if rate is not None:
            lt.add_stochastic_depth(self, rate, modules=r"blocks\.\d+$")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.layers(x)


def test_training_with_rate_0_is_training_without() -> None:
    none, zero, some = build(Deep), build(Deep, rate=0.0), build(Deep, rate=0.5)
    for module in (none, zero, some):
        fit(module)
    assert_equal(weights(none), weights(zero))
    assert not torch.equal(none.layers.weight, some.layers.weight)


def test_a_compiled_network_drops_as_well() -> None:
    model, x = Residual(), torch.randn(64, 4)
    lt.add_stochastic_depth(model, 0.5, modules="branch")
    dropped = (torch.compile(model, backend="aot_eager")(x) == x).all(1)
    assert 10 < dropped.sum() < 54


def test_the_branches_of_torchvisions_transformer() -> None:
    model = VisionTransformer(32, 16, 2, 2, 8, 16, num_classes=3)
    rates = lt.add_stochastic_depth(model, 0.2, modules=r"layers\.encoder_layer_\d+\.(dropout|mlp)$")
    assert sorted(rates.values()) == [0.1, 0.1, 0.2, 0.2]


def test_copies_and_pickles_keep_it() -> None:
    model = Residual()
    lt.add_stochastic_depth(model, 0.5, modules="branch")
    x = torch.randn(32, 4)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.manual_seed(3)
        expected = model(x)
        torch.manual_seed(3)
        assert torch.equal(each(x), expected)


@pytest.mark.parametrize(
    ("rate", "branches", "error", "message"),
    [
        (1.0, "0", ValueError, r"rate must be in \[0.0, 1.0\), got 1.0"),
        ("a", "0", TypeError, "rate must be a number"),
        (0.1, "(", ValueError, "modules: '\\(' is not a regular expression"),
        (0.1, "nothing", ValueError, "'nothing' is neither. Names are 'layers'"),
        (0.1, "layers", ValueError, "modules must not be nested, 'layers' selects layers and layers.0"),
    ],
)
def test_mistakes_raise(rate: Any, branches: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.add_stochastic_depth(build(Net), rate, modules=branches)


def test_twice_is_refused() -> None:
    model = resnet18(num_classes=4)
    lt.add_stochastic_depth(model, 0.4, modules=BRANCHES)
    with pytest.raises(ValueError, match=r"layer1\.0\.bn2 has: call add_stochastic_depth once"):
        lt.add_stochastic_depth(model, 0.4, modules=BRANCHES)
