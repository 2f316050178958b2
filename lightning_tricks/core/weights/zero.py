"""The weights of a module under DeepSpeed ZeRO: shards of fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import copy_, trainable


class ZeRO(LocalWeights):
    """Weights under DeepSpeed ZeRO-1 and 2: full for the forward pass, their fp32 master weights in fragments.

    DeepSpeed's own ``safe_get_full_fp32_param`` reads the same fragments.
    """

    sharded = True

    def __init__(self, module: nn.Module, optimizer: Callable[[], Any]) -> None:
        super().__init__(module)
        self._optimizer = optimizer  # a function, since DeepSpeed's optimizer is made after the callbacks' setup

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        fragment = getattr(tensor, "_hp_mapping", None)  # None if this rank updates no part of the weight
        return None if fragment is None else fragment.hp_fragment

    @override
    def model_copies(self) -> list[Tensor]:
        return list(trainable(self.module).values())

    @override
    def update_model(self) -> None:
        self._optimizer().update_lp_params()

    @override
    def checkpoint_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _by_rank(parts)


class ZeRO3(LocalWeights):
    """Weights under DeepSpeed ZeRO-3: a flat shard for the forward pass, and its fp32 master weights."""

    sharded = True

    @override
    def local(self, tensor: Tensor) -> Tensor | None:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        optimizer = getattr(tensor, "_z3_optimizer", None)  # None if no optimizer updates the weight
        # DeepSpeed's public safe_get_local_fp32_param returns a copy where the master weights are offloaded.
        return optimizer and optimizer._get_fp32_opt_state_partition(tensor, release_swap_buffers=False)[0]

    @override
    def model_copies(self) -> list[Tensor]:
        return [parameter.ds_tensor.data for parameter in self._parameters()]

    @override
    def update_model(self) -> None:
        masters = [self.local(parameter) for parameter in self._parameters()]
        copy_(self.model_copies(), [master for master in masters if master is not None])
        self.release()

    @override
    def release(self) -> None:
        # A weight that stays gathered after its use, as small ones do, would keep the values of before.
        for optimizer in {parameter._z3_optimizer for parameter in self._parameters()}:
            optimizer.empty_partition_cache()

    @override
    def checkpoint_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _by_rank(parts)

    @override
    def state(self) -> dict[str, Any]:
        import deepspeed

        state, named = super().state(), dict(self.module.named_parameters(remove_duplicate=False))
        for name in [name for name in state if name in named]:  # in the same order on all ranks; a set has no order
            with deepspeed.zero.GatheredParameters([named[name]]):
                state[name] = named[name].detach().to("cpu", copy=True)
        return state

    def _parameters(self) -> list[Any]:
        return [p for p in trainable(self.module).values() if self.local(p) is not None]


def load_full_weights(module: nn.Module, state: Mapping[str, Tensor], *, strict: bool, masters: bool) -> None:
    """Load full weights into a module under DeepSpeed.

    Args:
        module: The module.
        state: Full tensors by name.
        strict: Whether to raise if names are missing or unexpected.
        masters: Whether to write the fp32 master weights as well, which a module with an optimizer has.

    Raises:
        RuntimeError: If ``strict`` and the names differ.
    """
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    rest = {name: value for name, value in state.items() if name not in named}
    missing, unexpected = module.load_state_dict(rest, strict=False)
    if strict and (absent := [name for name in missing if name not in state]) + unexpected:
        raise RuntimeError(f"The checkpoint's weights do not fit: missing {absent}, unexpected {unexpected}.")
    for name in [name for name in named if name in state]:  # in the same order on all ranks
        weight = named[name]
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight.copy_(state[name])
        if masters and (hasattr(weight, "_z3_optimizer") or hasattr(weight, "_hp_mapping")):  # it has master weights
            safe_set_full_fp32_param(weight, state[name].float().to(weight.device))


def _by_rank(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts by keys with the rank: a flat fragment belongs to one, and DeepSpeed resumes on as many ranks."""
    return {f"{name}@{dist.get_rank()}": part for name, part in parts.items()}
