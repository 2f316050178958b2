"""The models of transformers: padding changes nothing, and the loss is that of the next word."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_tricks.examples.glosses import PADDING, WORDS
from lightning_tricks.examples.language import LanguageModel, TextClassifier

pytestmark = pytest.mark.slow  # transformers; tests/test_recipes.py parses what uses them


def tokens() -> torch.Tensor:
    return torch.tensor([[5, 9, 7, 3, PADDING, PADDING], [4, 8, 2, 6, 11, 12]])


@torch.no_grad()
def test_the_classifier_does_not_look_at_padding() -> None:
    torch.manual_seed(0)
    network = TextClassifier(width=16, layers=1).eval()
    logits = network(tokens())
    assert logits.shape == (2, 5)
    torch.testing.assert_close(network(tokens()[:1, :4]), logits[:1])


@torch.no_grad()
def test_the_loss_is_that_of_the_next_word_without_padding() -> None:
    torch.manual_seed(0)
    model = LanguageModel(width=16, layers=1).eval()
    scores = [model.model(row[row != PADDING][None]).logits[0] for row in tokens()]
    known = [row[row != PADDING] for row in tokens()]
    expected = F.cross_entropy(
        torch.cat([row[:-1] for row in scores]).view(-1, WORDS), torch.cat([row[1:] for row in known])
    )
    torch.testing.assert_close(model.training_step((tokens(), torch.zeros(2)), 0), expected)
