"""Groups of parameters from the head to the stem, and what joins them."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_tricks.callbacks.gradual_unfreeze import Stages, unfreeze_order
from lightning_tricks.core.selection import batchnorm_stages
from lightning_tricks.core.weights.local import LocalWeights


def test_groups_of_a_timm_model_from_head_to_stem() -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=3)
    order = unfreeze_order(model, None, 3)  # of blocks and stem
    blocks = [sorted({name.split(".")[1] for name in names if name.startswith("blocks")}) for names in order]
    assert blocks == [["2", "3"], ["0", "1"], []]
    assert "patch_embed.proj.weight" in order[-1]
    assert not any(name.startswith("head") for names in order for name in names)


@pytest.mark.parametrize(("count", "sizes"), [(1, [6]), (2, [3, 3]), (4, [2, 2, 1, 1]), (6, [1] * 6)])
def test_layers_are_dealt_out_evenly(count: int, sizes: list[int]) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(7)])
    order = unfreeze_order(model, r"^(\d)", count)
    assert [len(names) for names in order] == sizes
    assert sorted(name for names in order for name in names) == [f"{n}.weight" for n in range(6)]
    assert [max(names) for names in order] == sorted((max(names) for names in order), reverse=True)


def test_groups_join_and_are_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
    stages = Stages(LocalWeights(model), [["1.weight", "1.bias"], ["0.weight"]])
    stages.find_norms()
    stages.join(0)
    stages.silence()
    assert [each.requires_grad for each in model.parameters()] == [False, False, False, True]
    assert not model[1].training
    assert stages.restore(["0.weight"])
    assert stages.frozen() == ["0.weight"]
    assert [each.requires_grad for each in model.parameters()] == [False, True, True, True]
    assert model[1].training
    assert not stages.restore(["1.weight"])


def test_batchnorm_without_parameters_goes_with_what_is_before_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert batchnorm_stages(model, {model[0].weight: 4, model[0].bias: 4}) == [(model[1], 4)]
    assert batchnorm_stages(model, {model[3].weight: 1, model[3].bias: 1}) == [(model[3], 1)]
