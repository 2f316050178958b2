"""How SAM perturbs weights: its settings, and the rules as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks.core.checks import check_bool, check_count, check_range, check_type
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.selection import check_patterns, select_parameters
from lightning_tricks.core.weights.tensors import global_norm

__all__ = ["SAM", "asam_perturb_", "sam_perturb_"]

Norm = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class SAM:
    """Settings of sharpness-aware minimization: minimise the loss at ``w + e`` instead of w, ``e = rho * g/||g||``.

    ``adaptive`` makes the radius relative to each weight (ASAM): ``e = rho * T**2 g / ||T g||`` with ``T = |w| + eta``
    for parameters whose name contains "weight" and ``T = 1`` for the others, as in the authors' code. (Codes with
    ``T = |w|`` for all parameters have another best ``rho``.) Good radii are about ten times those of SAM.

    Args:
        rho: Radius of the perturbation, at least 0; 0.05 is common for clean data, 0.1 to 0.5 under label noise.
        adaptive: Whether to perturb large weights more (ASAM).
        eta: The number that ASAM adds to ``|w|``, at least 0.
        every_n_steps: The number of optimizer steps of which one is perturbed, at least 1; ``rho`` is not scaled.
        micro_batch_size: The number of samples that are perturbed by their own gradient (m-sharpness); None for the
            full batch. It takes a third forward pass, and needs losses that are means over samples.
        parameters: The parameters that are perturbed: regular expressions searched in their names, or names of classes,
            for the parameters of their instances; one or a sequence. "norm" for those of all normalization layers
            (SAM-ON). None for all that the optimizer trains.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or an invalid regular expression.

    Example:
        >>> SAM(rho=0.1, adaptive=True).eta
        0.01

    References:
        SAM: Foret et al., arXiv 2010.01412. ASAM: Kwon et al., arXiv 2102.11600. m-sharpness: Andriushchenko and
        Flammarion, arXiv 2206.06232. SAM-ON: Mueller et al., arXiv 2306.04226.
    """

    rho: float = 0.05
    adaptive: bool = False
    eta: float = 0.01
    every_n_steps: int = 1
    micro_batch_size: int | None = None
    parameters: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_range("rho", self.rho, 0.0)
        check_bool("adaptive", self.adaptive)
        check_range("eta", self.eta, 0.0)
        check_count("every_n_steps", self.every_n_steps)
        check_count("micro_batch_size", self.micro_batch_size, optional=True)
        check_patterns("parameters", self.parameters, optional=True)
        if self.parameters is not None and not isinstance(self.parameters, str):
            object.__setattr__(self, "parameters", tuple(self.parameters))  # which is hashable

    def perturb_(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor], names: Sequence[str], norm: Norm = global_norm
    ) -> Tensor:
        """Move the weights of those names uphill in place, by the rule of these settings; returns the norm."""
        if not self.adaptive:
            return sam_perturb_(weights, gradients, self.rho, norm=norm)
        adapts = ["weight" in name for name in names]
        return asam_perturb_(weights, gradients, self.rho, eta=self.eta, adapts=adapts, norm=norm)


@torch.no_grad()
def sam_perturb_(
    weights: Sequence[Tensor], gradients: Sequence[Tensor], rho: float, *, norm: Norm = global_norm
) -> Tensor:
    """Move the weights uphill in place: ``w += rho * g / ||g||``, the norm taken over all gradients together.

    Args:
        weights: Tensors to move.
        gradients: Their gradients, any scale.
        rho: Length of the move.
        norm: The norm over all gradients.

    Returns:
        ``||g||``, a scalar tensor.

    Raises:
        TypeError: For a radius that is no number.
        ValueError: For one out of range.

    Example:
        >>> w = torch.zeros(2)
        >>> sam_perturb_([w], [torch.tensor([3.0, 4.0])], rho=0.5), w
        (tensor(5.), tensor([0.3000, 0.4000]))
    """
    check_range("rho", rho, 0.0)
    length = norm(gradients)
    _move_(weights, gradients, rho, length)
    return length


def _move_(weights: Sequence[Tensor], directions: Sequence[Tensor], rho: float, length: Tensor) -> None:
    """``w += rho * direction / length``."""
    if directions:
        scale = rho / (length + 1e-12)  # a zero gradient moves nothing
        scales = {dtype: scale.to(directions[0].device, dtype) for dtype in {weight.dtype for weight in weights}}
        # not mul and add, which would take memory for all moves; not alpha=, for which a GPU would have to wait
        torch._foreach_addcmul_(list(weights), list(directions), [scales[weight.dtype] for weight in weights])


@torch.no_grad()
def asam_perturb_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rho: float,
    *,
    eta: float,
    adapts: Sequence[bool],
    norm: Norm = global_norm,
) -> Tensor:
    """Move the weights uphill in place: ``w += rho * T**2 g / ||T g||`` with ``T = |w| + eta``, or 1.

    Args:
        weights: Tensors to move.
        gradients: Their gradients, any scale.
        rho: Length of the move in units of T.
        eta: The number that is added to ``|w|``.
        adapts: One flag per weight: True for ``T = |w| + eta``, False for ``T = 1``.
        norm: The norm over all ``T g``.

    Returns:
        ``||T g||``, a scalar tensor.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or another number of flags.

    Example:
        >>> w = torch.tensor([2.0, 0.0])
        >>> asam_perturb_([w], [torch.tensor([1.0, 1.0])], 1.0, eta=0.0, adapts=[True]), w
        (tensor(2.), tensor([4., 0.]))
    """
    check_range("rho", rho, 0.0)
    check_range("eta", eta, 0.0)
    check_type("adapts", adapts, list, tuple)
    for flag in adapts:
        check_bool("adapts", flag)
    if len(adapts) != len(weights):
        raise ValueError(f"adapts must have a flag for each of {len(weights)} weights, got {len(adapts)}.")
    if not gradients:
        return norm(gradients)
    own = list(compress(weights, adapts))
    if not own:
        return sam_perturb_(weights, gradients, rho, norm=norm)
    sizes = torch._foreach_abs(own)
    torch._foreach_add_(sizes, eta)
    scaled = torch._foreach_mul(list(compress(gradients, adapts)), sizes)
    own_scaled = iter(scaled)
    directions = [next(own_scaled) if adapt else g for g, adapt in zip(gradients, adapts, strict=True)]
    length = norm(directions)
    torch._foreach_mul_(scaled, sizes)
    _move_(weights, directions, rho, length)
    return length


def perturbed_weights(module: nn.Module, sam: SAM, optimizers: Sequence[Any]) -> dict[Tensor, str]:
    """The weights that are perturbed with their names, which are looked up only where settings need them."""
    trained = [weight for optimizer in optimizers for weight in weights_of(optimizer) if weight.requires_grad]
    if not sam.adaptive and sam.parameters is None:
        return dict.fromkeys(trained, "")
    names = {weight: name for name, weight in module.named_parameters()}
    wanted = set(names.values()) if sam.parameters is None else selected_names(module, sam.parameters)
    return {weight: names[weight] for weight in trained if names.get(weight) in wanted}


def selected_names(module: nn.Module, parameters: str | Sequence[str]) -> set[str]:
    """The names of the parameters that ``SAM(parameters=...)`` selects.

    Raises:
        ValueError: If a pattern selects nothing.

    Example:
        >>> sorted(selected_names(nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)), "norm"))
        ['1.bias', '1.weight']
    """
    if parameters == "norm":
        norms = [path for path, layer in module.named_modules() if path and "Norm" in type(layer).__name__]
        if found := {name for name, _ in module.named_parameters() if name.rpartition(".")[0] in norms}:
            return found
    return set(select_parameters(module, parameters))


torch.serialization.add_safe_globals([SAM])  # a checkpoint with a SAM among its hyperparameters loads weights_only
