"""The weights of a module under FSDP2: a rank holds a shard of every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import global_norm, gradients_kept


class FSDP2(LocalWeights):
    """Weights that ``fully_shard`` or tensor parallelism has made DTensors: a rank holds its shard."""

    sharded = True

    @override
    def reshard(self) -> None:
        """Shard all parameters again; validation leaves those of the root module gathered."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        with torch.no_grad():
            return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @override
    def checkpoint_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._distributed(part, like) for name, part, like in self._with_own_tensors(parts)}

    @override
    def shard(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._shard_like(full, like) for name, full, like in self._with_own_tensors(full)}

    @override
    def unshard(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._gather_entry(tensor) for name, tensor in self.checkpoint_tensors(parts).items()}

    @override
    def gradients(self, loss: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        # torch.autograd.grad would give gradients of full tensors that are not summed over the ranks.
        self.reshard()
        with gradients_kept(self.module.parameters()):
            try:
                loss.backward()
                return [None if weight.grad is None else self.local(weight.grad) for weight in weights]
            finally:
                self.reshard()

    @override
    def copies(self, names: Sequence[str]) -> list[int]:
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return [_copies(own[name]) for name in names]

    @override
    def norm(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=of[0].device)
        for part, full in zip(parts, of, strict=True):
            # The sum over all ranks counts a part as often as it is held, by replicas or by whole weights.
            total += global_norm([part]) ** 2 / _copies(full)
        dist.all_reduce(total)
        return total.sqrt()

    @override
    def norms(self, parts: Sequence[Tensor], *, of: Sequence[Tensor]) -> list[Tensor]:
        if not of:
            return []  # the list is empty on all ranks
        own = torch._foreach_norm(list(parts), 2, torch.float32)
        squares = torch.stack(torch._foreach_div(own, [math.sqrt(_copies(full)) for full in of])) ** 2
        dist.all_reduce(squares)
        return [norm.to(part.dtype) for norm, part in zip(squares.sqrt(), parts, strict=True)]

    @override
    def _gather_entry(self, value: Any) -> Any:
        return value.full_tensor().to("cpu", copy=True) if isinstance(value, DTensor) else super()._gather_entry(value)

    def _with_own_tensors(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
        """Names and tensors, with the module's own tensors of these names."""
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
    def _shard_like(full: Tensor, like: Tensor) -> Tensor:
        return local_part(full, like).to(like.device, copy=True) if isinstance(like, DTensor) else full


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part, a view, of a full tensor that is sharded like another one."""
    (part,) = like.__create_chunk_list__()
    return full[tuple(slice(begin, begin + size) for begin, size in zip(part.offsets, part.sizes, strict=True))]


def is_split(tensor: Tensor) -> bool:
    """Whether tensor parallelism has split a tensor, so that processes with the same samples have parts of it."""
    if not isinstance(tensor, DTensor) or "tensor_parallel" not in (tensor.device_mesh.mesh_dim_names or ()):
        return False
    return not tensor.placements[-1].is_replicate()


def _copies(tensor: Tensor) -> int:
    """The number of ranks that hold the same part of a tensor."""
    parts = 1
    if isinstance(tensor, DTensor):
        sharded = (n for n, placement in enumerate(tensor.placements) if not placement.is_replicate())
        parts = math.prod(tensor.device_mesh.size(n) for n in sharded)
    return dist.get_world_size() // parts
