"""The changes that a module's own hooks make to the weights of a checkpoint, made to both of its copies of them.

``on_load_checkpoint`` and the hooks of ``load_state_dict`` rename and reshape what an older class has saved. They see
the ``state_dict`` of a checkpoint, and not the second copy of the weights in the state of a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.checks import some
from lightning_tricks.core.random_numbers import random_numbers_of, random_state
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import checksum, copies, copy_, identity

Sum = tuple[torch.Size, int]  # the shape and the checksum of a weight


class AsSaved:
    """A checkpoint as it was saved, before the module's ``on_load_checkpoint`` has seen it.

    Args:
        checkpoint: The checkpoint. Its containers are copied, and so are the weights that hooks may write into.
        module: The module that loads it.
        hook: The module's ``on_load_checkpoint``.
        copies_in: A function that gives the raw weights of a checkpoint, as far as they are not in its ``state_dict``,
            and the names of all weights that it has twice.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        module: pl.LightningModule,
        hook: Callable[[dict[str, Any]], None],
        copies_in: Callable[[Mapping[str, Any]], tuple[dict[str, Tensor], set[str]]],
    ) -> None:
        seen = {"state_dict"}  # by the hooks of load_state_dict
        if is_overridden("on_load_checkpoint", module):
            seen |= {"callbacks", "current_model_state"}
        others = {key: value for key, value in checkpoint.items() if key not in seen}
        shared = {id(leaf): leaf for leaf in tree_leaves(others) if isinstance(leaf, Tensor)}
        self.checkpoint = deepcopy(checkpoint, shared)
        self._module, self._hook = module, hook
        self._random = random_state(module.device)
        self.raw, self._names = copies_in(self.checkpoint)
        weights = self.checkpoint["state_dict"]
        self.absent = sorted(self._names - weights.keys())  # the names that the state_dict does not have
        self._sums = {name: _sum(weights[name]) for name in (weights if self.absent else self._names)}

    @cached_property
    def came_through(self) -> bool:
        """Whether the module has got all weights as they stand in the file, under the same names or under others.

        To be asked before anything else is written into the module.
        """
        parts = Averages(LocalWeights(self._module)).local_parts(self._names)
        sums = {name: _sum(part) for name, part in parts.items() if part.is_floating_point() or part.is_complex()}
        values = set(self._sums.values())
        kept = all(value == self._sums.get(name, value) and value in values for name, value in sums.items())
        return kept and parts.keys() == self._names

    def load(self, trainer: pl.Trainer, loaded: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Load the file with other values of some weights, as the Trainer has loaded the file.

        Nothing else of what the hook does stays: the module has done it once, and so have the optimizers' states.

        Args:
            trainer: The Trainer that has loaded the file.
            loaded: The checkpoint as the hook has left it.
            tensors: Values by the names in the file.

        Returns:
            The weights as the hook has left them, in the dtype of ``tensors``.

        Raises:
            MisconfigurationException: If the hook does not do the same again.
        """
        module, name = self._module, type(self._module).__name__
        view = deepcopy(self.checkpoint)
        weights = self.checkpoint["state_dict"]
        values = {identity(weights[name]): tensor.detach() for name, tensor in tensors.items()}
        tied = {name: values[key] for name, weight in weights.items() if (key := identity(weight)) in values}
        view["state_dict"].update({name: value.clone() for name, value in tied.items()})
        state = ModuleState(module, deep=True)
        with random_numbers_of(self._random, module.device):
            self._hook(view)
        state.restore()
        here, there = _shapes(view["state_dict"]), _shapes(loaded["state_dict"])
        if differ := sorted(name for name in here | there if here.get(name) != there.get(name)):
            raise MisconfigurationException(
                f"{name}.on_load_checkpoint changes weights of the checkpoint, and must do so for the averaged and for"
                f" the raw ones, which it is called with one after the other; they came to differ in {some(differ)}:"
                " let it change whatever it is given, whether or not it has been called before."
            )
        trainer.strategy.load_model_state_dict(view, strict=module.strict_loading)
        return view["state_dict"]


@torch.no_grad()
def load_migrated(
    averages: Averages,
    state: Mapping[str, Any],
    raw: Mapping[str, Tensor],
    load: Callable[[Mapping[str, Tensor]], Mapping[str, Any]],
    *,
    tracked: Collection[str],
    once: Collection[str],
) -> None:
    """Load both kinds of weights into a module whose hooks change what they are given.

    Args:
        averages: The averages of the module, which has loaded the ``state_dict``.
        state: A state of averages, by the names in the file.
        raw: The raw weights, by these names.
        load: A function that loads the file with other values into the module, and returns what the hooks made of them.
        tracked: The weights of the module that get an average.
        once: Those weights and buffers of which there is one kind, which the module has.
    """
    others = list(averages.local_parts(once).values())
    before = [part.detach().clone() for part in others]
    found, tensors = load(state["averaged"]), {}
    for name, part in averages.local_parts(tracked).items():
        exact: Any = found.get(name)  # the module may hold it in 16 bits
        fits = isinstance(exact, Tensor) and exact.shape == part.shape and torch.equal(exact.to(part), part)
        (tensors[name],) = copies([exact.to(part.device) if fits else part])
    load(raw)
    copy_(others, before)
    averages.adopt(tensors, state["steps"], state["updates"])


def _sum(tensor: Any) -> Sum | None:
    """What tells a weight from others, in whichever precision it is held; None for what is no floating-point tensor."""
    if not (isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex())):
        return None
    return tensor.shape, checksum(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)))


def _shapes(weights: Mapping[str, Any]) -> dict[str, torch.Size | None]:
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in weights.items()}
