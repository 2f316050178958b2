"""What a checkpoint says of its adapters, so that they are never loaded beside other weights, or left out.

Frozen weights are not in it, but their checksum is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_tricks.core.adapters.base import weights_checksum
from lightning_tricks.core.adapters.inject import original_name
from lightning_tricks.core.weights.tensors import local_part

ADVICE = (
    "LoRA: adapters, which load with a Trainer(callbacks=[LoRA(...)]) and are merged by lightning-tricks export --merge"
)


@dataclass(frozen=True)
class Record:
    """The adapters of a network, as a checkpoint describes them.

    Args:
        r: The rank.
        alpha: The numerator of the scale.
        variant: The form of the adapters: "lora", "dora" or "rslora".
        scale: The factor of ``B @ A``.
        layers: The names of the adapted layers.
        transposed: Those of them whose weights are (in, out).
        trained: The names of the other parameters that train, before the injection.
        base: How the frozen weights are held: "keep", "nf4" or "int8".
        checksum: The checksum of all frozen weights before they are quantized; "" if a checkpoint holds them.
    """

    r: int
    alpha: float
    variant: str
    scale: float
    layers: list[str]
    transposed: list[str]
    trained: list[str]
    base: str
    checksum: str

    def state(self) -> dict[str, Any]:
        """The record in plain types, for a checkpoint."""
        return {"trick": "LoRA", **asdict(self)}

    def is_adapter(self, name: str) -> bool:
        """Whether an entry of a state belongs to an adapter."""
        owner, found, _ = name.rpartition(".lora_")
        return bool(found) and owner in self._names

    def is_trained(self, name: str) -> bool:
        """Whether a parameter trains, also under the name that a parametrization of its layer has given it since."""
        names = {original_name(each, self._names) for each in (name, without_parametrization(name))}
        return self.is_adapter(name) or not names.isdisjoint(self.trained)

    def without_adapters(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The other entries of a state, under the names that they had before the injection."""
        return {
            original_name(name, self._names): value
            for name, value in state.items()
            if not self.is_adapter(name) and found_in(value) is None
        }

    def placeholders(self) -> dict[str, Any]:
        """Entries of a state that the network without adapters does not load.

        It has weights of these names, and torch refuses to load anything but a tensor into one, with ``strict=False``,
        too. With ``strict=True`` torch's error also shows the name that has no weight, which says what to do.
        """
        return dict.fromkeys([*(f"{layer}.weight" for layer in self.layers), ADVICE], self.state())

    def differences(self, other: Record) -> list[str]:
        """What differs between this record and another one, in words."""
        told = []
        for field in fields(self):
            one, two = getattr(self, field.name), getattr(other, field.name)
            if one == two or (field.name == "checksum" and not (one and two)):
                continue
            if isinstance(one, list):
                one, two = ([name for name in a if name not in b] for a, b in ((one, two), (two, one)))
            told.append(f"{field.name}={one!r} and {two!r}")
        return told

    @property
    def _names(self) -> frozenset[str]:
        return frozenset(self.layers)


def without_parametrization(name: str) -> str:
    """The name that a parameter had before torch.nn.utils.parametrize gave it another.

    Example:
        >>> without_parametrization("head.parametrizations.weight.original"), without_parametrization("head.bias")
        ('head.weight', 'head.bias')
    """
    return re.sub(r"(^|\.)parametrizations\.(\w+)\.original\d*$", r"\1\2", name)


def found_in(value: Any) -> Record | None:
    """The record in an entry of a state dict or in the state of a callback; None if it is something else."""
    if not (isinstance(value, dict) and value.get("trick") == "LoRA"):
        return None
    return Record(**{field.name: value[field.name] for field in fields(Record)})


def record_in(checkpoint: Mapping[str, Any]) -> Record | None:
    """The record in a checkpoint, or in a plain state_dict; None if it has no adapters."""
    states = [checkpoint.get("callbacks") or {}, checkpoint.get("state_dict") or {}, checkpoint]
    values = [value for state in states if isinstance(state, Mapping) for value in state.values()]
    return next((found for value in values if (found := found_in(value))), None)


def checksums_of(record: Record, frozen: Mapping[str, Tensor]) -> tuple[str, str]:
    """The checksums of frozen weights, with their names and without the parametrizations in these."""
    named = {original_name(name, record.layers): weight for name, weight in frozen.items()}
    renamed = {without_parametrization(name): weight for name, weight in named.items()}
    return weights_checksum(named), weights_checksum(renamed)


def local_parts(frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's parts of frozen weights, without packed ones, which nothing draws or loads any more."""
    parts = {name: local_part(getattr(weight, "ds_tensor", weight)) for name, weight in frozen.items()}  # of ZeRO-3
    packed = {name for name, part in parts.items() if is_traceable_wrapper_subclass(part)}
    return {name: part for name, part in parts.items() if part.is_floating_point() and name not in packed}


def leave_frozen_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook of the module's state_dict."""
    frozen = frozen_weights(module)
    for name in [name for name in state if is_part(name, frozen)]:
        del state[name]


def frozen_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that never train, under all of their names; others may have stopped, as with ``LayerFreezing``."""
    record: Record = vars(module)["lightning_tricks_lora"][1]
    trained = {id(parameter) for name, parameter in module.named_parameters() if record.is_trained(name)}
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if id(parameter) not in trained}


def is_part(name: str, parameters: Collection[str]) -> bool:
    """Whether an entry of a state is one of the parameters, or belongs to a quantized one."""
    return name in parameters or any(name[:end] in parameters for end, mark in enumerate(name) if mark == ".")
