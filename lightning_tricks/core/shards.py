"""Where a process holds the weights of a module: whole, or in shards of FSDP2 (of DeepSpeed ZeRO: see zero.py).

A trick reads and writes the *local* tensors; nothing is gathered for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_tricks.core.plain import PlainReader, load_plain
from lightning_tricks.core.weights import global_norm, trainable

STAMP = "stamp"


class LocalWeights:
    """Weights as single-device and DDP modules hold them: whole, in the module itself."""

    sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def settle(self) -> None:
        """Bring the module into the state between two steps, in which ``local`` finds what it looks for."""

    def local(self, tensor: Tensor) -> Tensor | None:
        """The part of a parameter or buffer that this rank averages; None if it has none."""
        return tensor

    def trainable(self) -> dict[str, Tensor]:
        """The local parts of the parameters that train, by name."""
        self.settle()
        parts = {name: self.local(parameter) for name, parameter in trainable(self.module).items()}
        return {name: part for name, part in parts.items() if part is not None}

    def derived(self) -> list[Tensor]:
        """The tensors that ``publish`` writes."""
        return []

    def publish(self) -> None:
        """Let the forward pass see what was written to the local parts; all ranks take part."""

    def release(self) -> None:
        """Forget whole weights that were gathered from parts which have changed; no other rank is needed."""

    def portable(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local parts, in their order, by their keys in a sharded checkpoint."""
        return dict(parts)

    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors."""
        return dict(wholes)

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
        self.settle()
        return {name: self._gathered(value) for name, value in self.module.state_dict().items()}

    def _gathered(self, value: Any) -> Any:
        """A whole copy of an entry of a state dict."""
        return value.detach().clone() if isinstance(value, Tensor) else value


class FSDP2(LocalWeights):
    """Weights that ``fully_shard`` (or tensor parallelism) has made DTensors: each rank has its slice."""

    sharded = True

    @override
    def settle(self) -> None:
        """Validation leaves the root module's parameters gathered."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        with torch.no_grad():
            return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @override
    def portable(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._distributed(part, like) for name, part, like in self._beside(parts)}

    @override
    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._slice(whole, like) for name, whole, like in self._beside(wholes)}

    @override
    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._gathered(tensor) for name, tensor in self.portable(parts).items()}

    @override
    def gradients(self, loss: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        # torch.autograd.grad gives what is not summed over the ranks, and of whole tensors
        self.settle()
        kept = [(parameter, parameter.grad) for parameter in self.module.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            loss.backward()
            return [None if weight.grad is None else self.local(weight.grad) for weight in weights]
        finally:
            self.settle()
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
        self.settle()
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


def write(folder: Path, weights: LocalWeights, kinds: Mapping[str, Mapping[str, Tensor]], *, stamp: int) -> None:
    """Write local parts by kind and name; all ranks take part, and the metadata that completes it comes last."""
    tensors = {f"{kind}/{key}": t for kind, parts in kinds.items() for key, t in weights.portable(parts).items()}
    dcp.save({**tensors, STAMP: torch.tensor(stamp)}, checkpoint_id=folder)


def read(
    folder: Path, weights: LocalWeights, parts: Mapping[str, Tensor], *, stamp: int
) -> dict[str, dict[str, Tensor]]:
    """Read the parts by kind and name that ``write`` wrote, for those of the given names that are there.

    DTensors can be read by another number of ranks than wrote them.

    Raises:
        ValueError: If the folder has another stamp than is expected, so that it belongs to something else.
    """
    reader = PlainReader(folder)
    found: dict[str, Any] = reader.metadata.state_dict_metadata
    keys = dict(zip(parts, weights.portable(parts), strict=True))
    kinds: dict[str, dict[str, Tensor]] = {"raw": {}, "averaged": {}}
    tensors = {STAMP: torch.tensor(-1)}
    for kind, mine in kinds.items():
        there = {name: found[f"{kind}/{keys[name]}"] for name in parts if f"{kind}/{keys[name]}" in found}
        mine.update({name: torch.empty_like(parts[name], dtype=m.properties.dtype) for name, m in there.items()})
        tensors.update({f"{kind}/{key}": tensor for key, tensor in weights.portable(mine).items()})
    load_plain(tensors, reader)
    if tensors[STAMP].item() != stamp:
        raise ValueError(f"it is of step {tensors[STAMP].item()}, the checkpoint of step {stamp}")
    return kinds


def _copies(tensor: Tensor) -> int:
    """Ranks that hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    sizes = [tensor.device_mesh.size(n) for n, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return math.prod(sizes)
