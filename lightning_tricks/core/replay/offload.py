"""A block whose activations wait in host memory for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


@partial(torch.compiler.disable, recursive=False)  # code that is compiled inside the block stays compiled
def offload(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``forward(*args, **kwargs)`` of a block; what it saves for the backward pass goes to host memory.

    Weights stay where they are, and so does what is in host memory already. A saved tensor that is written before the
    backward pass raises there, as without this function.

    Args:
        block: The module whose weights stay.
        forward: The block's forward method.
        args: Positional arguments of ``forward``.
        kwargs: Keyword arguments of ``forward``.

    Example:
        >>> layer, x = nn.Linear(4, 4), torch.randn(8, 4)
        >>> offload(layer, layer.forward, x).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([4, 4])
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    stays = {weight.untyped_storage().data_ptr() for weight in block.parameters()}

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        if saved.device.type == "cpu" or saved.untyped_storage().data_ptr() in stays:
            return partial(_unchanged, saved, saved._version)
        ordered = saved.is_cuda  # which makes copies in pinned memory, amid its other work, so that the host goes on
        return partial(saved.detach().to("cpu", non_blocking=ordered).to, saved.device, non_blocking=ordered)

    with saved_tensors_hooks(pack, lambda packed: packed()):
        return forward(*args, **kwargs)


def _unchanged(saved: Tensor, version: int) -> Tensor:
    if saved._version != version:  # torch does not look once there are hooks
        raise RuntimeError(
            f"A tensor {tuple(saved.shape)} that the backward pass needs has been written by an in-place operation: it"
            f" is at version {saved._version}, and was saved at version {version}."
        )
    return saved
