"""How a fit goes on from a checkpoint: the state of averages that a callback takes, and both kinds of weights in it.

``on_load_checkpoint`` and the hooks of ``load_state_dict`` rename and reshape what an older class has saved. They see
the ``state_dict`` of a checkpoint, and not the second copy of the weights in the state of a callback. What they do to
the one is done to the other by loading the file a second time, as it was saved (``AsSaved``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import cached_property, partial
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.state import has_raw, local_state
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.trainer import callbacks_of
from lightning_tricks.core.random_numbers import random_numbers_of, random_state
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import checksum, copies, copy_, identity

SWA = "StochasticWeightAveraging"
NONE = {"steps": 0, "updates": 0}  # the state of a new average

Sum = tuple[torch.Size, int]  # the shape and the checksum of a weight


class Found(NamedTuple):
    """A state of averages in a checkpoint.

    Args:
        name: The callback that has saved it: a key of the checkpoint's "callbacks", or the name of Lightning's.
        state: Raw and averaged weights, and the numbers of steps and updates.
        goes_on: Whether the average goes on. Otherwise it is of another kind: the raw weights train on.
        whole: Whether it has all weights of the module, instead of the averaged ones.
    """

    name: str
    state: dict[str, Any]
    goes_on: bool
    whole: bool = False


def find_state(
    trainer: L.Trainer, callback: Callback, checkpoint: Mapping[str, Any], trained: Collection[str]
) -> Found | None:
    """The state of averages that a callback begins with; None if the raw weights are in the ``state_dict``.

    It is the callback's own one, also with other settings, or else one of another kind that has the raw weights.

    Args:
        trainer: The Trainer that resumes.
        callback: An averaging callback.
        checkpoint: The checkpoint.
        trained: The names of the weights that train.

    Raises:
        MisconfigurationException: If several states could belong to the callback, or no raw weights are left.
    """
    states = _states(checkpoint)
    if key := _own_key(trainer, callback, states):
        return Found(key, states[key], goes_on=True)
    if any(_own_key(trainer, other, states) for other in callbacks_of(trainer, Callback)):
        return None  # that one loads the raw weights
    if others := [key for key, state in states.items() if has_raw(trainer, key, state)]:
        return Found(others[0], {**states[others[0]], **NONE}, goes_on=False)
    name, state = foreign_state(checkpoint, trained)
    if not name:
        return None
    heirs: list[Any] = [other for other in callbacks_of(trainer, Callback) if name in getattr(other, "kinds", ())]
    heir = min(heirs, key=lambda other: other.validate == "raw", default=None)  # theirs was validated
    goes_on = heir is callback and state["updates"] > 0
    return Found(name, state if goes_on else {**state, **NONE}, goes_on, whole=True)


def _own_key(trainer: L.Trainer, callback: Callback, states: Collection[str]) -> str:
    """The key of the state that belongs to a callback, or did with other settings; "" if there is none."""
    kind, taken = type(callback).__name__, {other.state_key for other in callbacks_of(trainer, type(callback))}
    keys = [key for key in states if key.split("(")[0] == kind and key not in taken]
    if callback.state_key in states:
        keys = [callback.state_key]
    if len(keys) > 1:
        raise MisconfigurationException(
            f"{callback.state_key} is not in the checkpoint, which has {', '.join(keys)}. Use the settings of one."
        )
    return keys[0] if keys else ""


def copies_in(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], set[str]]:
    """The raw weights that a checkpoint has beside its ``state_dict``, and the names of all weights that it has twice.

    Those of Lightning's callbacks count, too.
    """
    states = _states(checkpoint).values()
    current = {} if states else checkpoint.get("current_model_state", {})
    raw = {name: value for name, value in current.items() if isinstance(value, Tensor)}
    averaged = _swa_state(checkpoint).get("average_model_state") or {}
    names = {name for name, value in averaged.items() if isinstance(value, Tensor)}
    for state in states:
        raw |= state.get("raw", {})
        names |= state.get("averaged", {}).keys()
    return raw, names | raw.keys()


def _states(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states of averaging callbacks of this package, whose tensors may be in shards beside the checkpoint."""
    states = {key: state for key, state in checkpoint.get("callbacks", {}).items() if isinstance(state, dict)}
    return {key: state for key, state in states.items() if {"steps", "updates", "history"} <= state.keys()}


# -- averages that Lightning's own callbacks have saved, as states of ours --------------------------------------------


def foreign_state(checkpoint: Mapping[str, Any], trained: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The name of the callback of Lightning that has averaged weights, and its state; ``("", {})`` if none has.

    Args:
        checkpoint: The checkpoint.
        trained: The names of the weights that train.

    Raises:
        MisconfigurationException: If the raw weights are lost, since training had ended with the average.
    """
    own = _swa_state(checkpoint)
    if "current_model_state" in checkpoint:
        name = "EMAWeightAveraging" if "EMAWeightAveraging" in checkpoint["callbacks"] else "WeightAveraging"
        updates = int(checkpoint.get("averaging_state", {}).get("n_averaged", 0))
        raw, averaged = checkpoint["current_model_state"], checkpoint.get("state_dict", {})
        state: dict[str, Any] = {"raw": raw, "averaged": {}}
    elif updates := own.get("n_averaged", 0):
        name, raw, averaged = SWA, checkpoint.get("state_dict", {}), own["average_model_state"]
        state = {"raw": {}, "averaged": averaged}
    else:
        return "", {}
    if "state_dict" not in checkpoint:  # the strategy has loaded it into shards
        raise MisconfigurationException(
            f"The checkpoint has averages of {name}, which go on where every process holds the full weights: resume on"
            " one device or under DDP, save a checkpoint there, or leave the callback out."
        )
    both = [name for name in trained if name in raw and name in averaged]
    if updates > 1 and both and all(torch.equal(raw[name], averaged[name].to(raw[name])) for name in both):
        raise MisconfigurationException(
            f"The checkpoint has the average of {name} alone: training had ended, and the raw weights were lost. Resume"
            " from a checkpoint of before the end. To train on from the average itself, load it into the module before"
            " the fit, and leave ckpt_path= out."
        )
    tensors = {kind: {n: value for n, value in state[kind].items() if isinstance(value, Tensor)} for kind in state}
    return name, {**tensors, "steps": 0, "updates": updates}


def has_swalr(checkpoint: Mapping[str, Any]) -> bool:
    """Whether StochasticWeightAveraging has put its own schedule in the place of the module's."""
    return bool(_swa_state(checkpoint).get("scheduler_state"))


def _swa_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    states = checkpoint.get("callbacks", {}).values()
    return next((state for state in states if isinstance(state, dict) and "average_model_state" in state), {})


# -- loading both kinds of weights ------------------------------------------------------------------------------------


def load(
    trainer: L.Trainer,
    averages: Averages,
    found: Found,
    chosen: Mapping[str, Tensor],
    checkpoint: dict[str, Any],
    file: AsSaved | None,
) -> None:
    """Load raw and averaged weights, after the module has loaded the ``state_dict``.

    Args:
        trainer: The Trainer that resumes.
        averages: New averages of its module.
        found: The state that they begin with.
        chosen: The weights that a new average would have.
        checkpoint: The checkpoint as the module's hook has left it.
        file: The checkpoint as it was saved; None if the strategy has loaded the weights past the hook.

    Raises:
        MisconfigurationException: If hooks change the weights, and cannot do so a second time.
    """
    module = trainer.lightning_module
    state = local_state(trainer, averages, found.name, found.state, checkpoint["global_step"])
    names = chosen if found.whole else {**state["raw"], **state["averaged"]}
    if file is None or file.came_through:
        averages.load_state_dict(state, names if found.goes_on else ())
    elif file.absent:
        raise MisconfigurationException(
            f"{type(module).__name__} changes the weights of this checkpoint as it loads them, and has saved them under"
            f" other names than its own ({some(file.absent)}), so that the same cannot be done to the raw weights that"
            f" {found.name} has saved. Let on_save_checkpoint keep the names, or load the weights into the module"
            " before the fit and leave ckpt_path= out."
        )
    else:
        twice = {**names, **chosen}
        everything = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        once = () if found.whole else [name for name in everything if name not in twice]
        again = partial(file.load, trainer, checkpoint)
        load_migrated(averages, state, file.raw, again, tracked=twice if found.goes_on else (), once=once)


class AsSaved:
    """A checkpoint as it was saved, before the module's ``on_load_checkpoint`` has seen it.

    Args:
        checkpoint: The checkpoint. Its containers are copied, and so are the weights that hooks may write into.
        module: The module that loads it.
        hook: The module's ``on_load_checkpoint``.
    """

    def __init__(
        self, checkpoint: dict[str, Any], module: L.LightningModule, hook: Callable[[dict[str, Any]], None]
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

    def load(self, trainer: L.Trainer, loaded: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
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
