"""What a tensor-parallel group must have in common; apart from the preset, since it looks at every step."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.linalg import vector_norm

from lightning_tricks.core.checks import some
from lightning_tricks.core.random_numbers import random_state, set_random_state
from lightning_tricks.core.weights.fsdp2 import is_split
from lightning_tricks.core.weights.tensors import local_part, trainable

# Relative differences: kernels that add in no fixed order make smaller ones, a part that is missing a larger one.
OF_LOSSES, OF_GRADIENTS = 1e-3, 1e-2


class Agreement:
    """Compares the processes of the tensor-parallel groups, whose weights would drift apart without a trace.

    All processes take part, and raise together.

    Args:
        mesh: The mesh (data_parallel, tensor_parallel) of all processes.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh["tensor_parallel"]
        self._unchecked: set[str] = set()  # Parameters that have not had a gradient in this fit.
        self._compares_loss = False

    def begin(self, module: nn.Module) -> None:
        """Compare the gradients of all parameters again."""
        self._unchecked = {name for name, parameter in module.named_parameters() if not is_split(parameter)}

    def share_random_numbers(self, device: torch.device) -> None:
        """Continue with the random numbers of the first process of the group, also in workers that start later."""
        state = [random_state(device)]
        dist.broadcast_object_list(state, group=self._mesh.get_group(), group_src=0)
        set_random_state(state[0], device)

    def require_same_batch(self, batch: Any) -> None:
        """Raise unless the batches of a group are the same.

        Raises:
            MisconfigurationException: If the batches of a group differ.
        """
        digest = hashlib.blake2b(digest_size=8)
        with torch._C.DisableTorchFunctionSubclass():  # A mixed target looks like its labels.
            apply_to_collection(batch, Tensor, lambda tensor: digest.update(_bytes(tensor)))
        if self._differ(digest.hexdigest()):
            raise MisconfigurationException(
                "tensor_parallel computes one batch on several processes, got different ones: a sampler or a dataset"
                " counts all processes, or draws random numbers that one of them has used up. Take rank and number of"
                " replicas from trainer.distributed_sampler_kwargs, or leave the sampler to the Trainer."
            )
        self._compares_loss = True

    @torch.no_grad()
    def require_same_step(self, loss: Tensor, module: nn.Module) -> None:
        """Raise unless a group has the same loss, in the first step of an epoch, and gradients of unsplit weights.

        Args:
            loss: The loss of the backward pass that has ended.
            module: The module; the gradients of a parameter are compared when it has them for the first time.

        Raises:
            MisconfigurationException: If a loss or a gradient differs within a group.
        """
        if not self._unchecked and not self._compares_loss:
            return
        named = {name: p for name, p in trainable(module).items() if name in self._unchecked and p.grad is not None}
        if not named and not self._compares_loss:
            return
        self._unchecked -= named.keys()
        local = {name: local_part(p.grad) for name, p in named.items() if p.grad is not None}
        noise = 1e-6 * max((float(vector_norm(gradient)) for gradient in local.values()), default=0.0)
        wrong = [name for name, gradient in local.items() if self._strays(gradient, OF_GRADIENTS, noise)]
        if self._compares_loss and self._strays(local_part(loss), OF_LOSSES):
            wrong = ["the loss"]
        self._compares_loss = False
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, wrong)
        if names := list(dict.fromkeys(name for others in found for name in others)):
            raise MisconfigurationException(
                f"plan leaves {some(names)} different on the processes of a tensor-parallel group, which must compute"
                " the same: a layer between split ones sees only a part of the features, heads or tokens. Give the norm"
                ' of single heads "replicated_with_grad_allreduce", the norm of a part of the tokens'
                ' "sequence_parallel", and a head whose outputs are not split any further "colwise_gather_output".'
            )

    def _strays(self, tensor: Tensor, tolerance: float, noise: float = 0.0) -> bool:
        """Whether a process has another tensor than the mean of its group; all of the group take part."""
        mean = tensor.float().clone()
        dist.all_reduce(mean, group=self._mesh.get_group())
        mean /= self._mesh.size()
        distance = float(vector_norm(tensor - mean))
        return distance > noise and distance > tolerance * float(vector_norm(mean))

    def _differ(self, mine: str) -> bool:
        """Whether processes of any group have another value than the first of it; all processes take part."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (dist.get_global_rank(self._mesh.get_group(), 0), mine))
        return len({*found}) > len({first for first, _ in found})


def _bytes(tensor: Tensor) -> bytes:
    tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg()
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return dense.contiguous().flatten().view(torch.uint8).numpy().tobytes()
