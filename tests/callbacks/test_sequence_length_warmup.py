"""SequenceLengthWarmup: what it cuts, and which batches it refuses. For lengths, see core/batches/test_growing.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import lightning_tricks as lt
from tests.callbacks.test_mixup import feed
from tests.nets import fit

B, T, N = 4, 32, 8  # samples, tokens, tokens at first


class Looks(L.LightningModule):
    """Keeps the batches that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def first(batch: Any, **settings: Any) -> Any:
    """What the module gets of a batch at the first step."""
    module = Looks()
    warmup = lt.SequenceLengthWarmup(**{"initial": N / T, "stop": 2, "multiple_of": 1, **settings})
    fit(module, train=feed(batch, batch, batch), val=feed(batch), callbacks=[warmup], max_epochs=1)
    (last,) = module.batches[2:]
    assert str(last) == str(batch), "the full batch from stop on"
    return module.batches[0]


def ids(length: int = T, samples: int = B) -> Tensor:
    return torch.arange(samples * length).view(samples, length)


def refused(batch: Any, message: str, **settings: Any) -> None:
    with pytest.raises(MisconfigurationException, match=f"SequenceLengthWarmup.*{message}"):
        first(batch, **settings)


def encoded() -> dict[str, Tensor]:
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 12:] = 0
    labels = ids().clone()
    labels[:, :2] = -100
    batch = {"input_ids": ids(), "attention_mask": mask, "token_type_ids": ids()}
    return {**batch, "position_ids": torch.arange(T).expand(B, T), "labels": labels}


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_all_parts_of_an_encoded_batch_are_cut_alike(kind: Any) -> None:
    batch = kind(encoded() | {"names": ["a"] * B, "weight": torch.ones(B), "scale": 2.0})
    cut = first(batch)
    assert type(cut) is kind
    assert {name: part[:, :N].tolist() for name, part in encoded().items()} == {
        name: cut[name].tolist() for name in encoded()
    }
    assert cut["names"] == batch["names"]
    assert cut["weight"].tolist() == [1.0] * B
    assert batch["input_ids"].shape == (B, T), "the data set's batch stays as it is"


@dataclass
class Pair:
    x: Tensor
    y: Tensor


@pytest.mark.parametrize(
    ("batch", "settings", "shapes"),
    [
        (ids(), {}, [(B, N)]),
        ((ids(), torch.zeros(B)), {}, [(B, N), (B,)]),
        ((ids(), torch.zeros(B, 5)), {}, [(B, N), (B, 5)]),
        ((ids(), ids()), {}, [(B, N), (B, N)]),
        ((torch.zeros(B, T, 5), ids()), {}, [(B, N, 5), (B, N)]),
        (Pair(ids(), torch.zeros(B)), {}, [(B, N), (B,)]),
        ([torch.zeros(B, 5, T), torch.zeros(B)], {"dim": 2}, [(B, 5, N), (B,)]),
        ({"x": torch.zeros(B, 2, T).long(), "y": torch.zeros(B)}, {"dim": 2}, [(B, 2, N), (B,)]),
        ((torch.zeros(B, T), torch.zeros(B)), {}, [(B, N), (B,)]),
        ({"audio": torch.zeros(B, T), "y": torch.zeros(B)}, {"inputs": "audio"}, [(B, N), (B,)]),
        ({"a": {"x": ids()}, "y": torch.zeros(B)}, {"inputs": "a.x"}, [(B, N), (B,)]),
        ({"x": ids(), "places": torch.arange(T)[None], "y": torch.zeros(B, 1).long()}, {}, [(B, N), (1, N), (B, 1)]),
        ({"x": ids(), "w": torch.ones(B, T)}, {"inputs": ["x", "w"]}, [(B, N), (B, N)]),
        ({"x": ids(), "other": ids(64)}, {"inputs": ["x", "other"]}, [(B, N), (B, 2 * N)]),
        ({"x": ids(), "labels": ids(20)}, {"target": "labels"}, [(B, N), (B, 20)]),
        ({"x": ids(), "labels": torch.rand(B, T)}, {"target": "labels"}, [(B, N), (B, N)]),
        ({"x": ids(), "lengths": torch.ones(B)}, {"target": "lengths"}, [(B, N), (B,)]),
        ({"x": ids(), "image": torch.zeros(B, 3, 5, 5)}, {"inputs": "x"}, [(B, N), (B, 3, 5, 5)]),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
def test_what_is_cut_and_what_stays(batch: Any, settings: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    cut = first(batch, **settings)
    parts = cut.values() if isinstance(cut, dict) else [cut] if isinstance(cut, Tensor) else cut
    parts = vars(cut).values() if isinstance(cut, Pair) else parts
    assert [tuple((part["x"] if isinstance(part, dict) else part).shape) for part in parts] == shapes


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": ids(), "mask": torch.ones(B, T, T)}, r"batch\['mask'\] has their length in two dimensions"),
        ({"x": ids(), "mask": torch.ones(B, 1, T, T)}, r"batch\['mask'\] has their length in another dimension"),
        ({"x": ids(), "mask": torch.ones(T, T)}, r"batch\['mask'\] has their length in another dimension"),
        ({"x": ids(), "weight": torch.ones(T)}, r"batch\['weight'\] has their length in another dimension"),
        ({"x": ids(), "labels": torch.rand(B, T)}, r"batch\['labels'\] may be numbers of tokens or of classes"),
        ({"x": ids(), "labels": ids(20)}, r"batch\['labels'\] has another length: .* target= to leave it"),
        ({"x": ids(), "decoder_input_ids": ids(20)}, r"batch\['decoder_input_ids'\] has another length: .* inputs="),
        ({"x": ids(), "lengths": torch.ones(B)}, r"batch\['lengths'\] may be places in them"),
        ({"x": ids(), "start_positions": torch.ones(B)}, r"batch\['start_positions'\] may be places"),
        ({"x": ids(), "cu_seq_lens_q": torch.ones(3)}, r"batch\['cu_seq_lens_q'\] may be places"),
        ({"x": ids(), "spans": [[1, 2]] * B}, r"batch\['spans'\].* may be places"),
        ({"x": ids(), "z": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, "is a nested tensor"),
        ({"x": torch.zeros(B, 3, 8, 8)}, r"tokens \(B, T\) or features \(B, T, F\), got .* \(4, 3, 8, 8\): name"),
        ({"x": torch.zeros(B, 2, T).long(), "y": torch.zeros(B)}, r"needs tokens .*int64 \(4, 2, 32\): .* in dim="),
        ({"x": torch.zeros(B).long()}, r"needs tokens .*int64 \(4,\)"),
        ({"tokens": ids()}, r"finds no such tensor in the batch, which has tokens: int64"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_part_that_may_belong_to_places_in_another_way_is_refused(batch: Any, message: str) -> None:
    refused(batch, message)


@pytest.mark.parametrize("name", ["attention_mask", "decoder_attention_mask", "padding_mask"])
def test_a_mask_of_tokens_is_known_by_its_name(name: str) -> None:
    mask = (ids() % T < torch.tensor([[T], [12], [4], [20]])).float()
    for batch in ({"input_ids": ids(), name: mask}, {"text": {"input_ids": ids(), name: mask}}):
        cut = first(batch, inputs="text.input_ids" if "text" in batch else None)
        cut = cut.get("text", cut)
        assert torch.equal(cut[name], mask[:, :N])
        assert cut["input_ids"].shape == (B, N)


def test_padding_on_the_left_is_refused() -> None:
    batch = encoded()
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    refused(batch, r"batch\['attention_mask'\] is 0 there: pad on the right")
    batch["attention_mask"] = torch.zeros(B, T)  # nothing at all, on either side
    first(batch, inputs=["input_ids", "attention_mask"])


def test_a_batch_that_would_lose_all_its_labels_is_refused() -> None:
    batch = encoded()
    batch["labels"][:, : N + 1] = -100
    refused(batch, r"leave no label in batch\['labels'\]: the first 8 of 32 are all -100. Give a larger initial")
    batch["labels"][0, 0] = 1  # one of all samples has one
    first(batch)
    batch["labels"][:] = -100  # that was so before
    first(batch)


def test_dim_is_behind_the_samples() -> None:
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        lt.SequenceLengthWarmup(dim=0)


class Language(L.LightningModule):
    """A small GPT-2, with the loss that transformers computes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=130, n_positions=T, n_embd=8, n_layer=1, n_head=1))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = {name: part for name, part in batch.items() if name != "token_type_ids"}
        loss = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_language_model_of_transformers_has_the_loss_of_the_first_tokens() -> None:
    torch.manual_seed(0)
    module = Language()
    module.model.config._attn_implementation = "eager"
    for dropout in (layer for layer in module.modules() if isinstance(layer, nn.Dropout)):
        dropout.p = 0.0
    batch = BatchEncoding(encoded())
    warmup = lt.SequenceLengthWarmup(N / T, stop=2, multiple_of=1)
    fit(module, train=feed(*[BatchEncoding(encoded()) for _ in range(3)]), val=feed(batch), callbacks=[warmup])
    for loss, length in zip(module.losses, (N, 20, T), strict=False):
        given = {name: part[:, :length] for name, part in encoded().items() if name != "token_type_ids"}
        logits = module.model(**{name: part for name, part in given.items() if name != "labels"}).logits
        expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given["labels"][:, 1:].flatten())
        torch.testing.assert_close(loss, expected)


# ---- what is cut can be flattened by view()

WIDE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
DISTIL = {"dim": 8, "n_layers": 1, "n_heads": 1, "hidden_dim": 8}
FLATTENING = {
    "BertForMaskedLM": WIDE,
    "BertForTokenClassification": WIDE,
    "RobertaForMaskedLM": WIDE,
    "RobertaForTokenClassification": WIDE,
    "DistilBertForMaskedLM": DISTIL,
    "DistilBertForTokenClassification": DISTIL,
}


class Encoder(Language):
    """A small encoder, whose loss flattens its labels by view()."""

    def __init__(self, name: str) -> None:
        L.LightningModule.__init__(self)
        kind = getattr(transformers, name)
        config = kind.config_class(vocab_size=130, num_labels=130, max_position_embeddings=T + 2, **FLATTENING[name])
        self.model, self.losses = kind(config), []
        for dropout in (layer for layer in self.modules() if isinstance(layer, nn.Dropout)):
            dropout.p = 0.0


@pytest.mark.parametrize("name", FLATTENING)
def test_a_model_of_transformers_that_views_its_labels_has_the_loss_of_the_first_tokens(name: str) -> None:
    torch.manual_seed(0)
    module, warmup = Encoder(name), lt.SequenceLengthWarmup(N / T, stop=2, multiple_of=1)
    batch = {key: encoded()[key] for key in ("input_ids", "attention_mask", "labels")}
    fit(module, train=feed(batch, batch, batch), val=feed(batch), callbacks=[warmup], max_epochs=1)
    for loss, length in zip(module.losses, (N, 20, T), strict=True):
        given = {key: part[:, :length].contiguous() for key, part in batch.items()}
        logits = module.model(**{key: part for key, part in given.items() if key != "labels"}).logits
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("dim", [1, 2])
def test_what_was_contiguous_is_so_when_it_is_cut(dim: int) -> None:
    shape = (B, T, 3) if dim == 1 else (B, 3, T)
    x = torch.arange(float(B * T * 3)).view(shape)
    batch = {"x": x, "strided": x.clone().transpose(1, 2).contiguous().transpose(1, 2)}
    cut = first(batch, dim=dim, inputs=["x", "strided"])
    assert torch.equal(cut["x"].view(-1), x.narrow(dim, 0, N).flatten())
    assert torch.equal(cut["strided"], cut["x"])
