"""Statistics of the layers of a network in some steps, by hooks; apart from the report, which only reads them."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks.core.device import fetched
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.weights.tensors import full_tensor, local_part

_WITH_UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # a row of the weight is a unit


@dataclass(frozen=True)
class LayerStatistics:
    """The statistics of a layer, a module with parameters of its own that train; None for what it does not have.

    Args:
        name: Name of the module.
        gradient: Euclidean norm of the gradient before clipping, the median over the steps.
        update: Ratio of update to weights, ``||w' - w|| / max(||w||, ||w'||)``, the median over the steps.
        dead: Fraction of units (rows of the weight of a linear layer or a convolution) whose gradient was exactly 0 in
            every step, so that they did not train: after a ReLU, units that never fired.
        activation: Root mean square of the outputs in the training steps, on this rank.
    """

    name: str
    gradient: float | None
    update: float | None
    dead: float | None
    activation: float | None


class Look:
    """Hooks that are there while somebody looks: statistics of layers, added up on the device.

    Args:
        module: The module that trains.
        optimizers: Its optimizers.
        first: Optimizer steps so far.
    """

    def __init__(self, module: nn.Module, optimizers: list[Optimizer], first: int) -> None:
        self.first = first
        self._layers = {
            name or type(module).__name__: layer
            for name, layer in module.named_modules()
            if any(weight.requires_grad for weight in layer.parameters(recurse=False))
        }
        self._norms: dict[nn.Parameter, list[Tensor]] = {}  # of gradient, update, weights before and after
        self._alive: dict[nn.Parameter, Tensor] = {}  # units with a gradient in any step
        self._squares: dict[nn.Module, list[Tensor]] = {}  # means over the outputs
        # Weights, norm of the gradient and units with a gradient, before the step.
        self._before: dict[nn.Parameter, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._hooks = ExitStack()
        for layer in self._layers.values():
            if isinstance(layer, torch.jit.ScriptModule):
                continue  # which takes no hooks
            self._hooks.callback(layer.register_forward_hook(self._output).remove)
        for optimizer in optimizers:
            self._hooks.callback(optimizer.register_step_post_hook(self._stepped).remove)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self._before.clear()

    @torch.no_grad()
    def gradients(self, parameters: list[nn.Parameter]) -> None:
        """Keep what an optimizer is about to step with; a GradScaler may still leave out the step."""
        for weight in parameters:
            assert weight.grad is not None, "an optimizer is about to step with it"
            gradient = full_tensor(weight.grad)
            alive = gradient.flatten(1).ne(0).any(1) if gradient.ndim > 1 else None
            self._before[weight] = weight.detach().clone(), _norm(gradient), alive

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        for weight in weights_of(optimizer):
            if weight not in self._before:
                continue
            before, gradient, alive = self._before.pop(weight)
            after = weight.detach()
            norms = [gradient, *(_norm(full_tensor(tensor)) for tensor in (after - before, before, after))]
            self._norms.setdefault(weight, []).append(torch.stack(norms))
            if alive is not None:
                self._alive[weight] = self._alive[weight] | alive if weight in self._alive else alive

    @torch.no_grad()
    def _output(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if layer.training and isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            local = local_part(output)
            self._squares.setdefault(layer, []).append(_norm(local) ** 2 / local.numel())

    def layers(self) -> tuple[LayerStatistics, ...]:
        """The statistics of the steps so far, without layers that stopped training before the first of them."""
        norms, alive, squares = self._numbers()

        def of(name: str, layer: nn.Module) -> LayerStatistics:
            own = list(layer.parameters(recurse=False))
            per_weight = [norms[weight] for weight in own if weight in norms]
            steps = [[math.hypot(*kind) for kind in zip(*step, strict=True)] for step in zip(*per_weight, strict=False)]
            share = alive.get(own[0]) if isinstance(layer, _WITH_UNITS) else None
            return LayerStatistics(
                name,
                gradient=_median([gradient for gradient, *_ in steps]),
                update=_median([update / max(sizes) if any(sizes) else 0.0 for _, update, *sizes in steps]),
                dead=None if share is None else 1 - share,
                activation=math.sqrt(squares[layer]) if layer in squares else None,
            )

        return tuple(
            of(name, layer)
            for name, layer in self._layers.items()
            if any(weight.requires_grad or weight in norms for weight in layer.parameters(recurse=False))
        )

    def _numbers(self) -> tuple[dict[nn.Parameter, Any], dict[nn.Parameter, float], dict[nn.Module, float]]:
        """Norms of the steps, shares of units and mean squares, which come from the device together."""
        norms = [torch.stack(steps) for steps in self._norms.values()]
        shares = [units.float().mean() for units in self._alive.values()]
        means = [torch.stack(squares).mean() for squares in self._squares.values()]
        numbers: list[Any] = [part.tolist() for part in fetched([*norms, *shares, *means])]
        first, second = len(norms), len(norms) + len(shares)
        return (
            dict(zip(self._norms, numbers[:first], strict=True)),
            dict(zip(self._alive, numbers[first:second], strict=True)),
            dict(zip(self._squares, numbers[second:], strict=True)),
        )


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.promote_types(tensor.dtype, torch.float32))


def _median(values: list[float]) -> float | None:
    if any(not math.isfinite(value) for value in values):
        return math.nan
    return median(values) if values else None
