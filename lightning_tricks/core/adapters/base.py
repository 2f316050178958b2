"""The frozen weights beside adapters: told from others by a checksum, and held in 4 or 8 bits."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.install import library
from lightning_tricks.core.weights.tensors import checksum

_PIECE = 2**24  # the elements that are added up at a time, since a checksum needs 16 bytes for each


def weights_checksum(weights: Mapping[str, Tensor]) -> str:
    """A checksum of names, shapes, dtypes and bits, the same on every device and in every order of the weights.

    Example:
        >>> weights_checksum({"w": torch.ones(2), "b": torch.zeros(1)})
        '08c55a1c0c79aeb'
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name].detach()
        sums = [checksum(piece) for piece in weight.flatten().split(_PIECE)]
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} {sums};".encode())
    return digest.hexdigest()[:15]  # fits into an int64


def quantize(layer: nn.Linear, base: str) -> nn.Module:
    """A linear layer with its weight in 4 bits (bitsandbytes) or 8 bits (torchao); the bias is that of the layer.

    Args:
        layer: The layer.
        base: "nf4" or "int8".

    Raises:
        ModuleNotFoundError: If bitsandbytes or torchao is missing, with the extra to install.
    """
    user = f"LoRA(base={base!r})"
    if base == "int8":
        torchao = library("torchao.quantization", user, "8bit")
        # Its default also changes settings of torch's compiler, for all that the process compiles; torchao 0.16 would
        # take an older form of the weights, version 1.
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(set_inductor_config=False, version=2))
        layer.register_forward_pre_hook(_require_floats)
        return layer
    bnb = library("bitsandbytes", user, "8bit").nn
    with torch.device("meta"):
        new: Any = bnb.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type=base)
    new.weight = bnb.Params4bit(layer.weight.detach(), requires_grad=False, quant_type=base)
    new.bias = layer.bias
    new.support_avx512bf16_for_cpu = False  # evaluation would repack the weight, which not all sizes allow
    new.register_forward_pre_hook(_require_floats)
    return new.to(layer.weight.device)  # which quantizes


def _require_floats(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook that raises for an input that was cast to the dtype of packed weights, as that of T5's last layers is.

    torch also leaves the fast path of nn.TransformerEncoderLayer, which reads weights past their layers, for a hook.
    """
    if isinstance(x := inputs[0], Tensor) and not x.is_floating_point():
        raise MisconfigurationException(
            f"LoRA(base=...): a quantized layer got an input of dtype {x.dtype}, since the network casts inputs to the"
            " dtype of a weight: use base='int8', or base='keep'."
        )


def packed_bytes(layer_weights: int, outputs: int, base: str) -> int:
    """The bytes of a quantized weight with its scales.

    Args:
        layer_weights: The number of elements of the weight.
        outputs: The number of its rows.
        base: "nf4": half a byte each, a byte for 64, and 4 for 64 * 256, with tables of 1,088; "int8": a byte each, and
            4 for a row.
    """
    if base == "int8":
        return layer_weights + 4 * outputs
    blocks = -(-layer_weights // 64)
    return -(-layer_weights // 2) + blocks + 4 * -(-blocks // 256) + 1088


def is_quantized(layer: nn.Module) -> bool:
    """Whether the weight of a layer is held in 4 or 8 bits, here or by its maker."""
    bnb, torchao = sys.modules.get("bitsandbytes"), sys.modules.get("torchao.utils")
    weight = getattr(layer, "weight", None)
    return (bnb is not None and isinstance(weight, bnb.nn.Params4bit | bnb.nn.Int8Params)) or (
        torchao is not None and isinstance(weight, torchao.TorchAOBaseTensor)
    )


def dequantized(layer: Any) -> Tensor:
    """The weight that a quantized layer computes with."""
    from peft.utils.integrations import dequantize_module_weight

    torchao = sys.modules.get("torchao.utils")
    if torchao is not None and isinstance(layer.weight, torchao.TorchAOBaseTensor):
        return layer.weight.dequantize()
    return dequantize_module_weight(layer).detach()
