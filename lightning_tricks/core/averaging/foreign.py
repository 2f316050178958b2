"""Averages that Lightning's own callbacks have saved, as states of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.weights.tensors import identity

SWA = "StochasticWeightAveraging"


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


def average_of_lightning(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights that StochasticWeightAveraging has saved beside the ``state_dict``."""
    return _swa_state(checkpoint).get("average_model_state") or {}


def has_swalr(checkpoint: Mapping[str, Any]) -> bool:
    """Whether StochasticWeightAveraging has put its own schedule in the place of the module's."""
    return bool(_swa_state(checkpoint).get("scheduler_state"))


def for_lightning(shown: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's WeightAveraging has in a checkpoint beside the averaged ``state_dict``.

    Args:
        shown: The ``state_dict``.
        state: A state of averages with raw weights.
    """
    raw = {identity(shown[name]): value for name, value in state["raw"].items() if name in shown}
    return {
        "current_model_state": {name: raw.get(identity(value), value) for name, value in shown.items()},
        "averaging_state": {"n_averaged": torch.tensor(state["updates"], device="cpu")},
    }


def _swa_state(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    states = checkpoint.get("callbacks", {}).values()
    return next((state for state in states if isinstance(state, dict) and "average_model_state" in state), {})
