"""init_weights: what each recipe sets, and what it refuses to touch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import lightning_tricks as lt


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Embedding(50, 64), nn.Linear(64, 256), nn.LayerNorm(256), nn.MultiheadAttention(8, 2), nn.Conv2d(8, 64, 3))
    )


def test_truncated_normal_weights() -> None:
    model = net()
    names = lt.init_weights(model, "trunc_normal")
    assert names == [
        *("0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "3.out_proj.weight", "3.out_proj.bias"),
        *("4.weight", "4.bias"),
    ]  # the attention's own in_proj_weight stays
    for layer in (model[0], model[1], model[4]):
        assert abs(layer.weight.std() / 0.02 - 1) < 0.05
    assert not model[1].bias.any()
    assert (model[2].weight == 1).all()


def test_kaimings_weights() -> None:
    model = nn.Sequential(nn.Conv2d(8, 64, 3, bias=False), nn.BatchNorm2d(64), nn.Linear(64, 256), nn.Embedding(5, 2))
    with torch.no_grad():
        model[1].weight.fill_(3.0)
    assert lt.init_weights(model, "kaiming") == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    for layer, fan_out in ((model[0], 64 * 9), (model[2], 256)):
        assert abs(layer.weight.std() / math.sqrt(2 / fan_out) - 1) < 0.05
    assert (model[1].weight == 1).all()


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_residual_branches_begin_at_zero(library: str, name: str) -> None:
    pytest.importorskip(library)
    import timm
    import torchvision

    if library == "timm":
        model = timm.create_model(name, zero_init_last=False)
        reference = timm.create_model(name, zero_init_last=True)
    else:
        model, reference = (
            getattr(torchvision.models, name)(),
            getattr(torchvision.models, name)(zero_init_residual=True),
        )
    names = lt.init_weights(model, "zero_residual")
    zero = {n for n, p in reference.named_parameters() if "bn" in n and n.endswith("weight") and not p.any()}
    assert {n for n in names if n.endswith("weight")} == zero != set()
    block, x = model.layer1[1].eval(), torch.rand(1, model.layer1[1].conv1.in_channels, 8, 8)
    assert torch.equal(block(x), x)  # positive, so the activation behind the sum changes nothing


def test_a_transformers_blocks_begin_as_identities() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=2).eval()
    assert len(lt.init_weights(model, "zero_residual", modules=r"(attn\.proj|mlp\.fc2)$")) == 8
    x = torch.randn(1, 5, 192)
    assert torch.equal(model.blocks(x), x)


def test_only_what_is_selected_changes() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert lt.init_weights(model, "kaiming", modules="^1$") == ["1.weight", "1.bias"]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "1.bias"}


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (net(), {"recipe": "xavier"}, "recipe must be one of 'trunc_normal', 'kaiming', 'zero_residual', got 'xavier'"),
        (net(), {"recipe": "zero_residual"}, "found none in Sequential with modules=None: name them in modules="),
        (net(), {"recipe": "kaiming", "modules": "^0$"}, "found none in Sequential with modules='.0.'"),
        (net(), {"recipe": "kaiming", "modules": "head"}, "'head' is neither"),
        (tied(), {"recipe": "kaiming", "modules": "^1$"}, "1.weight is 0.weight as well"),
        (nn.Linear(2, 2, device="meta"), {"recipe": "kaiming"}, "weight is on the meta device"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))),
            {"recipe": "kaiming"},
            "those of 0 are computed from others",
        ),
    ],
)
def test_mistakes_raise_and_change_nothing(model: nn.Module, arguments: dict[str, Any], message: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    with pytest.raises(ValueError, match=message):
        lt.init_weights(model, **arguments)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_shared_weights_that_are_selected_together_are_set_once() -> None:
    model = tied()
    lt.init_weights(model, "trunc_normal")
    assert model[0].weight is model[1].weight
    assert model[0].weight.abs().max() < 0.2
