"""Merging low-rank adapters into the weights beside them, in plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.core.adapters.record import Record


def merged_weight(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """``W' = W + scale * B @ A``; with a magnitude m (DoRA), ``m * W' / norm(W')`` for each output.

    Args:
        weight: W (out, in) of a linear layer, (out, in, ...) of a convolution.
        a: A (r, in, ...).
        b: B (out, r, ...).
        scale: The factor of the product.
        magnitude: m, with one number for each output; None for 1.
        transposed: Whether W is (in, out), as that of an embedding is.

    Returns:
        A new tensor of the dtype of W, computed in fp32 or more.

    Example:
        >>> merged_weight(torch.eye(2), torch.ones(1, 2), torch.ones(2, 1), 0.5)
        tensor([[1.5000, 0.5000],
                [0.5000, 1.5000]])
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    merged = (weight.T if transposed else weight).to(exact)
    merged = merged + scale * (b.to(exact).flatten(1) @ a.to(exact).flatten(1)).view_as(merged)
    if magnitude is not None:
        factor = magnitude.to(exact).flatten() / torch.linalg.vector_norm(merged.flatten(1), dim=1)
        merged = merged * factor.view(-1, *[1] * (merged.ndim - 1))
    return (merged.T if transposed else merged).to(weight.dtype).contiguous()


@torch.no_grad()
def merged_state(base: Mapping[str, Any], saved: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """The state of the network with merged adapters, under the names of before the injection.

    Args:
        base: The state of the network before the injection.
        saved: The state with the adapters, and with all that replaces a part of ``base``; other entries may be missing.
        record: What the adapters are.

    Raises:
        ValueError: If a weight or an adapter is computed from others.
    """
    state = {**base, **record.without_adapters(saved)}
    for layer in record.layers:
        prefix = f"{layer}.lora_"
        names = [name for name in saved if name.startswith(prefix)]
        parts = {name.removeprefix(prefix).split(".")[0]: saved[name] for name in names}
        if f"{layer}.weight" not in state or len(parts) < len(names):
            raise ValueError(
                f"{layer}.weight or its adapter is computed from others (by pruning or a parametrization), which cannot"
                " be merged: make it a plain one before, by torch.nn.utils.prune.remove or remove_parametrizations."
            )
        embeds = "embedding_A" in parts
        a, b = (parts[f"embedding_{part}" if embeds else part] for part in "AB")
        state[f"{layer}.weight"] = merged_weight(
            state[f"{layer}.weight"],
            a,
            b,
            record.scale,
            parts.get("magnitude_vector"),
            transposed=embeds or layer in record.transposed,
        )
    return state
