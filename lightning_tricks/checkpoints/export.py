"""Exporting the weights of a checkpoint for a plain ``nn.Module``."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from torch import Tensor

from lightning_tricks.checkpoints.files import PathLike, check_output, load, path_of, save, weights_in
from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.core.adapters.base import weights_checksum
from lightning_tricks.core.adapters.merge import merged_state
from lightning_tricks.core.adapters.record import Record, record_in
from lightning_tricks.core.checks import check_bool, check_choice, check_type, some
from lightning_tricks.core.weights.tensors import identity

__all__ = ["export_weights"]


def export_weights(
    checkpoint: PathLike,
    output: PathLike,
    *,
    which: Literal["averaged", "raw"] = "averaged",
    callback: str | None = None,
    strip_prefix: str = "",
    merge: bool = False,
    base: PathLike | None = None,
    force: bool = False,
) -> None:
    """Write the averaged or the raw weights of a checkpoint as a plain ``state_dict``, for any ``nn.Module``.

    "averaged" exports the averages of ``EMA`` or another averaging callback of this package, whether the file has them
    in its ``state_dict`` or in the callback's state. A file without such a state, from training without such a
    callback or with ``save_weights_only=True``, is exported as it is: its ``state_dict`` has the weights that were
    validated. "raw" exports the weights that the optimizer was training. A file without optimizer states may hold
    either kind, so it is refused.

    Every weight keeps its dtype in the ``state_dict``. Tied weights stay tied in a torch file; a .safetensors file,
    which has no ties, gets them under each name. A sharded checkpoint (a folder by FSDP or DeepSpeed) is exported as
    full tensors, under DeepSpeed from the fp32 master weights, in one process without a GPU. Nothing in a file or
    folder is executed.

    A checkpoint of ``LoRA`` has adapters, and is exported with ``merge`` alone: as weights for the class without them.

    Args:
        checkpoint: The file or folder that Lightning saved, or a file with a plain ``state_dict``.
        output: The file to write, as .safetensors or with ``torch.save``: .pt, .pth, .bin, .ckpt.
        which: The weights to export: "averaged" or "raw".
        callback: The callback whose averages to export, if several have some: its key in the checkpoint's "callbacks".
        strip_prefix: The submodule to export, such as "model."; the names in the file do not have this prefix.
        merge: Whether to merge the adapters of ``LoRA`` into the weights.
        base: For ``merge``, a file with the weights of before the training, under their names in the LightningModule;
            its checksum must be that in the checkpoint. Of a quantized base, the weights of before quantizing. None if
            the checkpoint has all weights, ``LoRA(save="all")``.
        force: Whether ``output`` may replace a file.

    Raises:
        ValueError: If the checkpoint has adapters and not ``merge``, or none and ``merge``, or others than ``base``
            has weights for; if it does not have those weights, has several averages and ``callback`` is not given,
            or has no weight under the prefix; if it is damaged, not a checkpoint, or holds objects that could run
            code; if the suffix of ``output`` is unknown.
        FileNotFoundError: If the checkpoint, or the folder of ``output``, does not exist.
        FileExistsError: If ``output`` exists, unless ``force``.
        ImportError: If safetensors, or deepspeed for a DeepSpeed checkpoint, is missing.

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
    check_bool("merge", merge)
    if source.is_dir():
        _require_in_state_dict(source, which, callback)
        from lightning_tricks.checkpoints.folders import lazy_weights, record_of

        weights, record = lazy_weights(source), record_of(source)
    else:
        loaded = load(source)
        weights = selected_weights(loaded, source, which, callback)
        record = record_in(loaded)
    if record is None and (merge or base is not None):
        raise ValueError(f"{source} has no adapters of LoRA to merge: leave merge and base out.")
    if record is not None:
        if not merge:
            raise ValueError(f"{source} has adapters of LoRA, which need merge=True to be exported.")
        weights = merged(weights, record, source, base)
    save(_without_prefix(weights, strip_prefix), target, force=force)


def _require_in_state_dict(folder: Path, which: str, callback: str | None) -> None:
    """Raise unless the state_dict of a sharded checkpoint holds the requested weights."""
    from lightning_tricks.checkpoints.folders import sharded_averages

    averages = sharded_averages(folder)
    if which == "raw":
        raise ValueError(
            f"{folder} is a sharded checkpoint: only the weights that were validated are exported. Resume from it: the"
            " module holds the raw weights while it trains."
        )
    key = callback or next(iter(averages), None)
    if key is None:
        return
    if key not in averages or (callback is None and len(averages) > 1):
        raise ValueError(f"{folder}: choose an average with callback=; there are: {some(averages) or 'none'}.")
    if not averages[key]:
        raise ValueError(
            f"{folder} has the averages of {key} in shards only. Resume from it and save the callback's"
            " averaged_state_dict()."
        )


def _select(checkpoint: Mapping[str, Any], state: dict[str, Any], which: str, callback: str | None) -> dict[str, Any]:
    """The averaged or raw weights of a checkpoint whose state_dict is ``state``.

    Raises:
        ValueError: If the checkpoint does not certainly have them.
    """
    callbacks = checkpoint.get("callbacks") or {}
    saved_states = {key: saved for key, saved in callbacks.items() if isinstance(saved, dict)}
    averages = {key: saved for key, saved in saved_states.items() if {"updates", "raw", "averaged"} <= saved.keys()}
    if callback is not None and callback not in averages:
        raise ValueError(f"no averages of the callback {callback!r}; there are those of: {some(averages) or 'none'}.")
    in_state_dict = [key for key, saved in averages.items() if saved["raw"]]  # Their raw weights are saved apart.
    if len(in_state_dict) > 1:
        raise ValueError(
            f"the state_dict cannot hold the averages of several callbacks: {some(in_state_dict)} and others."
        )
    if which == "averaged":
        if not averages:
            return state
        if callback is None and len(averages) > 1:
            raise ValueError(f"averages of several callbacks: choose one of them with callback=, {some(averages)}.")
        key = callback or next(iter(averages))
        if key in in_state_dict:
            return state
        raw = _replace(state, averages[in_state_dict[0]]["raw"]) if in_state_dict else state
        return _replace(raw, averages[key]["averaged"]) if averages[key]["updates"] else raw
    if in_state_dict:
        return _replace(state, averages[in_state_dict[0]]["raw"])
    if not checkpoint.get("optimizer_states"):
        raise ValueError(
            "without the state of an optimizer (save_weights_only=True) raw and averaged weights are not distinct:"
            " which='averaged' exports the state_dict as it is."
        )
    return checkpoint.get("current_model_state", state)  # The raw weights, if saved by Lightning's WeightAveraging.


def selected_weights(
    checkpoint: dict[str, Any], source: PathLike, which: str, callback: str | None = None
) -> dict[str, Any]:
    """The averaged or raw weights, as for ``export_weights``, of a checkpoint that was loaded from ``source``.

    Raises:
        ValueError: If the checkpoint does not certainly have them.
    """
    try:
        return _select(checkpoint, weights_in(checkpoint, source), which, callback)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _replace(state: dict[str, Any], values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Copy ``state`` with other values, in its dtypes and under all names of a tied weight.

    Raises:
        ValueError: If ``state`` has no such weight, or has it in another shape.
    """
    if missing := [name for name in values if name not in state]:
        raise ValueError(
            f"the state_dict has no {some(missing)}, but a callback has values for it: load the checkpoint into its"
            " module instead."
        )
    if partial := [name for name, value in values.items() if value.shape != state[name].shape]:
        raise ValueError(
            f"a callback has only a part of {some(partial)}, since the training was sharded: resume from the checkpoint"
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
    """The weights of the submodule ``prefix``, by their names in it.

    Raises:
        ValueError: If the submodule has no weights.
    """
    if not prefix:
        return state
    start = prefix.removesuffix(".") + "."  # "model" must not match "model_ema.weight".
    stripped = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
    if not stripped:
        prefixes = sorted({name.split(".")[0] + "." for name in state if "." in name})
        raise ValueError(
            f"strip_prefix: no weight is in {start!r}; there are: {some(prefixes) or 'weights without a prefix only'}."
        )
    return stripped


def merged(weights: Mapping[str, Any], record: Record, source: Path, base: PathLike | None) -> dict[str, Any]:
    """The weights of the network without adapters, which do what those with them do.

    Args:
        weights: The state in the checkpoint.
        record: What the checkpoint says of its adapters.
        source: The checkpoint, for error messages.
        base: A file with the weights beside the adapters, under their names in the module; None if the checkpoint has
            them.

    Raises:
        ValueError: If ``base`` is missing, superfluous, or not the file that the adapters were trained with.
    """
    saved = {name: value.read() if isinstance(value, LazyTensor) else value for name, value in weights.items()}
    if not record.checksum:
        if base is not None:
            raise ValueError(
                f"{source} has all weights itself (LoRA(save='all')), got base={str(base)!r}: leave it out."
            )
        return merged_state({}, saved, record)
    if base is None:
        raise ValueError(
            f"{source} has adapters without the frozen weights: pass base=, a file with the module's"
            " state_dict of before the training, as torch.save(module.state_dict(), 'base.pt') writes it."
        )
    file = path_of("base", base)
    state = weights_in(load(file), file)
    replaced = record.without_adapters(saved)
    frozen = {name: value for name, value in state.items() if name not in replaced and isinstance(value, Tensor)}
    if lost := [name for name in (*replaced, *(f"{layer}.weight" for layer in record.layers)) if name not in state]:
        raise ValueError(
            f"{file} has no {some(lost)}, which the module of {source} has: its names must be those of the"
            " LightningModule."
        )
    if (found := weights_checksum(frozen)) != record.checksum:
        raise ValueError(
            f"{file} is not what the adapters of {source} were trained with: its frozen weights have the checksum"
            f" {found}, expected {record.checksum}. Pass the weights of before the training, in their dtypes."
        )
    return {name: value for name, value in merged_state(state, saved, record).items() if name in state}
