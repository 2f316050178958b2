"""transformers: encoders and decoders in a module of one's own; the model computes its loss in ``forward``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
)

from tests.clients import page
from tests.clients.base import FLOAT8
from tests.clients.oracles import Client

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


class Module(pl.LightningModule):
    """As their users write it: the batch has the arguments of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Scheduled(Module):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = get_linear_schedule_with_warmup(optimizer, 2, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def tokens() -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (20, 7), generator=numbers)
    return [{"input_ids": each, "attention_mask": torch.ones(7, dtype=torch.long)} for each in ids]


class TestBert(Client):
    model = "BertForSequenceClassification"
    inputs = "input_ids"
    target = "labels"
    layer = logits = "model.classifier"
    sequences = folds = True
    blocks = "BertLayer"
    refused = {"Mixup": "mixes floating-point inputs"}

    def module(self) -> Any:
        return Module(BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **SIZES)))

    def loaders(self) -> tuple[Any, Any]:
        data = [{**each, "labels": torch.tensor(number % 3)} for number, each in enumerate(tokens())]
        return DataLoader(data, 4), DataLoader(data, 4)

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        return F.cross_entropy(module.model(**batch).logits, batch["labels"], reduction="none")


class TestGPT2(Client):
    """A language model: the labels are the tokens."""

    model = "GPT2LMHeadModel"
    inputs = "input_ids"
    target = "labels"
    blocks = "GPT2Block"
    logits = "model"
    double = {"precision": "64-true"}
    adapted = "c_attn"
    sequences = folds = True
    stem = "model.transformer.h.0.attn.c_attn.weight"  # the first one is tied to the head

    def outwards(self, gradient: Tensor) -> Tensor:
        return gradient.T  # GPT-2's layers have weights (in, out)

    schedule = "LambdaLR"
    refused = {
        "Mixup": "mixes floating-point inputs",
        **FLOAT8,
    }

    def module(self) -> Any:
        config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        return Scheduled(GPT2LMHeadModel(config))

    def loaders(self) -> tuple[Any, Any]:
        data = [{**each, "labels": each["input_ids"].clone()} for each in tokens()]
        return DataLoader(data, 4), DataLoader(data, 4)

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        logits = module.model(**batch).logits
        losses = F.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
        return losses.mean(1)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (train_loader, _), (text_loader, _) = TestBert().loaders(), TestGPT2().loaders()
    models = {"bert": TestBert().module().model, "gpt2": (gpt2 := TestGPT2().module().model)}
    bare = copy.deepcopy(gpt2)
    names = page.run("transformers", **models, train_loader=train_loader, text_loader=text_loader)
    assert names["trainer"].global_step == 10
    Module(bare).load_state_dict(names["weights"])
