"""Classifying WordNet's glosses (definitions) as animal, artifact, food, person or plant.

timm ships the glosses of ImageNet-21k's 21,843 classes. The labels are derived, not annotated: a class is named by its
synset's offset in WordNet 3.0, which sorts nouns by subject, so the range of the offset (``SUBJECTS``) gives the
subject. Repeated glosses count once; glosses with two subjects are left out. The synset's names, which precede the
gloss, are not used.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.install import required
from lightning_tricks.examples.tasks import Split, TaskData, mislabel

SUBJECTS = {  # The first offset (included) and the last (excluded).
    "animal": (1314388, 2665985),
    "artifact": (2665985, 4620000),
    "food": (7555863, 7940000),
    "person": (9600000, 10810000),
    "plant": (11530000, 13200000),
}
SIZES = {"train": 2000, "val": 1000, "test": 4000}  # Glosses, of about 20,600.
PADDING, UNKNOWN = 0, 1  # The first two tokens.
LENGTH = 16  # Words of a gloss that are used.
WORDS = 2048  # The size of the vocabulary, including the first two tokens.


class GlossTransformer(nn.Module):
    """One transformer block over words and their positions, averaged over the words; ``head`` maps to logits.

    Args:
        width: The number of features of a word, a multiple of 4.
        dropout: The fraction of features to drop in training, in [0, 1].
    """

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=PADDING)
        self.places = nn.Embedding(LENGTH, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, len(SUBJECTS))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == PADDING
        hidden = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        hidden = self.block(hidden, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return self.head(hidden.sum(1) / (~padding).sum(1, keepdim=True))


class GlossesData(TaskData):
    """The glosses as a data module."""

    @override
    def load(self) -> Split:
        return load_glosses(self.noise)


def load_glosses(noise: float) -> Split:
    """Tokens and subjects of a fixed random split; a fraction ``noise`` of the training labels is wrong.

    The vocabulary consists of the most frequent words of the training glosses.
    """
    rows = sorted(read_glosses().items())
    generator = torch.Generator().manual_seed(0)
    order = iter(torch.randperm(len(rows), generator=generator).tolist())
    parts = {part: [rows[next(order)] for _ in range(size)] for part, size in SIZES.items()}
    counts = Counter(word for gloss, _ in parts["train"] for word in words(gloss))
    vocabulary = {word: token for token, (word, _) in enumerate(counts.most_common(WORDS - 2), UNKNOWN + 1)}
    names = list(SUBJECTS)
    split = {
        part: (
            torch.tensor([tokens(gloss, vocabulary) for gloss, _ in part_rows]),
            torch.tensor([names.index(subject) for _, subject in part_rows]),
        )
        for part, part_rows in parts.items()
    }
    texts, labels = split["train"]
    return {**split, "train": (texts, mislabel(labels, noise, classes=len(names), generator=generator))}


@cache
def read_glosses() -> dict[str, str]:
    """Read all glosses from timm, with the subject of each."""
    with required("the glosses need timm", "vision"):
        from timm.data import ImageNetInfo
    info = ImageNetInfo("imagenet21k_goog")
    subjects_of: dict[str, set[str]] = {}
    for synset in info.label_names():
        names = info.label_name_to_description(synset)
        gloss = info.label_name_to_description(synset, detailed=True).removeprefix(f"{names}: ")
        subjects = {subject for subject, (first, end) in SUBJECTS.items() if first <= int(synset[1:]) < end}
        subjects_of.setdefault(gloss, set()).update(subjects)
    return {gloss: subjects.pop() for gloss, subjects in subjects_of.items() if len(subjects) == 1}


def words(gloss: str) -> list[str]:
    """The first words of a gloss in lower case."""
    return re.findall(r"[a-z]+", gloss.lower())[:LENGTH]


def tokens(gloss: str, vocabulary: dict[str, int]) -> list[int]:
    """One token per word of a gloss, padded to ``LENGTH``."""
    known = [vocabulary.get(word, UNKNOWN) for word in words(gloss)]
    return known + [PADDING] * (LENGTH - len(known))
