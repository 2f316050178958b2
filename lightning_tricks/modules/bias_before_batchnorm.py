"""Removal of biases in front of a BatchNorm, which subtracts them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, fx, nn

from lightning_tricks.core.replay.rerun import Start, modes_kept, undone

__all__ = ["drop_bias_before_batchnorm"]

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Pair(NamedTuple):
    """A layer with a bias, and the BatchNorm that alone uses its output, in the forward pass of ``owner``."""

    name: str
    layer: Any
    norm: Any
    owner: nn.Module


@torch.no_grad()
def drop_bias_before_batchnorm(model: nn.Module, *example: Any) -> list[str]:
    """Remove the biases of layers before a BatchNorm, which subtracts them again: fewer weights, same function.

    ``((x + b) - mean) / std = (x - (mean - b)) / std``: the running mean becomes ``mean - b``, so outputs in eval mode
    are equal up to rounding. In training the batch mean removes b anyway. Convolutions and linear layers are found by
    tracing the model with ``torch.fx``, in training and in eval mode; only the BatchNorm may use their output. If the
    model cannot be traced, its submodules are, and a run of the example checks that they run as traced. Call this
    before the optimizer is made; older checkpoints then have unexpected keys.

    Args:
        model: The model, or the LightningModule, which is changed in place.
        *example: Inputs of ``model`` for one run in eval mode. They are needed for a model that cannot be traced, and
            for linear layers, whose outputs must have two dimensions.

    Returns:
        The names of the removed biases.

    Raises:
        ValueError: If the model cannot be traced and there is no example.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> drop_bias_before_batchnorm(model)
        ['0.bias']
        >>> model[0].bias is None, model[3].bias is None
        (True, False)
    """
    pairs = _run(model, list(_pairs(model, "", True)), example) if example else _proven(model, in_parts=False)
    for pair in pairs:
        if pair.norm.running_mean is not None:
            pair.norm.running_mean -= pair.layer.bias.to(pair.norm.running_mean.dtype)
        pair.layer.bias = None
    return [f"{pair.name}.bias" for pair in pairs]


def biases_before_batchnorm(model: nn.Module) -> list[str]:
    """The names of the biases in front of a BatchNorm that tracing the model or its submodules finds."""
    return [f"{pair.name}.bias" for pair in _proven(model, in_parts=True)]


def _proven(model: nn.Module, *, in_parts: bool) -> list[Pair]:
    return [pair for pair in _pairs(model, "", in_parts) if not isinstance(pair.layer, nn.Linear)]


def _pairs(module: nn.Module, path: str, in_parts: bool) -> Iterator[Pair]:
    """The pairs of a module, or of its submodules that can be traced."""
    try:
        named = _in_both_modes(module)
    except Exception as error:  # tracing a forward pass can raise any exception
        if not in_parts:
            raise ValueError(
                f"{type(module).__name__} cannot be traced ({type(error).__name__}: {error}): give an example input,"
                " drop_bias_before_batchnorm(model, x), to find its biases in a run."
            ) from error
        for name, child in module.named_children():
            yield from _pairs(child, f"{path}{name}.", in_parts)
        return
    for layer, norm in named:
        yield Pair(f"{path}{layer}", module.get_submodule(layer), module.get_submodule(norm), module)


def _in_both_modes(module: nn.Module) -> list[tuple[str, str]]:
    """The names of layers and norms that are pairs in training and in eval mode."""
    start = Start.here(module, torch.device("cpu"), deep=True)  # tracing runs the forward pass
    if not start.state.can_restore():
        raise MisconfigurationException("it holds a file, a closure or other state that cannot be restored")
    with undone(start), modes_kept(module):
        trained, evaluated = (_named(fx.symbolic_trace(module.train(mode)), module) for mode in (True, False))
    return [pair for pair in trained if pair in evaluated]


def _named(traced: fx.GraphModule, module: nn.Module) -> list[tuple[str, str]]:
    nodes, modules = list(traced.graph.nodes), dict(module.named_modules())
    calls = Counter(id(modules.get(node.target)) for node in nodes if node.op == "call_module")
    read = {node.target for node in nodes if node.op == "get_attr"}
    found = []
    for norm in nodes:
        layer = norm.args[0] if norm.op == "call_module" and len(norm.args) == 1 else None
        if not isinstance(layer, fx.Node) or layer.op != "call_module" or len(layer.users) > 1:
            continue
        pair = modules[str(layer.target)], modules[norm.target]
        alone = all(calls[id(module)] == 1 for module in pair) and f"{layer.target}.bias" not in read
        if alone and _match(*pair):
            found.append((str(layer.target), norm.target))
    return found


def _match(layer: Any, norm: Any) -> bool:
    """Whether layer and norm are of known classes, not subclasses of them, without hooks on the value in between."""
    watched = layer._forward_hooks or norm._forward_pre_hooks  # torch has no public list of hooks
    return type(layer) in _LAYERS and type(norm) in _NORMS and layer.bias is not None and not watched


def _run(model: nn.Module, pairs: list[Pair], example: tuple[Any, ...]) -> list[Pair]:
    """The pairs that run as often as the traced forward pass, with linear layers of 2-D outputs only."""
    calls: Counter[int] = Counter()
    dimensions: dict[int, set[int]] = {}

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls[id(module)] += 1
        if inputs and isinstance(inputs[0], Tensor):
            dimensions.setdefault(id(module), set()).add(inputs[0].ndim)

    with modes_kept(model), ExitStack() as undo:
        for module in {module for pair in pairs for module in (pair.layer, pair.norm, pair.owner)}:
            undo.callback(module.register_forward_pre_hook(count).remove)
        model.eval()(*example)
    return [
        pair
        for pair in pairs
        if calls[id(pair.owner)] == calls[id(pair.layer)] == calls[id(pair.norm)] > 0
        and (not isinstance(pair.layer, nn.Linear) or dimensions[id(pair.norm)] == {2})
    ]
