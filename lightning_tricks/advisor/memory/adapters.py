"""The parameters of a model with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_tricks.advisor.memory.parameters import Parameters, Weight, assumed_blocks, parameters_of
from lightning_tricks.callbacks.lora import LoRA
from lightning_tricks.core.adapters.base import packed_bytes
from lightning_tricks.core.adapters.inject import frozen_linear, injected, select


@contextmanager
def with_adapters(model: nn.Module | int, lora: LoRA | None) -> Iterator[Parameters]:
    """A context in which a module has the adapters of ``lora``, with the parameters that it would have.

    A number of parameters stands for the matrices of ``assumed_blocks`` transformer blocks of 12 d**2 weights each, all
    of them adapted.

    Raises:
        ValueError: If a pattern of ``lora`` selects nothing, or a layer cannot be adapted.
    """
    if lora is None:
        yield parameters_of(model)
    elif not isinstance(model, nn.Module):
        width = (model / (12 * assumed_blocks(model))) ** 0.5
        whole = parameters_of(model)
        adapters = Weight((round(2 * lora.r * model / width),), torch.float32, True)
        frozen = Weight((model,), torch.float32, False)
        if lora.base != "keep":
            frozen = Weight((packed_bytes(model, round(model / width), lora.base),), torch.uint8, False)
        yield Parameters((frozen, adapters), 0, whole.largest_layer, whole.largest_group, whole.outside_groups)
    else:
        layers, trained = select(model, lora.modules, lora.train)
        quantized = frozen_linear(model, trained) if lora.base != "keep" else []
        packed = {
            id(layer.weight): packed_bytes(layer.weight.numel(), layer.out_features, lora.base)
            for _, _, layer in quantized
        }
        with isolate_rng(), injected(model, layers, trained, lora.settings):
            yield parameters_of(model, packed)
