"""Merging the adapters of a trained module into its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.core.adapters.base import dequantized, is_quantized
from lightning_tricks.core.adapters.inject import BASE
from lightning_tricks.core.adapters.merge import merged_state
from lightning_tricks.core.adapters.record import Record
from lightning_tricks.core.weights.tensors import full_tensor

__all__ = ["merge_adapters"]


@torch.no_grad()
def merge_adapters(module: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` of a module trained with ``LoRA``, with adapters merged and the original parameter names.

    It loads into the class as it was, strictly and without peft. The module is not changed. Of a quantized base the
    weights are those that the module computes with. Merged weights are new tensors, all others are those of the module,
    as in its ``state_dict``. Where FSDP2 shards the weights, all ranks take part and get the whole.

    Args:
        module: The LightningModule that was trained.

    Raises:
        ValueError: If the module has no adapters of ``LoRA``, DeepSpeed ZeRO-3 shards it, or a weight is computed from
            others (by pruning or a parametrization).

    Example:
        >>> merge_adapters(nn.Linear(2, 2))
        Traceback (most recent call last):
        ValueError: Linear has no adapters of LoRA: fit it with this callback, or load its checkpoint with a Trainer.
    """
    if not hasattr(module, "lightning_tricks_lora"):
        raise ValueError(
            f"{type(module).__name__} has no adapters of LoRA: fit it with this callback, or load its checkpoint with a"
            " Trainer."
        )
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        raise ValueError(
            "DeepSpeed ZeRO-3 shards the weights: save a checkpoint and merge it, lightning-tricks export --merge."
        )
    record: Record = vars(module)["lightning_tricks_lora"][1]
    whole = {name: full_tensor(value) for name, value in module.state_dict().items()}
    state: dict[str, Any] = {name: v.detach() if isinstance(v, Tensor) else v for name, v in whole.items()}
    for path, layer in module.named_modules(remove_duplicate=False):
        if is_quantized(layer) and not hasattr(layer, BASE):
            for name in [name for name in state if name.startswith(f"{path}.weight.")]:
                del state[name]
            state[f"{path}.weight"] = dequantized(layer)
    return merged_state({}, state, record)
