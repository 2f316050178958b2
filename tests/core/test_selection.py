"""Blocks of any module are found by repetition, by name, by class and by size."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_tricks.core.selection import repeated_blocks, select_blocks


def layers(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.blocks = nn.Linear(4, 4), nn.ModuleList([Block(), Block()])

    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (nn.ModuleDict({"a": Block(), "b": Block(), "c": nn.Linear(4, 4)}), ["a", "b"]),
        (nn.Sequential(nn.Linear(2, 4), nn.Sequential(*layers(3))), ["1.0", "1.1", "1.2"]),
        (nn.Sequential(Stage(), Stage()), [f"{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1)]),
    ],
    ids=["dict", "nested", "stages"],
)
def test_repeated_blocks_are_found(module: nn.Module, names: list[str]) -> None:
    assert list(select_blocks(module)) == names


def test_what_does_not_repeat_is_no_block() -> None:
    with pytest.raises(ValueError, match=r"no repeated blocks; name submodules such as '0', '1', '2'"):
        select_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Block()))


def test_stages_are_the_outermost() -> None:
    stages = nn.Sequential(Stage(), Stage())
    assert list(repeated_blocks(stages)) == list(stages)


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (["Block"], ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]),
        (["Stage", "Block"], ["0", "1"]),
        (["0", "1.down"], ["0", "1.down"]),
        (21, ["0", "1"]),
        (20, ["0.down", "0.blocks.0.linear", "0.blocks.1.linear"]),
    ],
    ids=str,
)
def test_blocks_are_chosen(blocks: Any, names: list[str]) -> None:
    found = list(select_blocks(nn.Sequential(Stage(), Stage()), blocks))
    assert found[: len(names)] == names


@pytest.mark.parametrize(("blocks", "error"), [(["Blok"], "'Blok' is neither"), (10**6, "no such blocks")])
def test_nothing_found_is_an_error(blocks: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        select_blocks(nn.Sequential(Stage(), Stage()), blocks)


def test_blocks_of_timm_and_transformers_are_found() -> None:
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=8)
    found = select_blocks(transformers.BertModel(config))
    assert {type(each).__name__ for each in found.values()} == {"BertLayer"}
    for name, kind, count in [("resnet18", "BasicBlock", 8), ("vit_tiny_patch16_224", "Block", 12)]:
        blocks = select_blocks(timm.create_model(name)).values()
        assert [type(each).__name__ for each in blocks] == [kind] * count
