"""A model in groups of parameters, of which the first so many train."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tricks.core.checks import compiled, examples
from lightning_tricks.core.shards import LocalWeights
from lightning_tricks.core.weights import trainable
from lightning_tricks.schedules.layers import known_layers, numbered_layers


def unfreeze_order(model: nn.Module, groups: str | Sequence[str] | None, count: int) -> list[list[str]]:
    r"""The names of the parameters that train, in ``count`` groups from the head to the stem, without the head.

    Args:
        model: The model.
        groups: As of GradualUnfreeze.
        count: How many groups; layers are dealt out to them as evenly as they go, the fuller groups first.

    Raises:
        ValueError: If a pattern gives no parameter, there are fewer layers than groups, or nothing tells the layers.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        >>> unfreeze_order(model, r"^(\d+)", 2)
        [['1.weight', '2.weight'], ['0.weight']]
        >>> unfreeze_order(model, ["^2", ""], 2)
        [['2.weight'], ['0.weight', '1.weight', '3.weight']]
    """
    names = list(trainable(model))
    if groups is not None and not isinstance(groups, str):
        winners = {name: next((g for g in groups if compiled("groups", g).search(name)), None) for name in names}
        order = [[name for name in names if winners[name] == pattern] for pattern in groups]
        if useless := [pattern for pattern, group in zip(groups, order, strict=True) if not group]:
            raise ValueError(
                f"groups: every pattern must be found in the name of a parameter that trains, and in no earlier group,"
                f" {useless[0]!r} gives none. {examples(names)}"
            )
        return order
    keys = known_layers(model) if groups is None else numbered_layers(model, groups)
    layers = sorted({keys[name] for name in names}, reverse=True)[1:]
    if len(layers) < count:
        raise ValueError(f"at: {count} times need as many layers below the head, found {len(layers)}: give fewer.")
    size, more = divmod(len(layers), count)
    taken = iter(layers)
    parts = [set(islice(taken, size + (n < more))) for n in range(count)]
    return [[name for name in names if keys[name] in part] for part in parts]


class Stages:
    """Groups of parameters from the head to the stem, which join one after the other; the rest always trains."""

    def __init__(self, weights: LocalWeights, order: list[list[str]]) -> None:
        self.weights, self.order = weights, order
        self.joined = len(order)
        self._held: dict[str, nn.Parameter] | None = None
        self._norms: list[tuple[_BatchNorm, int]] = []
        self._silenced: list[tuple[_BatchNorm, int]] = []  # those put into eval mode

    def names(self, first: int = 0) -> list[str]:
        """What belongs to the groups from this one on."""
        return [name for names in self.order[first:] for name in names]

    def frozen(self) -> list[str]:
        """What belongs to the groups that have not joined."""
        return self.names(self.joined)

    def hold(self) -> None:
        """Know the parameters from now on by what they are, whatever wraps their modules and changes their names."""
        self._held = self.named()

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by name; a strategy may replace them in its setup."""
        self.weights.settle()  # a gathered weight takes over what its shards have, when it is gathered
        if self._held is not None:
            return self._held
        parameters = dict(self.weights.module.named_parameters())
        return {name: parameters[name] for name in self.names()}

    def train(self, names: Collection[str], trains: bool) -> None:
        """Let parameters train, or not."""
        named = self.named()
        for name in names:
            named[name].requires_grad_(trains)

    def join(self, count: int) -> None:
        """Let the first ``count`` groups train, and no other.

        torch up to 2.10 at least goes on with compiled code that gives no gradients to what was frozen: it is dropped.
        """
        self.joined = count
        torch.compiler.reset()
        self.train([name for names in self.order[:count] for name in names], True)
        self.train(self.frozen(), False)
        for layer, stage in self._silenced:
            if stage < count:
                layer.train()
        self._silenced = [(layer, stage) for layer, stage in self._silenced if stage >= count]

    def restore(self, frozen: Collection[str]) -> bool:
        """Let join what is not in ``frozen``; False if those are not the last groups."""
        counts = [n for n in range(len(self.order) + 1) if set(frozen) == set(self.names(n))]
        if counts:
            self.join(counts[0])
        return bool(counts)

    def find_norms(self) -> None:
        """Find the BatchNorm layers as they are now, which SyncBatchNorm may have replaced."""
        named = self.named()
        stages = {named[name]: stage for stage, names in enumerate(self.order) for name in names}
        self._norms = batchnorms_of(self.weights.module, stages)

    def silence(self) -> None:
        """Put the BatchNorm layers of what is frozen into eval mode, whoever has called ``train()`` since."""
        for layer, stage in self._norms:
            if stage >= self.joined and layer.training:
                layer.eval()
                if (layer, stage) not in self._silenced:
                    self._silenced.append((layer, stage))


def batchnorms_of(model: nn.Module, stages: Mapping[nn.Parameter, int]) -> list[tuple[_BatchNorm, int]]:
    """The BatchNorm layers of parameters that belong to a stage; without any of its own, of the one before it."""
    layers: list[tuple[_BatchNorm, int]] = []
    stage = None
    for module in model.modules():
        if own := list(module.parameters(recurse=False)):
            stage = stages.get(own[0])
        if isinstance(module, _BatchNorm) and stage is not None:
            layers.append((module, stage))
    return layers
