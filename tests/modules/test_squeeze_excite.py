"""add_squeeze_excite: the channels of a layer are weighted, and the weights of the weighting train."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_tricks as lt
from tests.modules.test_blur_pool import Images, batches, images, net
from tests.nets import fit, weights

pytest.importorskip("timm")


def by_hand(y: Tensor, excite: Any) -> Tensor:
    means = y.mean((2, 3))
    hidden = torch.relu(means @ excite.fc1.weight.flatten(1).T + excite.fc1.bias)
    scales = torch.sigmoid(hidden @ excite.fc2.weight.flatten(1).T + excite.fc2.bias)
    return y * scales[:, :, None, None]


def test_a_layer_is_weighted_by_the_means_of_its_channels_and_keeps_its_names() -> None:
    model, plain, x = net(), net(), images()
    assert lt.add_squeeze_excite(model, modules="^[03]$", ratio=2) == ["0", "3"]
    assert model[0].squeeze_excite.fc1.out_channels == 8
    torch.testing.assert_close(model[0](x), by_hand(plain[0](x), model[0].squeeze_excite))
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all("squeeze_excite" in name for name in missing)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_by_default_the_residual_branches_of_a_resnet_are_weighted() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18()
    assert lt.add_squeeze_excite(model) == [f"layer{stage}.{block}.bn2" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert lt.add_squeeze_excite(torchvision.models.resnet.BasicBlock(8, 8)) == ["bn2"]


def test_groupnorm_and_layers_without_parameters_have_channels_as_well() -> None:
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.BatchNorm2d(8, affine=False))
    assert lt.add_squeeze_excite(model, modules=["GroupNorm", "BatchNorm2d"]) == ["0", "1"]
    assert model(torch.randn(2, 8, 4, 4)).shape == (2, 8, 4, 4)


@pytest.mark.parametrize("when", ["__init__", "setup", "configure_model", "configure_optimizers"])
def test_the_new_weights_train(when: str) -> None:
    module = Images(when, change="excite")
    fit(module, train=batches(), max_epochs=1, limit_train_batches=1)
    before = weights(module)
    fit(module, train=batches(), max_epochs=2)
    trained = [name for name, value in weights(module).items() if not torch.equal(value, before[name])]
    assert "net.3.squeeze_excite.fc2.weight" in trained


def test_it_has_the_layers_device_and_dtype() -> None:
    model = net().to(torch.float64)
    lt.add_squeeze_excite(model, modules="^3$")
    assert model(images().double()).dtype == torch.float64
    model = net().to("meta")
    lt.add_squeeze_excite(model, modules="^3$")
    assert model[3].squeeze_excite.fc1.weight.is_meta


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"modules": "^1$"}, ValueError, "whose channels are known, '.1.' selects 1, a ReLU"),
        ({}, ValueError, "needs residual blocks of a ResNet, found none in Sequential"),
        ({"modules": "head"}, ValueError, "'head' is neither"),
        ({"modules": "^3$", "ratio": 0}, ValueError, "ratio must be at least 1"),
        ({"modules": "^3$", "ratio": 0.5}, TypeError, "ratio must be an integer"),
    ],
)
def test_mistakes_raise(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.add_squeeze_excite(net(), **arguments)


def test_a_second_call_is_refused_and_changes_nothing() -> None:
    model: nn.Module = net()
    lt.add_squeeze_excite(model, modules="^3$")
    names = list(model.state_dict())
    with pytest.raises(ValueError, match="must not have squeeze-and-excitation yet, 3 has"):
        lt.add_squeeze_excite(model, modules="^[03]$")
    assert list(model.state_dict()) == names
