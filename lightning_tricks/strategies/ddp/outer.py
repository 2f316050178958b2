"""DiLoCo's outer optimizer, which steps by how far the ranks have come; apart from the hooks, which most runs need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_tricks.core.selection import repeated_blocks

State = dict[str, dict[str, Tensor]]


def fragments(module: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """The trainable parameters in ``count`` fragments of nearly equal size; some are empty with too few layers.

    A layer is a repeated block, or a module outside of them with parameters of its own. Each layer in turn goes to the
    fragment that is the smallest so far: equal blocks are strided, block ``i`` is in fragment ``i % count``.

    Example:
        >>> blocks = [nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(4)]
        >>> of_blocks = {block[0].weight: number for number, block in enumerate(blocks)}
        >>> [[of_blocks[weight] for weight in part] for part in fragments(nn.Sequential(*blocks), 2)]
        [[0, 2], [1, 3]]
    """
    parts: list[list[nn.Parameter]] = [[] for _ in range(count)]
    sizes = [0] * count
    for layer in _layers(module):
        smallest = sizes.index(min(sizes))
        parts[smallest] += layer
        sizes[smallest] += sum(parameter.numel() for parameter in layer)
    return parts


def _layers(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The trainable parameters of each layer, tied ones in the first of theirs, in the order of ``parameters()``."""
    blocks = set(repeated_blocks(module))
    within = {inner for block in blocks for inner in block.modules()} - blocks
    seen: set[nn.Parameter] = set()
    for layer in module.modules():
        if layer not in within:
            found = [p for p in layer.parameters(recurse=layer in blocks) if p.requires_grad and p not in seen]
            seen.update(found)
            yield found


@final
class OuterOptimizer:
    """SGD on the weights that the ranks have in common, with the distance to their mean as its gradient.

    With ``x`` the weights of the last synchronisation and ``y`` the mean of the ranks' weights now:
    ``g = x - y``, ``m = momentum * m + g``, ``x = x - lr * (g + momentum * m)``, which is Nesterov momentum.

    Args:
        lr: The learning rate of the outer steps, above 0.
        momentum: The momentum of the outer steps, in [0, 1).
    """

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.last: dict[nn.Parameter, Tensor] = {}  # the weights of the last synchronisation, equal on all ranks

    @torch.no_grad()
    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the present weights, which are equal on all ranks, for those of the last synchronisation.

        Parameters that it follows already keep theirs.
        """
        if new := {parameter: parameter.clone() for parameter in parameters if parameter not in self.last}:
            if not self.last:
                self.sgd = SGD([*new.values()], self.lr, self.momentum, nesterov=self.momentum > 0)
            else:
                self.sgd.add_param_group({"params": [*new.values()]})
            self.last.update(new)

    @torch.no_grad()
    def step(self, parameters: list[nn.Parameter]) -> None:
        """Make an outer step with parameters that hold the mean over the ranks, and leave its result in them."""
        self.follow(parameters)  # What has come to train since takes its first step from here.
        last, means = [self.last[parameter] for parameter in parameters], list[Tensor](parameters)
        for weight, gradient in zip(last, torch._foreach_sub(last, means), strict=True):
            weight.grad = gradient
        self.sgd.step()
        self.sgd.zero_grad()  # SGD passes over the other fragments, which have no gradients.
        torch._foreach_copy_(means, last)

    def state_dict(self, names: Mapping[nn.Parameter, str]) -> State:
        """The weights of the last synchronisation and the momentum, by the names of the parameters."""
        momentum = {names[p]: self.sgd.state[last].get("momentum_buffer") for p, last in self.last.items()}
        return {
            "weights": {names[p]: last for p, last in self.last.items()},
            "momentum": {name: buffer for name, buffer in momentum.items() if buffer is not None},
        }

    def load_state_dict(self, state: State, parameters: Mapping[str, nn.Parameter]) -> None:
        """Go on from a state of the same parameters, by their names; with the present rate and momentum."""
        known = {name: parameter for name, parameter in parameters.items() if name in state["weights"]}
        self.follow(known.values())
        for name, parameter in known.items():
            last = self.last[parameter].copy_(state["weights"][name])
            if (buffer := state["momentum"].get(name)) is not None and self.momentum:
                self.sgd.state[last]["momentum_buffer"] = buffer.to(last, copy=True)

    def to_host(self) -> None:
        """Move the state to host memory, as Lightning does with optimizers after a fit."""
        for last in self.last.values():
            last.data = last.data.cpu()
            if (buffer := self.sgd.state[last].get("momentum_buffer")) is not None:
                buffer.data = buffer.data.cpu()
