"""The averages and the raw weights of a checkpoint, with which a fit goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.foreign import average_of_lightning, foreign_state
from lightning_tricks.core.averaging.migration import AsSaved, load_migrated
from lightning_tricks.core.averaging.state import has_raw, local_state
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.trainer import callbacks_of

NONE = {"steps": 0, "updates": 0}  # the state of a new average


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
    trainer: pl.Trainer, callback: Callback, checkpoint: Mapping[str, Any], trained: Collection[str]
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


def _own_key(trainer: pl.Trainer, callback: Callback, states: Collection[str]) -> str:
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
    names = {name for name, value in average_of_lightning(checkpoint).items() if isinstance(value, Tensor)}
    for state in states:
        raw |= state.get("raw", {})
        names |= state.get("averaged", {}).keys()
    return raw, names | raw.keys()


def _states(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states of averaging callbacks of this package, whose tensors may be in shards beside the checkpoint."""
    states = {key: state for key, state in checkpoint.get("callbacks", {}).items() if isinstance(state, dict)}
    return {key: state for key, state in states.items() if {"steps", "updates", "history"} <= state.keys()}


def load(
    trainer: pl.Trainer,
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
