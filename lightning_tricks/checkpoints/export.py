"""Weights for a bare module, from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from torch import Tensor

from lightning_tricks.checkpoints.files import PathLike, check_output, identity, load, path_of, save, weights_in
from lightning_tricks.checkpoints.folders import averages_beside, stored_weights
from lightning_tricks.core.checks import check_choice, check_type, some

__all__ = ["export_weights"]


def export_weights(
    checkpoint: PathLike,
    output: PathLike,
    *,
    which: Literal["averaged", "raw"] = "averaged",
    callback: str | None = None,
    strip_prefix: str = "",
    force: bool = False,
) -> None:
    """Write the averaged or the raw weights of a checkpoint as a plain ``state_dict``, for any ``nn.Module``.

    "averaged" gives the averages that ``EMA`` or another averaging callback of this package keeps, wherever the file
    has them: in ``state_dict`` or in the callback's state. A file without such a state, from a training without such a
    callback or with ``save_weights_only=True``, gives its ``state_dict`` as it is: the weights that were validated.
    "raw" gives the weights that the optimizer was training. It refuses a file without the state of an optimizer, which
    may hold either, and never guesses.

    Every weight has the dtype that it has in the ``state_dict``. Tied weights stay tied in a torch file; a .safetensors
    file, which has no ties, gets them under each name. A sharded checkpoint (a folder by FSDP or DeepSpeed) gives its
    ``state_dict`` as whole tensors, under DeepSpeed the fp32 masters, on one process without a GPU. Files and folders
    are loaded without running what is in them.

    Args:
        checkpoint: The file or folder that Lightning saved, or a file with a plain ``state_dict``.
        output: The file to write, as .safetensors or by ``torch.save``: .pt, .pth, .bin, .ckpt.
        which: "averaged" or "raw" weights.
        callback: Whose averages, if several callbacks have some: its key in the checkpoint's "callbacks".
        strip_prefix: Take only the submodule of this name, such as "model.", and drop that from the names.
        force: Whether ``output`` may replace a file.

    Raises:
        ValueError: If the checkpoint does not have those weights, or several averages of which none is chosen, or no
            weight under the prefix; if it is damaged, no checkpoint, or holds objects that could run code; for an
            unknown suffix of ``output``.
        FileNotFoundError: If the checkpoint, or the folder of ``output``, does not exist.
        FileExistsError: If ``output`` exists, unless ``force``.
        ImportError: If safetensors, or deepspeed for one of its checkpoints, is missing.

    Example:
        >>> import tempfile, torch
        >>> state = {"steps": 9, "updates": 9, "raw": {"net.w": torch.tensor(1.0)}, "averaged": {}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = {"state_dict": {"net.w": torch.tensor(2.0)}, "callbacks": {"EMA": state}}
        ...     torch.save(saved, f"{folder}/best.ckpt")
        ...     export_weights(f"{folder}/best.ckpt", f"{folder}/net.pt", strip_prefix="net.")
        ...     torch.load(f"{folder}/net.pt")
        {'w': tensor(2.)}
    """
    check_choice("which", which, ("averaged", "raw"))
    target = check_output(output, force=force)
    source = path_of("checkpoint", checkpoint)
    check_type("strip_prefix", strip_prefix, str)
    check_type("callback", callback, str, NoneType)
    if source.is_dir():
        _require_in_state_dict(source, which, callback)
        chosen = stored_weights(source)
    else:
        loaded = load(source)
        try:
            chosen = _pick(loaded, weights_in(loaded, source), which, callback)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    save(_without_prefix(chosen, strip_prefix), target, force=force)


def _require_in_state_dict(folder: Path, which: str, callback: str | None) -> None:
    """Raise unless the state_dict of a sharded checkpoint holds the weights that are asked for."""
    averages = averages_beside(folder)
    if which == "raw":
        raise ValueError(
            f"{folder} is a sharded checkpoint, of which only the weights that were validated are exported: resume from"
            " it, and while it trains the module holds the raw weights."
        )
    key = callback or next(iter(averages), None)
    if key is None:
        return
    if key not in averages or (callback is None and len(averages) > 1):
        raise ValueError(f"{folder}: choose an average with callback=; there are: {some(averages) or 'none'}.")
    if not averages[key]:
        raise ValueError(
            f"{folder} has the averages of {key} in shards only: resume from it and save the callback's"
            " averaged_state_dict()."
        )


def _pick(checkpoint: Mapping[str, Any], state: dict[str, Any], which: str, callback: str | None) -> dict[str, Any]:
    """The averaged or raw weights of a checkpoint whose state_dict is ``state``.

    Raises:
        ValueError: If the checkpoint does not have them for certain.
    """
    callbacks = checkpoint.get("callbacks") or {}
    averages = {key: each for key, each in callbacks.items() if _is_average(each)}
    if callback is not None and callback not in averages:
        raise ValueError(f"no averages of the callback {callback!r}; there are those of: {some(averages) or 'none'}.")
    shown = [key for key, each in averages.items() if each["raw"]]  # whose averages the state_dict holds
    if len(shown) > 1 or (shown and "current_model_state" in checkpoint):
        raise ValueError(f"the state_dict cannot hold the averages of several callbacks: {some(shown)} and others.")
    if which == "averaged":
        if not averages:
            return state
        if callback is None and len(averages) > 1:
            raise ValueError(f"averages of several callbacks: choose one of them with callback=, {some(averages)}.")
        key = callback or next(iter(averages))
        if key in shown:
            return state
        raw = _replaced(state, averages[shown[0]]["raw"]) if shown else state
        return _replaced(raw, averages[key]["averaged"]) if averages[key]["updates"] else raw
    if shown:
        return _replaced(state, averages[shown[0]]["raw"])
    if not checkpoint.get("optimizer_states"):
        raise ValueError(
            "without the state of an optimizer (save_weights_only=True) nothing tells raw weights from averaged ones:"
            " which='averaged' exports the state_dict as it is."
        )
    return checkpoint.get("current_model_state", state)  # Lightning's own WeightAveraging keeps them there


def _is_average(callback_state: Any) -> bool:
    return isinstance(callback_state, dict) and {"updates", "raw", "averaged"} <= callback_state.keys()


def _replaced(state: dict[str, Any], values: Mapping[str, Tensor]) -> dict[str, Any]:
    """A copy of ``state`` with other values, in its dtypes; each goes to all names of a tied weight.

    Raises:
        ValueError: If ``state`` has no such weight, or one of another shape.
    """
    if missing := [name for name in values if name not in state]:
        raise ValueError(
            f"the state_dict has no {some(missing)}, of which a callback has another value: load the checkpoint into"
            " its module instead."
        )
    if other := [name for name, value in values.items() if value.shape != state[name].shape]:
        raise ValueError(
            f"a callback has a part of {some(other)} only, since the training was sharded: resume from the checkpoint"
            " and save another one on one device."
        )
    new: dict[Hashable, Tensor] = {
        identity(state[name]): value.detach().to(state[name].dtype) for name, value in values.items()
    }
    result = copy.copy(state)
    for name, weight in state.items():
        if isinstance(weight, Tensor) and identity(weight) in new:
            result[name] = new[identity(weight)]
    return result


def _without_prefix(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The weights of a submodule under their names there.

    Raises:
        ValueError: If there are none.
    """
    if not prefix:
        return state
    start = prefix.removesuffix(".") + "."  # "model" is not to match "model_ema.weight"
    stripped = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
    if not stripped:
        present = sorted({name.split(".")[0] + "." for name in state if "." in name})
        there = some(present) or "weights without a prefix only"
        raise ValueError(f"strip_prefix: no weight is in {start!r}; there are: {there}.")
    return stripped
