"""Injecting low-rank adapters by peft: the layers that get one, the parameters that train, and all others frozen."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks.core.checks import some
from lightning_tricks.core.install import library
from lightning_tricks.core.selection import Patterns, listed, select_modules, select_parameters

ALL_LINEAR = "all-linear"  # peft's name for all linear layers but the output layer
BASE = "base_layer"  # peft's name of the layer inside the one that replaces it


class Settings(NamedTuple):
    """What adapters are made of.

    Args:
        r: The rank.
        alpha: The numerator of the scale.
        dropout: The probability of dropout in front of an adapter.
        variant: The form of the adapters: "lora", "dora" or "rslora".
    """

    r: int
    alpha: float
    dropout: float
    variant: str

    @property
    def scale(self) -> float:
        """The factor of ``B @ A``."""
        return self.alpha / (self.r**0.5 if self.variant == "rslora" else self.r)


def require_peft() -> Any:
    """The module peft.

    Raises:
        ModuleNotFoundError: If peft is missing, with the extra to install.
    """
    return library("peft", "LoRA", "lora")


def select(module: nn.Module, modules: Patterns, train: Patterns) -> tuple[list[str], dict[str, nn.Parameter]]:
    """The names of the layers to adapt, and the parameters that train as a whole, by name.

    Args:
        module: The network.
        modules: Patterns of the layers to adapt; "all-linear" for all linear layers that can be adapted, without the
            output layer of a language model and those that ``train`` selects.
        train: Patterns of the parameters that stay trainable; empty for none.

    Raises:
        ValueError: If a pattern selects nothing, or a layer cannot be adapted.
    """
    trained = select_parameters(module, train, "train") if listed(train) else {}
    patterns = [pattern for pattern in listed(modules) if pattern != ALL_LINEAR]
    if len(patterns) < len(listed(modules)):
        heads = _output_layers(module)
        linear = [name for name in _linear(module) if module.get_submodule(name) not in heads]
        patterns += [f"^{re.escape(name)}$" for name in linear if f"{name}.weight" not in trained]
    if not patterns:
        raise ValueError(
            f"modules={ALL_LINEAR!r} selects linear layers that can be adapted, and {type(module).__name__} has none"
            " but output layers and what train= selects: name layers."
        )
    layers = adaptable(module, patterns)
    if both := [name for name in layers if f"{name}.weight" in trained]:
        raise ValueError(
            f"train selects the weights of {some(both)}, which modules= adapts, too: a layer is either trained or"
            " adapted. Narrow one of the patterns."
        )
    return list(layers), trained


def inject(
    module: nn.Module, layers: Collection[str], trained: Mapping[str, nn.Parameter], settings: Settings
) -> list[str]:
    """Put adapters beside layers, and freeze all but the adapters and ``trained``.

    Args:
        module: The network, which is changed in place.
        layers: The names of the layers.
        trained: The parameters that train as a whole.
        settings: What the adapters are made of.

    Returns:
        The names of the adapted layers, of which one may have several.

    Raises:
        ModuleNotFoundError: If peft is missing.
    """
    peft = require_peft()
    config = peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_dora=settings.variant == "dora",
        use_rslora=settings.variant == "rslora",
        target_modules="|".join(f"root\\.{re.escape(name)}" for name in layers),  # a string is matched as a whole
    )
    holder = nn.Module()  # gets the attributes that peft sets, and has no ``config`` that peft would read
    holder.root = module
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft finds out by itself, layer by layer
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without")  # for its own way to merge
        peft.inject_adapter_in_model(config, holder)
    found = adapted_layers(module)
    assert len({*found.values()}) == len(layers), "peft adapts what it is told to"
    _stay_linear(found)
    _keep_in_full_precision(found)
    _leave_fast_path(module)
    trains = {id(parameter) for parameter in trained.values()}
    trains |= {id(p) for layer in found.values() for p in adapter_parameters(layer).values()}
    for parameter in module.parameters():
        if parameter.is_floating_point():  # packed weights have no gradient
            parameter.requires_grad_(id(parameter) in trains)
    return list(found)


@contextmanager
def injected(
    module: nn.Module, layers: Collection[str], trained: Mapping[str, nn.Parameter], settings: Settings
) -> Iterator[None]:
    """A context in which a network has adapters, and is otherwise as it was; on the meta device, too."""
    trains = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        inject(module, layers, trained, settings)
        yield
    finally:
        adapted = {*adapted_layers(module).values()}
        for owner in list(module.modules()):
            for name, layer in owner.named_children():
                if layer in adapted:
                    setattr(owner, name, layer.get_submodule(BASE))
        for parameter, flag in trains:
            parameter.requires_grad_(flag)


def frozen_linear(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers whose weights nothing trains or shares, as their owners, their names there and themselves.

    A subclass of nn.Linear may have another forward pass, or share its weight. The head of a language
    model is left out, as transformers does when it quantizes one: errors of its logits are errors of the loss. So are
    layers with one input, each of whose weights would have a scale of its own.
    """
    places, trains = _places(module), {id(parameter) for parameter in trained.values()}
    heads = _output_layers(module)
    return [
        (owner, name, layer)
        for owner in module.modules()
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear
        and layer.in_features > 1
        and layer not in heads
        and max(places[id(layer)], places[id(layer.weight)]) == 1
        and id(layer.weight) not in trains
    ]


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers of a module that have adapters, as peft's objects, under all of their names."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return {}  # without peft there are none
    named = module.named_modules(remove_duplicate=False)
    return {name: layer for name, layer in named if isinstance(layer, tuners.BaseTunerLayer)}


def adapter_parameters(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an adapted layer that belong to its adapter, by name."""
    return {name: p for name, p in layer.named_parameters() if not name.startswith(f"{BASE}.")}


def transposed(module: nn.Module) -> list[str]:
    """The adapted layers whose weights are (in, out)."""
    kinds = _transformers_kinds()
    return [name for name, layer in adapted_layers(module).items() if isinstance(layer.get_base_layer(), kinds)]


def original_name(name: str, layers: Collection[str]) -> str:
    """The name that a parameter or buffer had before these layers were adapted."""
    owner, _, rest = name.rpartition(f".{BASE}.")
    return f"{owner}.{rest}" if owner in layers else name


def adaptable(module: nn.Module, modules: Patterns) -> dict[str, nn.Module]:
    """The selected layers that can have an adapter, by name; a pattern may also select other submodules beside them.

    Raises:
        ValueError: If a pattern selects no such layer, or one whose adapter would be wrong.
    """
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_transformers_kinds())
    inside = inside_attention(module)
    found: dict[str, nn.Module] = {}
    for pattern in listed(modules):
        selected = select_modules(module, pattern)
        layers = {name: child for name, child in selected.items() if isinstance(child, kinds)}
        if not layers or not layers.keys() - inside:
            name, other = next(iter((layers or selected).items()))
            raise ValueError(
                f"modules: {pattern!r} selects no layer that takes an adapter, but {name!r} of class"
                f" {type(other).__name__}. Linear layers, embeddings and convolutions take one, not those inside"
                " nn.MultiheadAttention, which reads their weights past them: name other layers."
            )
        found |= {name: layer for name, layer in layers.items() if name not in inside}
    places = _places(module)
    for name, layer in found.items():
        if reason := _obstacle(layer, places):
            raise ValueError(f"modules selects {name!r} ({type(layer).__name__}), {reason}")
    return {name: child for name, child in module.named_modules() if name in found}


def inside_attention(module: nn.Module) -> set[str]:
    """The names of all modules in an nn.MultiheadAttention."""
    outer = {name: child for name, child in module.named_modules() if isinstance(child, nn.MultiheadAttention)}
    return {f"{name}.{inner}" for name, child in outer.items() for inner, _ in child.named_modules() if inner}


def adaptable_linear(module: nn.Module) -> list[str]:
    """Patterns of the linear layers that can have an adapter, one for each."""
    return [f"^{re.escape(name)}$" for name in _linear(module)]


def _linear(module: nn.Module) -> list[str]:
    """The names of the linear layers that can have an adapter."""
    places, kinds = _places(module), (nn.Linear, *_transformers_kinds())
    named = module.named_modules()
    return [name for name, layer in named if name and type(layer) in kinds and not _obstacle(layer, places)]


def _output_layers(module: nn.Module) -> set[nn.Module]:
    """The output layers of language models."""
    parts: list[Any] = list(module.modules())
    return {part.get_output_embeddings() for part in parts if hasattr(part, "get_output_embeddings")} - {None}


def _obstacle(layer: Any, places: Mapping[int, int]) -> str:
    """The reason why an adapter of a layer would be wrong; "" if there is none."""
    weight = dict(layer.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return "whose weight is computed from others (a parametrization): remove that, or name other layers."
    if is_lazy(weight):
        return "which does not know its shape yet: run one batch through it before."
    if layer._forward_hooks or layer._forward_pre_hooks:  # torch has no public list of hooks
        return "which has forward hooks (as of add_blur_pool), and the adapter runs past them: name other layers."
    if max(places[id(weight)], places[id(layer)]) > 1:
        return (
            "which is used in more than one place, or its weight is, and the adapter in one alone: name other layers."
        )
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return "which changes its weight in every forward pass (max_norm): leave max_norm out, or name other layers."
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and set(layer.dilation) == {1}
        if not plain:
            return "a convolution with groups, dilation or padding other than zeros, which peft adapts wrongly or not."
    return ""


def _places(module: nn.Module) -> Counter[int]:
    """How many attributes hold each parameter and each submodule; one module may hold it under several names."""
    found = Counter[int]()
    for owner in module.modules():
        held = (*owner._parameters.values(), *owner._modules.values())
        found.update(id(part) for part in held if part is not None)
    return found


def _transformers_kinds() -> tuple[type[nn.Module], ...]:
    module = sys.modules.get("transformers.pytorch_utils")
    return () if module is None else (module.Conv1D,)


def _stay_linear(layers: Mapping[str, Any]) -> None:
    """Make the adapted linear layers instances of nn.Linear, for a forward pass that asks (as scvi-tools' does)."""
    for layer in layers.values():
        if isinstance(layer.get_base_layer(), nn.Linear) and not isinstance(layer, nn.Linear):
            kind: Any = type(layer)
            layer.__class__ = _linear_kind(kind)


@cache
def _linear_kind(adapted: Any) -> Any:
    """A class of peft's adapted layers that is a subclass of nn.Linear, too."""
    return type(adapted)(adapted.__name__, (adapted, nn.Linear), {"__reduce__": _reduced})


def _reduced(layer: nn.Module) -> tuple[Any, ...]:
    """A pickle names peft's class, since that of ``_linear_kind`` is in no module."""
    return _new_linear, (type(layer).__bases__[0],), vars(layer)


def _new_linear(adapted: Any) -> Any:
    kind = _linear_kind(adapted)
    return kind.__new__(kind)


def _keep_in_full_precision(layers: Mapping[str, Any]) -> None:
    """Make adapters of 16-bit weights fp32, as peft's own models do: small updates would be rounded away."""
    for layer in layers.values():
        for parameter in adapter_parameters(layer).values():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()


def _leave_fast_path(module: nn.Module) -> None:
    """Keep nn.TransformerEncoderLayer off its fast path, which evaluates with the weights past their adapters."""
    for block in module.modules():
        if isinstance(block, nn.TransformerEncoderLayer):
            for layer in adapted_layers(block).values():
                layer.register_forward_pre_hook(_no_change)


def _no_change(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook that does nothing: torch leaves its fast path where a module has hooks."""
