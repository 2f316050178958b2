"""A small language model of characters, on the documentation that comes with Python itself (``pydoc_data``).

Many topics repeat paragraphs of others: every paragraph counts once. The text changes a little from one version of
Python to the next; the version stands beside the figures.
"""

from __future__ import annotations

from itertools import accumulate
from pydoc_data.topics import topics
from random import Random

import torch
from torch import Tensor, nn

from lightning_tricks.examples.tasks import Split

LENGTH = 32  # characters of a sequence
SIZES = {"train": 1200, "val": 240, "test": 480}  # sequences
CHARACTERS = ["\n", *map(chr, range(32, 127))]  # anything else is read as a space


class CharacterTransformer(nn.Module):
    """Two causal transformer blocks, from characters (B, T) to the logits (B, T, C) of the characters that follow."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(CHARACTERS), width), nn.Embedding(LENGTH, width)
        block = {"nhead": 4, "dim_feedforward": 2 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **block) for _ in range(2))
        self.head = nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits at every place, from the characters up to it."""
        hidden = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=later, is_causal=True)
        return self.head(hidden)


def load_text() -> Split:
    """Sequences of characters and of those that follow them, from different paragraphs in each part."""
    paragraphs = list(dict.fromkeys(each for _, text in sorted(topics.items()) for each in text.split("\n\n")))
    Random(0).shuffle(paragraphs)
    codes = {character: code for code, character in enumerate(CHARACTERS)}
    text = torch.tensor([codes.get(each, codes[" "]) for each in "\n\n".join(paragraphs)])
    step = LENGTH + 1
    ends = accumulate(SIZES.values())
    parts = {
        part: text[(end - size) * step : end * step].reshape(size, step)
        for (part, size), end in zip(SIZES.items(), ends, strict=True)
    }
    return {part: (each[:, :-1].contiguous(), each[:, 1:].contiguous()) for part, each in parts.items()}
