"""Sharpness of a minimum: the curvature of the loss at a model's weights, and its rise nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.figures import Axes, Figure, figure_and_axes
from lightning_tricks.core.lightning.loaders import generators_of
from lightning_tricks.core.replay.graph import find_graph_node
from lightning_tricks.core.replay.own_batch import tensors_in
from lightning_tricks.core.replay.rerun import Start, undone
from lightning_tricks.core.weights.tensors import copy_, hidden_from_autograd, trainable

__all__ = ["Sharpness", "sharpness"]

_Model = TypeVar("_Model", bound=nn.Module)


@dataclass(frozen=True)
class Sharpness:
    """The result of ``sharpness``, with w, g and H as in its docstring.

    Args:
        loss: Mean loss at w.
        eigenvalue: Largest eigenvalue of H, approached from below.
        eigenvalue_error: ``||Hv - eigenvalue * v||``, a bound for the distance to an eigenvalue of H.
        rise: Mean loss at ``w + radius * g/||g||`` minus that at w.
        distances: Distances along ``g/||g||``, from ``-radius`` to ``radius``; the middle one is 0.
        losses: Mean losses at the distances.

    Example:
        >>> Sharpness(1.0, 4.0, 0.0, 0.5, distances=(-0.1, 0.0, 0.1), losses=(0.6, 1.0, 1.5)).rise
        0.5
    """

    loss: float
    eigenvalue: float
    eigenvalue_error: float
    rise: float
    distances: tuple[float, ...]
    losses: tuple[float, ...]

    def plot(self, ax: Axes | None = None) -> tuple[Figure, Axes]:
        """Draw the loss along the gradient, into the given axes or a new figure.

        Raises:
            ImportError: If matplotlib is missing.
        """
        figure, ax = figure_and_axes(ax)
        ax.plot(self.distances, self.losses, marker=".", label=f"largest eigenvalue {self.eigenvalue:.3g}")
        ax.set(xlabel="distance along the gradient", ylabel="loss")
        ax.legend()
        return figure, ax


def sharpness(
    model: _Model,
    loader: Iterable[Any],
    loss: Callable[[_Model, Any], Tensor],
    *,
    iterations: int = 20,
    radius: float = 0.05,
    points: int = 11,
    seed: int = 0,
) -> Sharpness:
    """Measure the sharpness of a minimum: ``max v'Hv / v'v`` and ``L(w + radius * g/||g||) - L(w)``.

    L is the mean loss over all samples, w are the trainable parameters, and g and H are gradient and Hessian of L at w.
    Lanczos's method finds the largest eigenvalue, also if a negative one has a larger magnitude. The model is measured
    in its present mode, which should usually be eval mode. Every pass over the loader starts from the same random
    numbers and module state; these, weights and gradients are restored. Compare only models of one architecture:
    rescaling layers changes the sharpness, but not the function.

    Args:
        model: Any module, such as a LightningModule, with fp32 or fp64 weights that are not sharded.
        loader: A loader with the same batches in every pass. The first tensor of a batch has the samples in its first
            dimension.
        loss: Function of model and batch that returns the mean loss; it must also move the batch to the device.
        iterations: Largest number of products Hv, which take a pass; fewer if the error falls below 1e-5 of the
            largest magnitude.
        radius: Length of the move along the gradient, above 0, like SAM's rho.
        points: Number of losses along the gradient, which take a pass; odd, at least 3, so that one is at w.
        seed: Seed of the random vector from which Lanczos's method starts, at least 0.

    Raises:
        TypeError: For a loader that can be read only once, 16-bit or sharded weights.
        ValueError: For no trainable parameters, no batches, batches without tensors, numbers out of range, and a loss
            that is not a finite scalar, has no gradient or differs between passes.
        RuntimeError: For operations without a second derivative, reentrant checkpoints, sparse gradients.

    Example:
        >>> batches = [(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1))]
        >>> mse = lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])
        >>> round(sharpness(nn.Linear(2, 1, bias=False), batches, mse).eigenvalue, 4)
        4.0

    References:
        Lanczos, J. Res. Natl. Bur. Stand. 45 (1950); Keskar et al., arXiv 1609.04836; Foret et al., arXiv 2010.01412.
    """
    weights = _check(model, loader, iterations, radius, points, seed)
    generator, half = torch.Generator().manual_seed(seed), points // 2
    distances = tuple(radius * (step / half) for step in range(-half, half + 1))
    with torch.inference_mode(False), torch.enable_grad(), _unchanged(model):
        mean = partial(_mean, model, loader, partial(loss, model))
        here, gradient = mean(partial(_gradient, weights=weights))
        norm, center, losses = torch.linalg.vector_norm(gradient), _flat(weights).detach(), []
        for distance in distances:
            _write(weights, center + (distance / norm if norm > 0 else 0) * gradient)
            losses.append(mean(torch.zeros_like)[0] if distance else here)
        _write(weights, center)

        def product(vector: Tensor) -> Tensor:
            again, result = mean(partial(_product, weights=weights, vector=vector))
            if not math.isclose(again, here, rel_tol=1e-2, abs_tol=1e-6):
                raise ValueError(f"loss must be the same in each pass over loader, got {here:.6g}, then {again:.6g}.")
            return result

        start = torch.randn(len(center), generator=generator, dtype=center.dtype).to(center.device)
        eigenvalue, error = _largest_eigenvalue(product, start, iterations)
    return Sharpness(here, eigenvalue, error, losses[-1] - here, distances, tuple(losses))


def _check(
    model: nn.Module, loader: Iterable[Any], iterations: int, radius: float, points: int, seed: int
) -> list[Tensor]:
    """Check the arguments, and return the trainable weights."""
    check_count("iterations", iterations)
    check_range("radius", radius, 1e-12)
    check_count("points", points)
    check_count("seed", seed, least=0)
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points must be odd and at least 3, got {points!r}: the middle one is at the weights.")
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise TypeError(f"loader is read many times, got {type(loader).__name__}: pass a DataLoader or a list.")
    weights = trainable(model)
    if not weights:
        raise ValueError(
            f"model must have trainable parameters, got {type(model).__name__} without any: unfreeze some."
        )
    for name, weight in weights.items():
        if isinstance(weight, DTensor) or weight.dtype not in (torch.float32, torch.float64):
            kind = "in shards" if isinstance(weight, DTensor) else f"in {weight.dtype}"
            raise TypeError(f"model must have unsharded weights in fp32 or fp64, got {name} {kind}: convert it.")
    return list(weights.values())


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    parameters = list(model.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    with hidden_from_autograd(parameters):  # graphs may wait for their backward pass
        try:
            yield
        finally:
            copy_(parameters, kept)


def _mean(
    model: nn.Module, loader: Iterable[Any], loss: Callable[[Any], Tensor], part: Callable[[Tensor], Tensor]
) -> tuple[float, Tensor]:
    """The means over all samples of the loss, and of ``part(loss)``; the state of the model is restored."""
    start = Start.here(model, deep=True)
    total, parts, samples = 0.0, torch.zeros((), device=start.device), 0
    generators = [(generator, generator.get_state()) for generator in generators_of(loader)]
    torch.clear_autocast_cache()  # it may hold casts that a caller made without gradients
    try:
        with undone(start):
            for batch in loader:
                sizes = [len(tensor) for tensor in tensors_in(batch)[:1] if tensor.dim()]
                if not sizes:
                    raise ValueError(f"A batch must begin with a tensor of samples, got {batch!r:.80}.")
                value = loss(batch)
                if not isinstance(value, Tensor) or value.dim() or not value.isfinite():
                    raise ValueError(f"loss must be a finite scalar tensor, the mean of a batch, got {value!r:.80}.")
                parts = sizes[0] * part(value) + parts.to(value.device)
                total += sizes[0] * value.item()
                samples += sizes[0]
    finally:
        for generator, before in generators:
            generator.set_state(before)
        torch.clear_autocast_cache()  # it holds casts of weights that will change
    if not samples:
        raise ValueError("loader must yield batches in every pass over it, got none: pass a DataLoader or a list.")
    return total / samples, parts / samples


def _gradient(loss: Tensor, weights: list[Tensor], create_graph: bool = False) -> Tensor:
    if find_graph_node(loss, "CheckpointFunctionBackward".__eq__):
        raise RuntimeError("sharpness sees no gradient in a reentrant checkpoint: pass use_reentrant=False.")
    inputs = weights if loss.requires_grad else []
    gradients = torch.autograd.grad(loss, inputs, create_graph=create_graph, allow_unused=True) if inputs else ()
    if all(gradient is None for gradient in gradients):
        raise ValueError("loss must depend on the parameters of model, got one without their gradient: avoid detach().")
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        raise RuntimeError("sharpness works on dense gradients, got sparse ones: pass sparse=False.")
    return _flat(torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True))


def _product(loss: Tensor, weights: list[Tensor], vector: Tensor) -> Tensor:
    """The Hessian of the loss times a vector: the gradient of ``g @ vector``."""
    along = _gradient(loss, weights, create_graph=True) @ vector
    if not along.requires_grad:  # the loss is linear
        return torch.zeros_like(vector)
    try:
        return _flat(torch.autograd.grad(along, weights, materialize_grads=True))
    except RuntimeError as error:
        raise RuntimeError(
            f"sharpness takes the second derivative of loss, which failed: {error}\nIf an operation has none: attention"
            " has one inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH), RNNs without cuDNN, modules not compiled."
        ) from error


def _largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int) -> tuple[float, float]:
    """The largest eigenvalue by Lanczos's method, and the norm of its residual."""
    # Only two vectors are kept. Rounding errors may then repeat an eigenvalue, but add no wrong ones.
    before, vector, beta = torch.zeros_like(start), start / torch.linalg.vector_norm(start), 0.0
    # H in the basis of the vectors; so small a matrix is solved faster by the host.
    matrix = torch.zeros(iterations + 1, iterations + 1, dtype=torch.float64, device="cpu")
    for k in range(iterations):
        following = product(vector) - beta * before
        matrix[k, k] = following @ vector
        following -= matrix[k, k].item() * vector
        beta = torch.linalg.vector_norm(following).item()
        if not math.isfinite(beta):
            raise ValueError(f"The second derivative of loss must be finite, got {beta}: smooth its root or norm at 0.")
        values, vectors = torch.linalg.eigh(matrix[: k + 1, : k + 1])
        error = beta * abs(vectors[-1, -1].item())
        if error <= 1e-5 * values.abs().max():
            break
        matrix[k, k + 1] = matrix[k + 1, k] = beta
        before, vector = vector, following / beta
    return values[-1].item(), error


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _write(weights: list[Tensor], flat: Tensor) -> None:
    parts = flat.split([weight.numel() for weight in weights])
    copy_(weights, [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)])
