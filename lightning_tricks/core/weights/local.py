"""The weights of a module that a process holds: full, or in shards (see fsdp2.py and zero.py).

A trick reads and writes the *local* tensors, without gathering any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.core.weights.tensors import global_norm, trainable


class LocalWeights:
    """Full weights in the module itself, as under single-device strategies and DDP."""

    sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def reshard(self) -> None:
        """Bring the module into its state between two steps, in which ``local`` finds the shards."""

    def local(self, tensor: Tensor) -> Tensor | None:
        """This rank's part of a parameter or buffer; None if it has none."""
        return tensor

    def parts(self, tensors: Iterable[Tensor | None]) -> list[Tensor]:
        """This rank's parts of those tensors that there are, without those of which it has none."""
        return [part for each in tensors if each is not None and (part := self.local(each)) is not None]

    def trainable(self) -> dict[str, Tensor]:
        """This rank's parts of the trainable parameters, by name."""
        self.reshard()
        parts = {name: self.local(parameter) for name, parameter in trainable(self.module).items()}
        return {name: part for name, part in parts.items() if part is not None}

    def model_copies(self) -> list[Tensor]:
        """The tensors of the model that ``update_model`` derives from the local parts; empty if they are the same."""
        return []

    def update_model(self) -> None:
        """Make the forward pass use what was written to the local parts; all ranks take part."""

    def release(self) -> None:
        """Drop full weights that were gathered from parts which have changed since; needs no other rank."""

    def checkpoint_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local parts in their order, by their keys in a sharded checkpoint."""
        return dict(parts)

    def shard(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of full tensors."""
        return dict(full)

    def unshard(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full tensors of local parts; all ranks take part."""
        return dict(parts)

    def gradients(self, loss: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """This rank's parts of the gradients, None where the loss does not depend on a weight; ``.grad`` stays."""
        with torch._C.DisableTorchFunctionSubclass():  # a loss of another class gives gradients of that class
            return torch.autograd.grad(loss, weights, allow_unused=True)

    def copies(self, names: Sequence[str]) -> list[int]:
        """The numbers of ranks that hold the same part as this rank of parameters and buffers."""
        return [1] * len(names)

    def norm(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> Tensor:
        """The Euclidean norm over the parts of all ranks; ``of`` are the tensors that the parts belong to."""
        return global_norm(parts) if parts else torch.zeros((), device=next(self.module.parameters()).device)

    def norms(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> list[Tensor]:
        """The Euclidean norms of the tensors in ``of``, of which this rank holds these parts."""
        return list(torch._foreach_norm(list(parts))) if parts else []

    def state(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()`` with full tensors; all ranks take part."""
        self.reshard()
        return {name: self._gather_entry(value) for name, value in self.module.state_dict().items()}

    def _gather_entry(self, value: Any) -> Any:
        """A full copy of an entry of a state dict."""
        return value.detach().clone() if isinstance(value, Tensor) else value
