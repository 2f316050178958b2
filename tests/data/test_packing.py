"""pack_sequences: the loss and the gradients of the padded batch, by every attention of transformers that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_tricks as lt

LENGTHS = (5, 11, 1, 8, 3)


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 50, (length,), generator=generator).tolist()} for length in LENGTHS]


def padded() -> dict[str, Tensor]:
    rows = [sample["input_ids"] for sample in samples()]
    mask = torch.tensor([[1] * len(row) + [0] * (max(LENGTHS) - len(row)) for row in rows])
    ids = torch.tensor([row + [0] * (max(LENGTHS) - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def model(kind: str, attention: str) -> Any:
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, **settings)
        return transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, **sizes)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


def loss_and_gradients(network: Any, batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    network.zero_grad()
    loss = network(**batch).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in network.parameters()]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_packed_sequences_train_as_padded_ones(kind: str, attention: str) -> None:
    network = model(kind, attention)
    assert network.config.use_cache, "the default, with which position_ids alone would not be enough"
    loss, gradients = loss_and_gradients(network, padded())
    given: Any = samples()
    (batch,) = DataLoader(given, batch_size=8, collate_fn=lt.pack_sequences)
    packed, found = loss_and_gradients(network, batch)
    torch.testing.assert_close(packed, loss)
    torch.testing.assert_close(found, gradients, atol=1e-6, rtol=1e-4)
    for without in ("position_ids", "use_cache"):
        leaking, _ = loss_and_gradients(network, {name: batch[name] for name in batch if name != without})
        assert abs(leaking - loss) > 1e-4, without


def test_the_batch_is_that_of_transformers() -> None:
    from transformers import DataCollatorWithFlattening

    theirs, ours = DataCollatorWithFlattening()(samples()), lt.pack_sequences(samples())
    assert theirs.keys() | {"use_cache"} == ours.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_labels_of_the_user_and_tensors_are_kept() -> None:
    sample = {"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([-100, -100, 7])}
    packed = lt.pack_sequences([sample, {"input_ids": torch.tensor([8, 9])}])
    assert packed["labels"].tolist() == [[-100, -100, 7, -100, 9]]
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["use_cache"] is False


@pytest.mark.parametrize("wrong", [[], [{"input_ids": [1, 2], "labels": [1]}]])
def test_no_samples_and_other_lengths_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="samples must be sequences with labels of the same lengths"):
        lt.pack_sequences(wrong)
