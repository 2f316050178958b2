"""Adapters of a checkpoint as a folder that peft reads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks.checkpoints.files import PathLike, folder_of, load, path_of, save, weights_in
from lightning_tricks.checkpoints.stream import LazyTensor
from lightning_tricks.core.adapters.record import Record, record_in
from lightning_tricks.core.checks import check_bool, check_type, some
from lightning_tricks.core.safe_load.atomic_file import atomic_write, require_file

__all__ = ["export_adapters"]


def export_adapters(
    checkpoint: PathLike, output: PathLike, *, strip_prefix: str = "", base: PathLike | None = None, force: bool = False
) -> None:
    """Write the adapters of a checkpoint of ``LoRA`` as peft's ``save_pretrained`` does, for ``PeftModel`` to load.

    The folder has ``adapter_config.json`` and ``adapter_model.safetensors``. From it,
    ``PeftModel.from_pretrained(model, folder)`` puts the adapters and the parts that were trained as a whole into
    ``model``, which has the frozen weights.

    Args:
        checkpoint: The file or folder that Lightning saved.
        output: The folder to write.
        strip_prefix: The submodule that peft is to adapt, such as "model."; the names in the files do not have it.
        base: A file with the weights of before the training. Buffers, which peft does not save, must be as there;
            None if the module has none.
        force: Whether to overwrite files in the folder.

    Raises:
        ValueError: If the checkpoint has no adapters, or weights or buffers that peft's format has no place for.
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the folder has such files, unless ``force``.
        NotADirectoryError: If the output is a file.

    Example:
        >>> export_adapters("epoch=3.ckpt", "adapters", strip_prefix="model.")
        Traceback (most recent call last):
        FileNotFoundError: There is no file epoch=3.ckpt.
    """
    check_type("strip_prefix", strip_prefix, str)
    check_bool("force", force)
    source, folder = path_of("checkpoint", checkpoint), folder_of("output", output)
    weights, record = _read(source)
    if record is None:
        raise ValueError(f"{source} has no adapters of LoRA.")
    prefix = strip_prefix and strip_prefix.removesuffix(".") + "."
    layers = _inside(record.layers, prefix, "adapters", str(source))
    trained = _inside(record.trained, prefix, "trained parameters", str(source))
    adapters = {name: value for name, value in weights.items() if record.is_adapter(name)}
    whole = {name: value for name, value in record.without_adapters(weights).items() if name.startswith(prefix)}
    before = {} if base is None else weights_in(load(base), base)
    changed = [name for name, value in whole.items() if name not in record.trained and not _same(value, before, name)]
    if changed:
        raise ValueError(
            f"peft's files have no place for {some(changed)} of {source}, which training may have changed: merge the"
            " adapters instead, lightning-tricks export --merge, or pass base= where they are the same."
        )
    state = {_peft_name(name.removeprefix(prefix)): value for name, value in adapters.items()}
    state |= {f"base_model.model.{name}": whole[prefix + name] for name in trained}
    config = _config(record, layers, trained)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        require_file(folder / name)
        if os.path.lexists(folder / name) and not force:
            raise FileExistsError(f"{folder} has {name}: choose another folder, or overwrite it with force=True.")
    folder.mkdir(exist_ok=True)
    with atomic_write(folder / "adapter_config.json") as temporary:
        temporary.write_text(json.dumps(config, indent=2))
        save(state, folder / "adapter_model.safetensors", force=force)  # both files are written before one has its name


def _read(source: Path) -> tuple[dict[str, Any], Record | None]:
    """The state and the record of a checkpoint."""
    if not source.is_dir():
        loaded = load(source)
        return weights_in(loaded, source), record_in(loaded)
    from lightning_tricks.checkpoints.folders import lazy_weights, record_of

    lazy = lazy_weights(source)
    return {k: v.read() if isinstance(v, LazyTensor) else v for k, v in lazy.items()}, record_of(source)


def _inside(names: list[str], prefix: str, what: str, source: str) -> list[str]:
    """The names without the prefix, which all must have."""
    if outside := [name for name in names if not name.startswith(prefix)]:
        raise ValueError(f"strip_prefix: {source} has {what} outside of {prefix!r}, {some(outside)}.")
    return [name.removeprefix(prefix) for name in names]


def _same(value: Any, before: dict[str, Any], name: str) -> bool:
    return isinstance(value, Tensor) and isinstance(before.get(name), Tensor) and torch.equal(value, before[name])


def _peft_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files, which leave out that of the adapter."""
    owner, _, part = name.rpartition(".lora_")
    part = part.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
    return f"base_model.model.{owner}.lora_{part}"


def _config(record: Record, layers: list[str], trained: list[str]) -> dict[str, Any]:
    owners = dict.fromkeys(name.rpartition(".")[0] for name in trained)
    if wrong := [name for name in owners if not name or any(f"{layer}.".startswith(f"{name}.") for layer in layers)]:
        raise ValueError(
            f"peft saves modules as a whole, and {some(map(repr, wrong))} has both trained parameters and adapters:"
            " merge the adapters instead, lightning-tricks export --merge."
        )
    return {
        "peft_type": "LORA",
        "r": record.r,
        "lora_alpha": record.alpha,
        "use_dora": record.variant == "dora",
        "use_rslora": record.variant == "rslora",
        "target_modules": "|".join(re.escape(name) for name in layers),  # a string is matched as a whole
        "modules_to_save": list(owners) or None,
        "fan_in_fan_out": bool(record.transposed),
        "inference_mode": True,
    }
