"""Where a process holds the weights of a module: whole, or in shards of FSDP2 (of DeepSpeed ZeRO: see zero.py).

A trick reads and writes the *local* tensors; nothing is gathered for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.core.weights.tensors import global_norm, trainable


class LocalWeights:
    """Weights as single-device and DDP modules hold them: whole, in the module itself."""

    sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def reshard(self) -> None:
        """Bring the module into the state between two steps, in which ``local`` finds what it looks for."""

    def local(self, tensor: Tensor) -> Tensor | None:
        """The part of a parameter or buffer that this rank averages; None if it has none."""
        return tensor

    def trainable(self) -> dict[str, Tensor]:
        """The local parts of the parameters that train, by name."""
        self.reshard()
        parts = {name: self.local(parameter) for name, parameter in trainable(self.module).items()}
        return {name: part for name, part in parts.items() if part is not None}

    def model_copies(self) -> list[Tensor]:
        """The tensors that ``publish`` writes."""
        return []

    def update_model(self) -> None:
        """Let the forward pass see what was written to the local parts; all ranks take part."""

    def release(self) -> None:
        """Forget whole weights that were gathered from parts which have changed; no other rank is needed."""

    def checkpoint_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local parts, in their order, by their keys in a sharded checkpoint."""
        return dict(parts)

    def shard(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors."""
        return dict(full)

    def unshard(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors of local parts; all ranks take part."""
        return dict(parts)

    def gradients(self, loss: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """This rank's parts of the gradients, None for a weight that the loss does not need; ``.grad`` stays."""
        return torch.autograd.grad(loss, weights, allow_unused=True)

    def norm(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm over all parts of all ranks, which are parts ``of`` these tensors."""
        return global_norm(parts) if parts else torch.zeros(())

    def norms(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> list[Tensor]:
        """The Euclidean norm of each tensor, of which this rank has these parts."""
        return list(torch._foreach_norm(list(parts))) if parts else []

    def state(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()``, of whole tensors; all ranks take part."""
        self.reshard()
        return {name: self._gathered(value) for name, value in self.module.state_dict().items()}

    def _gathered(self, value: Any) -> Any:
        """A whole copy of an entry of a state dict."""
        return value.detach().clone() if isinstance(value, Tensor) else value
