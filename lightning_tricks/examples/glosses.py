"""What is it, by its definition: WordNet's glosses of animals, artifacts, food, persons and plants, read from timm.

timm ships the glosses of ImageNet-21k's 21,843 classes. The labels are derived, not annotated: a class is named by its
synset's offset in WordNet 3.0, which lists nouns by subject, so the range that the offset lies in (``SUBJECTS``) tells
the subject. A gloss that stands there twice counts once; one of two subjects is left out. The names of the synset,
before the gloss, are not read.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.examples.tasks import Split, TaskData, mislabel

SUBJECTS = {  # the first offset, and the one behind the last
    "animal": (1314388, 2665985),
    "artifact": (2665985, 4620000),
    "food": (7555863, 7940000),
    "person": (9600000, 10810000),
    "plant": (11530000, 13200000),
}
SIZES = {"train": 2000, "val": 1000, "test": 4000}  # of some 20,600
PADDING, UNKNOWN = 0, 1  # the first tokens
LENGTH = 16  # words; the rest of a gloss is not read
WORDS = 2048  # in the vocabulary, the two tokens included


class GlossTransformer(nn.Module):
    """One transformer block over words and places, and the mean over the words; ``head`` gives the logits.

    Args:
        width: Of the representations.
        dropout: Share of them that is left out while training.
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
        hidden = self.words(tokens) + self.places.weight
        hidden = self.block(hidden, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        return self.head(hidden.sum(1) / (~padding).sum(1, keepdim=True))


class GlossesData(TaskData):
    """The glosses for a configuration file."""

    @override
    def load(self) -> Split:
        return load_glosses(self.noise)


def load_glosses(noise: float) -> Split:
    """Tokens and subjects of a fixed random split; a share ``noise`` of the training labels is another subject.

    The vocabulary is made of the training rows: their most frequent words.
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
            torch.tensor([tokens(gloss, vocabulary) for gloss, _ in each]),
            torch.tensor([names.index(subject) for _, subject in each]),
        )
        for part, each in parts.items()
    }
    texts, labels = split["train"]
    return {**split, "train": (texts, mislabel(labels, noise, classes=len(names), generator=generator))}


@cache
def read_glosses() -> dict[str, str]:
    """The subject of every gloss."""
    try:
        from timm.data import ImageNetInfo
    except ImportError as error:
        raise ImportError("the glosses need timm: pip install 'lightning_tricks[vision]'") from error
    info = ImageNetInfo("imagenet21k_goog")
    found: dict[str, set[str]] = {}
    for synset in info.label_names():
        names, whole = info.label_name_to_description(synset), info.label_name_to_description(synset, detailed=True)
        subjects = {subject for subject, (first, behind) in SUBJECTS.items() if first <= int(synset[1:]) < behind}
        found.setdefault(whole.removeprefix(f"{names}: "), set()).update(subjects)
    return {gloss: subjects.pop() for gloss, subjects in found.items() if len(subjects) == 1}


def words(gloss: str) -> list[str]:
    """The first words in lower case."""
    return re.findall(r"[a-z]+", gloss.lower())[:LENGTH]


def tokens(gloss: str, vocabulary: dict[str, int]) -> list[int]:
    """A number a word, filled up with padding."""
    known = [vocabulary.get(word, UNKNOWN) for word in words(gloss)]
    return known + [PADDING] * (LENGTH - len(known))
