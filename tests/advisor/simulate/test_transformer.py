"""The size of a transformer is that of a real one: weights, operations and activations of a Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lightning_tricks as lt


def llama(width: int, length: int) -> tuple[Any, lt.TransformerShape]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": width // 64}
    more = {"num_key_value_heads": width // 128, "intermediate_size": 3 * width, "vocab_size": 1000}
    config = transformers.LlamaConfig(**sizes, **more, max_position_embeddings=length, attn_implementation="eager")
    shape = lt.TransformerShape(
        3, width, width // 64, 1000, length, key_heads=width // 128, hidden=3 * width, gated=True
    )
    return config, shape


@pytest.mark.slow
def test_weights_and_operations_are_those_of_a_llama() -> None:
    config, shape = llama(128, 64)
    module = pytest.importorskip("transformers").LlamaForCausalLM(config)
    counted = sum(weight.numel() for weight in module.parameters())
    assert shape.parameters == counted - (2 * 3 + 1) * 128, "without those of norms"
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, labels=tokens).loss.backward()
    assert shape.flops * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.slow
def test_activations_are_those_that_are_measured() -> None:
    transformers = pytest.importorskip("transformers")
    config, shape = llama(1024, 512)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
        tokens = torch.zeros(1, 512, dtype=torch.long)
    measured = lt.estimate_memory(module, strategy="ddp_bf16", batch={"input_ids": tokens, "labels": tokens})
    sample = measured.with_batch(3).activations - measured.with_batch(2).activations
    assert shape.activations() == pytest.approx(sample, rel=0.1)


def test_devices_that_share_layers_keep_less_and_a_layer_computed_again_keeps_its_input() -> None:
    _, shape = llama(1024, 512)
    token = 1024 * 3 * 65 + 12 * 1000
    assert shape.activations() == 512 * token
    assert shape.activations(8) == 512 * (token - 1024 * 3 * 46 * 7 / 8)
    assert shape.activations(recompute=True) == 512 * (token - 1024 * 2 * 65 + 1024 * 3 * 4)


@pytest.mark.parametrize("billions", [0.1, 1, 7, 70, 400])
def test_a_usual_shape_has_the_weights(billions: float) -> None:
    shape = lt.TransformerShape.of(round(billions * 1e9), sequence=128)
    assert shape.parameters == pytest.approx(billions * 1e9, rel=0.06)
    assert shape.heads * 128 == shape.width
    assert shape.sequence == 128


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"heads": 7}, "heads must divide width, got heads=7 and width=64"), ({"layers": 0}, "layers must be")],
)
def test_a_shape_that_there_is_not_is_refused(wrong: dict[str, int], message: str) -> None:
    sizes = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 100, "sequence": 16}
    with pytest.raises(ValueError, match=message):
        lt.TransformerShape(**{**sizes, **wrong})
