"""What each process has of a model whose layers are split among several (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement

from lightning_tricks.strategies.fsdp2.plan import split_dimension

_WHOLE, _FEATURES = Replicate(), Shard(-1)


@dataclass(frozen=True)
class Parts:
    """The layers that are split, as one process has them.

    Args:
        size: The number of processes that share a layer.
        layers: The layers with their styles.
        shapes: The shapes of the parts of their parameters, by ``id`` of the parameter.
    """

    size: int = 1
    layers: Mapping[nn.Module, ParallelStyle] = field(default_factory=dict)
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the layers, with weights of these shapes, make tensors as large as on one process."""
        hooks = []
        try:
            for layer, style in self.layers.items():
                if not isinstance(style, ColwiseParallel | RowwiseParallel):
                    continue
                by_rows = isinstance(style, RowwiseParallel)
                taken = _FEATURES if by_rows and isinstance(layer, nn.Linear) else _WHOLE
                made = _WHOLE if by_rows else _FEATURES
                before = partial(_redistribute, style.input_layouts[0], taken, self.size)
                after = partial(_redistribute, made, style.output_layouts[0], self.size)
                hooks += [
                    layer.register_forward_pre_hook(lambda _, x, change=before: (change(x[0]), *x[1:])),
                    layer.register_forward_hook(lambda _, x, y, change=after: change(y)),
                ]
            yield
        finally:
            for hook in hooks:
                hook.remove()


def parts_of(layers: Mapping[nn.Module, ParallelStyle], size: int) -> Parts:
    """The parts of ``planned_layers`` among ``size`` processes."""
    shapes = {}
    for layer, style in layers.items():
        if (dim := split_dimension(layer, style)) is None:
            continue
        for parameter in layer.parameters(recurse=False):
            if dim < parameter.ndim:  # A layer that is split by its inputs keeps its bias.
                shape = list(parameter.shape)
                shape[dim] //= size
                shapes[id(parameter)] = tuple(shape)
    return Parts(size, layers, shapes)


def _redistribute(source: Placement, target: Placement, size: int, tensor: Any) -> Any:
    if source == target or not isinstance(tensor, Tensor):
        return tensor
    if isinstance(source, Shard):
        tensor = torch.cat([tensor] * size, source.dim)
    return tensor.chunk(size, target.dim)[0] if isinstance(target, Shard) else tensor
