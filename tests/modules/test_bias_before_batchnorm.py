"""drop_bias_before_batchnorm takes out what BatchNorm takes out anyway, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18, vgg11_bn

import lightning_tricks as lt
from tests.nets import Net, build, fit


def warmed(model: nn.Module, x: Tensor) -> nn.Module:
    """With biases and statistics that are not those of the beginning."""
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.05)
        for _ in range(3):
            model.train()(x)
    return model


def assert_same_function(model: nn.Module, expected: list[str], x: Tensor, *example: Any) -> None:
    before = copy.deepcopy(warmed(model, x))
    assert lt.drop_bias_before_batchnorm(model, *example) == expected
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    torch.testing.assert_close(model.train()(x), before.train()(x), atol=1e-4, rtol=1e-4)
    statistics = {name: value for name, value in before.named_buffers() if "running_var" in name}
    for name, value in statistics.items():  # the means lack the biases
        torch.testing.assert_close(model.get_buffer(name), value)
    torch.testing.assert_close(model.eval()(x), before.eval()(x), atol=1e-4, rtol=1e-4)
    gone = {name for name, _ in before.named_parameters()} - {name for name, _ in model.named_parameters()}
    assert gone == set(expected)


@pytest.mark.slow
def test_all_biases_of_a_vgg_go_and_none_of_a_resnet() -> None:
    torch.manual_seed(0)
    biases = [f"features.{n}.bias" for n in (0, 4, 8, 11, 15, 18, 22, 25)]
    model = vgg11_bn(num_classes=4, dropout=0.0)
    model.avgpool, model.classifier = nn.Identity(), nn.Flatten()  # a hundred million weights that do not matter here
    assert_same_function(model, biases, torch.randn(2, 3, 32, 32))
    assert lt.drop_bias_before_batchnorm(resnet18(num_classes=4)) == []


@pytest.mark.few(8)
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_each_kind_of_convolution(dimensions: int, transposed: bool, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    convolution = getattr(nn, f"Conv{'Transpose' * transposed}{dimensions}d")
    norm = getattr(nn, f"BatchNorm{dimensions}d")
    model = nn.Sequential(convolution(3, 4, 3), norm(4, **settings), nn.ReLU(), convolution(4, 2, 1))
    assert_same_function(model, ["0.bias"], torch.randn(4, 3, *[6] * dimensions))


def test_a_linear_layer_needs_an_example_that_shows_two_dimensions() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), torch.randn(8, 6)
    assert lt.drop_bias_before_batchnorm(copy.deepcopy(model)) == []
    assert_same_function(model, ["0.bias"], x, x)
    tokens = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))  # 5 tokens of 5 features: it is the tokens' norm
    assert lt.drop_bias_before_batchnorm(tokens, torch.randn(8, 5, 6)) == []


class Branching(nn.Module):
    """What the convolution gives is used a second time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.norm, self.kind = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), kind

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        z = self.norm(y)
        if self.kind == "skip":
            return z + y
        if self.kind == "returned":
            return z, y
        if self.kind == "in training" and self.training:
            return z + y.mean()
        if self.kind == "twice":
            return z + self.conv(z)
        if self.kind == "norm twice":
            return z + self.norm(x)
        if self.kind == "bias read":
            return z + self.conv.bias.view(1, -1, 1, 1)
        if self.kind == "between":
            return self.norm(y.relu())
        return z


KINDS = ["skip", "returned", "in training", "twice", "norm twice", "bias read", "between"]


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("example", [(), (torch.ones(2, 3, 4, 4),)], ids=["traced", "run"])
def test_a_bias_that_somebody_needs_stays(kind: str, example: tuple[Any, ...]) -> None:
    model = Branching(kind)
    before = copy.deepcopy(model.state_dict())
    assert lt.drop_bias_before_batchnorm(model, *example) == []
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert lt.drop_bias_before_batchnorm(Branching("plain"), *example) == ["conv.bias"]


def test_a_layer_with_a_hook_or_of_another_class_stays() -> None:
    class Own(nn.Conv2d):
        pass

    hooked = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    hooked[0].register_forward_hook(lambda *_: None)
    assert lt.drop_bias_before_batchnorm(hooked) == []
    assert lt.drop_bias_before_batchnorm(nn.Sequential(Own(3, 4, 1), nn.BatchNorm2d(4))) == []
    parametrized = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4))
    assert lt.drop_bias_before_batchnorm(parametrized) == []


class Untraceable(nn.Module):
    """Branches on its input; iterates over one Sequential, and calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.iterated = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.unused = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x if x.sum() > 0 else -x)
        outputs = []
        for layer in self.iterated:
            x = layer(x)
            outputs.append(x)
        return torch.cat(outputs, 1)


def test_a_model_that_cannot_be_traced_needs_an_example() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"Untraceable cannot be traced \(TraceError: .*give an example input"):
        lt.drop_bias_before_batchnorm(Untraceable())
    x = torch.randn(4, 3, 5, 5)
    assert_same_function(Untraceable(), ["called.0.bias"], x, x)


def test_a_bias_shared_with_another_layer_stays_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))
    model[2].bias = model[0].bias
    x = torch.randn(4, 3, 5, 5)
    before = copy.deepcopy(warmed(model, x)).eval()
    assert lt.drop_bias_before_batchnorm(model) == ["0.bias"]
    torch.testing.assert_close(model.eval()(x), before(x))


class Bare(Net):
    """Drops its bias at the start."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        assert lt.drop_bias_before_batchnorm(self, torch.zeros(2, 8)) == ["layers.0.bias"]


class Full(Net):
    def configure_optimizers(self) -> Any:
        biasless = [each for name, each in self.named_parameters() if name != "layers.0.bias"]
        return torch.optim.SGD(biasless, lr=self.lr, momentum=0.9, weight_decay=1e-3)


def test_training_without_the_bias_gives_the_same_network() -> None:
    bare, full = build(Bare), build(Full)
    assert "layers.0.bias" not in bare.state_dict()
    fit(bare, max_epochs=4)
    fit(full, max_epochs=4)
    x = torch.randn(16, 8)
    torch.testing.assert_close(bare.eval()(x), full.eval()(x), atol=1e-4, rtol=1e-4)
