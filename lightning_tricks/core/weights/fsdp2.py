"""The weights of a module under FSDP2: each rank holds a slice of every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import global_norm


class FSDP2(LocalWeights):
    """Weights that ``fully_shard`` (or tensor parallelism) has made DTensors: each rank has its slice."""

    sharded = True

    @override
    def reshard(self) -> None:
        """Validation leaves the root module's parameters gathered."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        with torch.no_grad():
            return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @override
    def checkpoint_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._distributed(part, like) for name, part, like in self._beside(parts)}

    @override
    def shard(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._slice(whole, like) for name, whole, like in self._beside(full)}

    @override
    def unshard(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._gathered(tensor) for name, tensor in self.checkpoint_tensors(parts).items()}

    @override
    def gradients(self, loss: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        # torch.autograd.grad gives what is not summed over the ranks, and of whole tensors
        self.reshard()
        kept = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            loss.backward()
            return [None if weight.grad is None else self.local(weight.grad) for weight in weights]
        finally:
            self.reshard()
            for parameter, gradient in kept:
                parameter.grad = gradient

    @override
    def norm(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> Tensor:
        if not of:
            return torch.zeros(())  # on all ranks
        total = torch.zeros((), device=of[0].device)
        for part, whole in zip(parts, of, strict=True):
            total += global_norm([part]) ** 2 / _copies(whole)
        dist.all_reduce(total)
        return total.sqrt()

    @override
    def norms(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> list[Tensor]:
        if not of:
            return []  # on all ranks
        own = torch._foreach_norm(list(parts), 2, torch.float32)
        squares = torch.stack(torch._foreach_div(own, [math.sqrt(_copies(whole)) for whole in of])) ** 2
        dist.all_reduce(squares)
        return [norm.to(part.dtype) for norm, part in zip(squares.sqrt(), parts, strict=True)]

    @override
    def _gathered(self, value: Any) -> Any:
        return value.full_tensor().to("cpu", copy=True) if isinstance(value, DTensor) else super()._gathered(value)

    def _beside(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
        """Name, tensor and the module's own tensor of that name."""
        self.reshard()
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return [(name, tensor, own[name]) for name, tensor in tensors.items()]

    @staticmethod
    def _distributed(part: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return part
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(part, mesh, placements, shape=like.shape, stride=like.stride(), run_check=False)

    @staticmethod
    def _slice(whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return whole
        return distribute_tensor(
            whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        ).to_local()


def _copies(tensor: Tensor) -> int:
    """Ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    sizes = [tensor.device_mesh.size(n) for n, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return math.prod(sizes)
