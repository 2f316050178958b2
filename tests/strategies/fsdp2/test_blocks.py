"""Which submodules get a group of their own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn

from lightning_tricks.core.selection import repeated_blocks
from lightning_tricks.strategies.fsdp2.blocks import LARGE, checkpoint_blocks, sharding_groups
from tests.nets import build
from tests.strategies.sharded import Block, ConvBlock, Transformer


def names(module: nn.Module, blocks: list[str] | None = None, large: int = LARGE) -> list[str]:
    groups = sharding_groups(module, blocks, large)
    return [name for each in groups for name, found in module.named_modules() if found is each]


def test_repeated_blocks_of_resnets_vits_and_hugging_face_encoders() -> None:
    torchvision = pytest.importorskip("torchvision")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        resnet = torchvision.models.resnet50()
        vit = torchvision.models.vit_b_16()
        bert = transformers.BertModel(transformers.BertConfig())
    assert names(resnet) == [f"layer{s}.{n}" for s, count in enumerate((3, 4, 6, 3), 1) for n in range(count)]
    assert names(vit) == [f"encoder.layers.encoder_layer_{n}" for n in range(12)]
    assert names(bert) == [*(f"encoder.layer.{n}" for n in range(12)), "embeddings.word_embeddings"]


def test_only_the_outermost_repeats_count_and_single_ones_do_not() -> None:
    inner = nn.ModuleDict({"a": nn.ModuleList([ConvBlock(2), ConvBlock(2)]), "b": ConvBlock(3)})
    assert names(inner) == ["a.0", "a.1"]
    nested = nn.ModuleList([nn.Sequential(ConvBlock(2), ConvBlock(2)) for _ in range(2)])
    assert names(nested) == ["0", "1"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert list(repeated_blocks(nn.ModuleList([nn.Sequential(nn.ReLU()) for _ in range(3)]))) == []


def test_the_same_module_twice_is_no_repeat() -> None:
    block = ConvBlock(2)
    assert names(nn.ModuleList([block, block])) == []


def test_what_shares_a_parameter_is_in_the_group_of_the_root() -> None:
    model = Transformer(depth=3)
    assert names(model, large=100) == ["blocks.0", "blocks.1", "blocks.2", "frozen"]
    model.blocks[1].norm.weight = model.norm.weight
    assert names(model, large=100) == ["blocks.0", "blocks.2", "frozen"]
    model.blocks[0].norm.bias = model.blocks[2].norm.bias
    assert names(model, large=100) == ["frozen"]


def test_large_layers_outside_of_the_blocks() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "blocks": nn.ModuleList([Block(4), Block(4)])})
    assert names(model, large=41) == ["blocks.0", "blocks.1"]
    assert names(model, large=40) == ["blocks.0", "blocks.1", "embedding"]


def test_names_take_the_place_of_all_that_inner_ones_first() -> None:
    model = Transformer()
    assert names(model, ["LayerNorm"]) == ["norm", "blocks.1.norm", "blocks.0.norm"]
    assert names(model, ["Sequential", "Block"]) == ["blocks.1.mlp", "blocks.1", "blocks.0.mlp", "blocks.0"]
    assert names(model, ["Embedding"]) == [], "which shares its weight with the head"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Blok", "a pattern must be found in a name, or be the name of a class; 'Blok' is neither"),
        ("ModuleList", "'ModuleList' selects no submodule with parameters and a forward pass"),
        ("GELU", "'GELU' selects no submodule with parameters and a forward pass"),
        ("Transformer", "a pattern must be found in a name, or be the name of a class; 'Transformer' is neither"),
    ],
)
def test_what_selects_nothing_to_shard_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"modules: {message}"):
        sharding_groups(Transformer(), ["Block", name])


def test_blocks_that_run_again_give_the_same_gradients_until_that_is_undone() -> None:
    x, gradients, calls = torch.randn(4, 8), [], []
    model = build(Transformer)
    for again in (False, True, False):
        Block.calls = 0
        undo = ExitStack()
        if again:
            checkpoint_blocks(model, None, undo)
        model(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        calls.append(Block.calls)
        model.zero_grad()
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in Transformer().named_parameters()]
        undo.close()
    assert calls == [2, 4, 2]
    assert all(map(torch.equal, gradients[0], gradients[1]))
