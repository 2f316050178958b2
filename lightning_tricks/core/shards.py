"""Where a process holds the weights of a module: whole, or in shards of FSDP2 and DeepSpeed ZeRO.

A trick reads and writes the *local* tensors; nothing is gathered for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_tricks.core.weights import copy_, trainable

STAMP = "stamp"


class Whole:
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

    def portable(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
        """Key and tensor of each local part in a sharded checkpoint."""
        return {name: (name, part) for name, part in parts.items()}

    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors."""
        return dict(wholes)

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors of local parts; all ranks take part."""
        return dict(parts)

    def state(self) -> dict[str, Any]:
        """A copy of the module's ``state_dict()``, of whole tensors; all ranks take part."""
        return {name: _copied(value) for name, value in self.module.state_dict().items()}


class FSDP2(Whole):
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
    def portable(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
        return {name: (name, self._distributed(part, like)) for name, part, like in self._beside(parts)}

    @override
    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._slice(whole, like) for name, whole, like in self._beside(wholes)}

    @override
    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _gathered(tensor) for name, tensor in self.portable(parts).values()}

    @override
    def state(self) -> dict[str, Any]:
        self.settle()
        return {name: _gathered(value) for name, value in self.module.state_dict().items()}

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


class ZeRO(Whole):
    """Weights under DeepSpeed ZeRO-1 and 2: whole for the forward pass, their fp32 masters in fragments.

    The fragments are what DeepSpeed's own ``safe_get_full_fp32_param`` reads.
    """

    sharded = True

    def __init__(self, module: nn.Module, optimizer: Callable[[], Any]) -> None:
        super().__init__(module)
        self._optimizer = optimizer  # DeepSpeed's, which is made after the callbacks' setup

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        fragment = getattr(tensor, "_hp_mapping", None)  # None for a weight of which this rank updates nothing
        return None if fragment is None else fragment.hp_fragment

    @override
    def derived(self) -> list[Tensor]:
        return list(trainable(self.module).values())

    @override
    def publish(self) -> None:
        self._optimizer().update_lp_params()

    @override
    def portable(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
        return _by_rank(parts)


class ZeRO3(Whole):
    """Weights under DeepSpeed ZeRO-3: a flat shard for the forward pass, and its fp32 master."""

    sharded = True

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        optimizer = getattr(tensor, "_z3_optimizer", None)  # None for a weight that no optimizer updates
        # DeepSpeed's public safe_get_local_fp32_param hands out a copy where the masters are offloaded
        return optimizer and optimizer._get_fp32_opt_state_partition(tensor, release_swap_buffers=False)[0]

    @override
    def derived(self) -> list[Tensor]:
        return [parameter.ds_tensor.data for parameter in self._parameters()]

    @override
    def publish(self) -> None:
        masters = [self.local(parameter) for parameter in self._parameters()]
        copy_(self.derived(), [master for master in masters if master is not None])
        self.release()

    @override
    def release(self) -> None:
        for optimizer in {parameter._z3_optimizer for parameter in self._parameters()}:
            optimizer.empty_partition_cache()

    @override
    def portable(self, parts: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
        return _by_rank(parts)

    @override
    def state(self) -> dict[str, Any]:
        import deepspeed

        state, named = super().state(), dict(self.module.named_parameters(remove_duplicate=False))
        for name in state.keys() & named.keys():
            with deepspeed.zero.GatheredParameters([named[name]]):
                state[name] = named[name].detach().to("cpu", copy=True)
        return state

    def _parameters(self) -> list[Any]:
        return [p for p in trainable(self.module).values() if self.local(p) is not None]


def write(folder: Path, weights: Whole, kinds: Mapping[str, Mapping[str, Tensor]], *, stamp: int) -> None:
    """Write local parts by kind and name; all ranks take part, and the metadata that completes it comes last."""
    tensors = {f"{kind}/{key}": t for kind, parts in kinds.items() for key, t in weights.portable(parts).values()}
    dcp.save({**tensors, STAMP: torch.tensor(stamp)}, checkpoint_id=folder)


def read(folder: Path, weights: Whole, parts: Mapping[str, Tensor], *, stamp: int) -> dict[str, dict[str, Tensor]]:
    """Read the parts by kind and name that ``write`` wrote, for those of the given names that are there.

    DTensors can be read by another number of ranks than wrote them.

    Raises:
        ValueError: If the folder has another stamp than is expected, so that it belongs to something else.
    """
    found: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    keys = {name: key for name, (key, _) in weights.portable(parts).items()}
    kinds: dict[str, dict[str, Tensor]] = {"raw": {}, "averaged": {}}
    tensors = {STAMP: torch.tensor(-1)}
    for kind, mine in kinds.items():
        there = {name: found[f"{kind}/{keys[name]}"] for name in parts if f"{kind}/{keys[name]}" in found}
        mine.update({name: torch.empty_like(parts[name], dtype=m.properties.dtype) for name, m in there.items()})
        tensors.update({f"{kind}/{key}": tensor for key, tensor in weights.portable(mine).values()})
    dcp.load(tensors, checkpoint_id=folder)
    if tensors[STAMP].item() != stamp:
        raise ValueError(f"it is of step {tensors[STAMP].item()}, the checkpoint of step {stamp}")
    return kinds


def _by_rank(parts: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    """A flat fragment belongs to a rank; DeepSpeed itself resumes on as many ranks as saved."""
    return {name: (f"{name}@{dist.get_rank()}", part) for name, part in parts.items()}


def _gathered(value: Any) -> Any:
    return value.full_tensor().to("cpu", copy=True) if isinstance(value, DTensor) else _copied(value)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
