"""Models of transformers for the glosses, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.examples.glosses import LENGTH, PADDING, SUBJECTS, WORDS


class TextClassifier(nn.Module):
    """A BERT that maps the tokens of a gloss to logits; ``head`` is its last layer.

    Args:
        width: The number of features of a word, a multiple of 4.
        layers: The number of transformer blocks.
    """

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
        config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_hidden_layers=layers, **shape)
        self.encoder = BertModel(config)
        self.head = nn.Linear(width, len(SUBJECTS))

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.encoder(tokens, attention_mask=(tokens != PADDING).long()).pooler_output
        return self.head(output)


class LanguageModel(L.LightningModule):
    """A Llama that is trained to predict the next word of a gloss.

    Args:
        width: The number of features of a word, a multiple of 8.
        layers: The number of transformer blocks.
        lr: The learning rate of AdamW.
    """

    def __init__(self, width: int = 64, layers: int = 2, lr: float = 1e-3) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, pad_token_id=PADDING, **shape)
        self.model = LlamaForCausalLM(config)
        self.lr = lr

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch[0])

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch[0]), sync_dist=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch[0]), sync_dist=True)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)

    def _loss(self, tokens: Tensor) -> Tensor:
        words = tokens != PADDING
        loss: Tensor = self.model(
            tokens, attention_mask=words.long(), labels=tokens.masked_fill(~words, -100), use_cache=False
        ).loss
        return loss
