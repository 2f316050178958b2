"""Adaptive gradient clipping (AGC) by the norms of units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_range
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.selection import check_patterns, select_parameters
from lightning_tricks.core.weights.gradients import GradientCallback
from lightning_tricks.core.weights.local import LocalWeights

__all__ = ["AdaptiveClip", "adaptive_clip_"]

Norms = Callable[[list[Tensor]], list[Tensor]]


@torch.no_grad()
def adaptive_clip_(parameters: Tensor | Iterable[Tensor], clip_factor: float = 0.01, *, eps: float = 1e-3) -> None:
    """Adaptive gradient clipping in place: the gradient of a unit is limited relative to the unit's weights.

    ``g_i <- g_i * m_i / ||g_i||`` where ``||g_i|| >= m_i = clip_factor * max(||w_i||, eps)``. A unit i is a row along
    the first dimension of a weight, or all of a vector (bias, gain) or scalar. Bit-equal to
    ``timm.utils.adaptive_clip_grad``, with fewer operations.

    Args:
        parameters: One or several parameters; those without a gradient are ignored.
        clip_factor: The largest ratio of a gradient's norm to that of its weights, at least 0.
        eps: The lower limit for the norm of weights, at least 0, without which units at zero could not move.

    Example:
        >>> weight = nn.Parameter(torch.ones(2, 4))
        >>> weight.grad = torch.tensor([[1.0, 0, 0, 0], [0.01, 0, 0, 0]])
        >>> adaptive_clip_([weight], 0.1)
        >>> [round(float(norm), 4) for norm in weight.grad.norm(dim=1)]
        [0.2, 0.01]

    References:
        Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, arXiv 2102.06171.
    """
    check_range("clip_factor", clip_factor, 0.0, 1e30)
    check_range("eps", eps, 0.0, 1e30)
    every = [parameters] if isinstance(parameters, Tensor) else parameters
    pairs = [(parameter.detach(), parameter.grad.detach()) for parameter in every if parameter.grad is not None]
    weights, gradients = [weight for weight, _ in pairs], [gradient for _, gradient in pairs]
    _clip(weights, gradients, clip_factor, eps, lambda vectors: [*torch._foreach_norm(vectors)])


def _clip(weights: list[Tensor], gradients: list[Tensor], clip_factor: float, eps: float, norms: Norms) -> None:
    """Clip local gradients; a rank holds complete rows, but parts of vectors, whose full norms ``norms`` computes."""
    both = [*weights, *gradients]
    vectors = [tensor for tensor in both if tensor.ndim <= 1]
    of_vectors = iter(norms(vectors) if vectors else [])
    units = [next(of_vectors) if tensor.ndim <= 1 else _norms_of_rows(tensor) for tensor in both]
    places: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        places.setdefault((gradient.device, weight.dtype, gradient.dtype), []).append(place)
    for alike in places.values():  # one tensor for all units, which are many and small
        limit = torch.hstack([units[place] for place in alike]).clamp_(min=eps).mul_(clip_factor)
        norm = torch.hstack([units[len(weights) + place] for place in alike])
        scale = (limit / norm.clamp(min=1e-6)).masked_fill_(norm < limit, 1.0)
        clipped = [gradients[place] for place in alike]
        factors = scale.split_with_sizes([len(each) if each.ndim > 1 else 1 for each in clipped])
        torch._foreach_mul_(clipped, [_for_rows(part, each) for part, each in zip(factors, clipped, strict=True)])


def _norms_of_rows(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)))


def _for_rows(factors: Tensor, tensor: Tensor) -> Tensor:
    return factors if tensor.ndim == 1 else factors.view([-1, *[1] * (tensor.ndim - 1)] if tensor.ndim else [])


@final
class AdaptiveClip(GradientCallback):
    """Adaptive gradient clipping (AGC): a unit's gradient is at most ``clip_factor`` times as large as its weights.

    ``g_i <- g_i * m_i / ||g_i||`` where ``||g_i|| >= m_i = clip_factor * max(||w_i||, eps)``, once per optimizer
    step, on accumulated and unscaled gradients. A unit i is a row along the first dimension of a weight, or all of a
    vector or scalar. Under FSDP2 a rank clips its own rows; only the norms of vectors are summed over the ranks. The
    Trainer's ``gradient_clip_val`` clips afterwards.

    Args:
        clip_factor: The largest ratio of a gradient's norm to that of its weights, at least 0. The paper has 0.01 for
            batches of 4096, and larger values for smaller batches.
        eps: The lower limit for the norm of weights, at least 0.
        parameters: The parameters to clip: regular expressions searched in their names, or names of classes, for the
            parameters of their instances; one or a sequence. None for all.
        exclude: The parameters to leave out, in the same form. The paper leaves out the last linear layer, for example
            ``"^model.head"``.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, under a strategy that owns the gradients (DeepSpeed, FSDP1); when training
            starts, if a pattern selects nothing; in the first step, for a fused optimizer under fp16 and for weights
            that are sharded along another dimension than the first.

    Example:
        >>> trainer = L.Trainer(callbacks=[AdaptiveClip(0.02)], accelerator="cpu", logger=False)

    References:
        Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, arXiv 2102.06171.
    """

    conflicts = (
        Conflict(
            ("tensor_parallel",),
            "a unit is a row of a weight, of which a process may have a part",
            "Take AutoClip or gradient_clip_val, or fsdp2_bf16",
        ),
    )

    def __init__(
        self,
        clip_factor: float = 0.01,
        *,
        eps: float = 1e-3,
        parameters: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> None:
        check_range("clip_factor", clip_factor, 0.0, 1e30)
        check_range("eps", eps, 0.0, 1e30)
        for argument, patterns in (("parameters", parameters), ("exclude", exclude)):
            check_patterns(argument, patterns, optional=True)
        super().__init__()
        self.clip_factor = clip_factor
        self.eps = eps
        self.parameters = parameters
        self.exclude = exclude
        self._clipped: set[int] = set()  # ids of parameters

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self._weights is not None, "set in setup"
        self._weights.reshard()
        try:
            clipped = select_parameters(pl_module, "" if self.parameters is None else self.parameters)
            left_out = {} if self.exclude is None else select_parameters(pl_module, self.exclude, "exclude")
        except ValueError as error:
            raise MisconfigurationException(f"AdaptiveClip: {error}") from None
        self._clipped = {id(parameter) for name, parameter in clipped.items() if name not in left_out}

    @override
    def _change(
        self, trainer: L.Trainer, optimizer: Optimizer, parameters: list[nn.Parameter], weights: LocalWeights
    ) -> None:
        clipped = [parameter for parameter in parameters if id(parameter) in self._clipped]
        for parameter in clipped:
            _require_complete_rows(parameter)
        complete = [parameter.grad for parameter in clipped if parameter.grad is not None]
        vectors = [tensor for tensor in (*clipped, *complete) if tensor.ndim <= 1]
        with torch.no_grad():
            ours, gradients = weights.parts(clipped), weights.parts(complete)
            _clip(ours, gradients, self.clip_factor, self.eps, lambda parts: weights.norms(parts, of=vectors))


def _require_complete_rows(parameter: Tensor) -> None:
    if not isinstance(parameter, DTensor) or parameter.ndim <= 1:
        return
    if not all(placement.is_replicate() or placement.is_shard(0) for placement in parameter.placements):
        raise MisconfigurationException(
            "AdaptiveClip needs complete rows on every rank, of weights that are sharded along their first dimension,"
            f" got placements {parameter.placements}: shard with Shard(0), as fully_shard does by default."
        )
