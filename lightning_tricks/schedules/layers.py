"""The layer that each parameter of a model belongs to, from the stem to the head."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_tricks.core.checks import compiled, examples

Key = tuple[float, ...]  # by which layers sort
_STEM, _HEAD = Key((-1.0,)), Key((float("inf"),))


def known_layers(model: nn.Module) -> dict[str, Key]:
    """The layers of the one timm or Hugging Face model that ``model`` is or holds."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")  # not loaded: no model of it can be there
    kinds = (transformers.PreTrainedModel,) if transformers else ()
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        known = hasattr(type(module), "group_matcher") or isinstance(module, kinds)
        if known and not any(name.startswith(outer) for outer in found):
            found[f"{name}." if name else ""] = module
    names = dict(model.named_parameters())
    for prefix, module in found.items() if len(found) == 1 else ():
        layers = _timm_layers(module) if hasattr(type(module), "group_matcher") else _transformers_layers(module)
        if keys := {f"{prefix}{name}": key for name, key in layers.items()}:
            return {name: keys.get(name, _HEAD) for name in names}
    raise ValueError(
        f"{type(model).__name__} must be or hold one timm or Hugging Face model with one stack of layers; else pass"
        rf" pattern, a regex whose first group is the layer's number, as r'^blocks\.(\d+)'. {examples(names)}"
    )


def _timm_layers(model: Any) -> dict[str, Key]:
    from timm.models import group_parameters

    named = [*model.named_parameters(), ("outside", None)]  # timm puts its heads where it puts what it does not know
    like: Any = SimpleNamespace(named_parameters=lambda: named)
    layers = group_parameters(like, model.group_matcher(coarse=False), reverse=True)
    return {name: _HEAD if layer == layers["outside"] else (layer,) for name, layer in layers.items()}


def _transformers_layers(model: Any) -> dict[str, Key]:
    """Empty unless the base model has one stack of layers, or an encoder's and a decoder's."""
    config, base = model.config, model.base_model
    counts = [getattr(config, name, None) for name in ("num_hidden_layers", "decoder_layers", "num_decoder_layers")]
    lists = [(name, len(each)) for name, each in base.named_modules() if isinstance(each, nn.ModuleList)]
    stacks = [name for name, count in lists if count in counts and not re.search(r"\.\d+\.", name)]
    if len(stacks) != 1 + config.is_encoder_decoder or hasattr(config, "depths"):  # depths: of stages, not of layers
        return {}
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    regex = re.compile(rf"^{prefix}({'|'.join(stacks)})\.(\d+)\.")
    hits = {name: regex.search(name) for name, _ in model.named_parameters()}
    keys = _in_order({name: hit and (stacks.index(hit[1]), int(hit[2])) for name, hit in hits.items()})
    last = max(key for key in keys.values() if key != _HEAD)
    for name, key in keys.items():
        if name.startswith(prefix) and not hits[name]:
            if re.search(r"embed|encoder\.(LayerNorm|conv)\.", name):  # DeBERTa has the latter behind its layers
                keys[name] = _STEM
            elif "final_layer_norm" in name if key == _STEM else key == _HEAD and not re.search("pooler|head", name):
                keys[name] = last  # OPT registers it before its layers
    return keys


def numbered_layers(model: nn.Module, pattern: str) -> dict[str, Key]:
    """The layer of each parameter, by the number that a regular expression finds in its name."""
    regex = compiled("pattern", pattern)
    hits = {name: regex.search(name) for name, _ in model.named_parameters()}
    found = [hit.groups("0") or ("",) for hit in hits.values() if hit]
    if not found or not all(number.isdecimal() for numbers in found for number in numbers):
        raise ValueError(
            "pattern must be found in parameters' names with the layer's number as its first group, as"
            rf" r'^blocks\.(\d+)' is, got {pattern!r}. {examples(hits)}"
        )
    return _in_order({name: hit and tuple(map(float, hit.groups("0"))) for name, hit in hits.items()})


def _in_order(numbers: Mapping[str, Key | None]) -> dict[str, Key]:
    """Layers by number, the others by their place: before, behind or between the numbered ones."""
    keys: dict[str, Key] = {}
    key, left = _STEM, sum(map(bool, numbers.values()))
    for name, number in numbers.items():
        key, left = number or (key if left else _HEAD), left - bool(number)
        keys[name] = key
    return keys
