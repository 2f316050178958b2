"""Parameter groups for an optimizer; each function can split further, as ``groups``, what another one returned."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from lightning_tricks.core.checks import check_bool, check_range, compile_pattern, examples
from lightning_tricks.core.selection import select_parameters

__all__ = ["discriminative_groups", "layer_decay_groups", "no_weight_decay_groups"]

Key = tuple[float, ...]  # The sort key of a layer.
_STEM, _HEAD = Key((-1.0,)), Key((float("inf"),))


def known_layers(model: nn.Module, argument: str = "pattern") -> dict[str, Key]:
    """The layers of the one timm or Hugging Face model that ``model`` is or holds; the error names the argument."""
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
        rf" {argument}, a regex whose first group is the layer's number, as r'^blocks\.(\d+)'. {examples(names)}"
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
    lists = [(name, len(module)) for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    stacks = [name for name, count in lists if count in counts and not re.search(r"\.\d+\.", name)]
    if len(stacks) != 1 + config.is_encoder_decoder or hasattr(config, "depths"):  # a model in stages
        return {}
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    regex = re.compile(rf"^{prefix}({'|'.join(stacks)})\.(\d+)\.")
    hits = {name: regex.search(name) for name, _ in model.named_parameters()}
    keys = _in_order({name: hit and (stacks.index(hit[1]), int(hit[2])) for name, hit in hits.items()})
    last = max(key for key in keys.values() if key != _HEAD)
    for name, key in keys.items():
        if name.startswith(prefix) and not hits[name]:
            if re.search(r"embed|encoder\.(LayerNorm|conv)\.", name):  # DeBERTa has the latter after its layers
                keys[name] = _STEM
            elif "final_layer_norm" in name if key == _STEM else key == _HEAD and not re.search("pooler|head", name):
                keys[name] = last  # OPT registers it before its layers
    return keys


def numbered_layers(model: nn.Module, pattern: str, argument: str = "pattern") -> dict[str, Key]:
    """The layer of each parameter by the number that a regex finds in its name; the error names the argument."""
    regex = compile_pattern(argument, pattern)
    hits = {name: regex.search(name) for name, _ in model.named_parameters()}
    found = [hit.groups("0") or ("",) for hit in hits.values() if hit]
    if not found or not all(number.isdecimal() for numbers in found for number in numbers):
        raise ValueError(
            f"{argument} must be found in parameters' names with the layer's number as its first group, as"
            rf" r'^blocks\.(\d+)' is, got {pattern!r}. {examples(hits)}"
        )
    return _in_order({name: hit and tuple(map(float, hit.groups("0"))) for name, hit in hits.items()})


def _in_order(numbers: Mapping[str, Key | None]) -> dict[str, Key]:
    """Layers by number, the others by their place: before, after or between the numbered ones."""
    keys: dict[str, Key] = {}
    key, left = _STEM, sum(map(bool, numbers.values()))
    for name, number in numbers.items():
        key, left = number or (key if left else _HEAD), left - bool(number)
        keys[name] = key
    return keys


Groups = list[dict[str, Any]]
_Assign = Callable[[str, nn.Parameter, dict[str, Any]], tuple[str, dict[str, Any]]]


def layer_decay_groups(
    model: nn.Module,
    lr: float,
    decay: float,
    *,
    weight_decay: float | None = None,
    pattern: str | None = None,
    groups: Groups | None = None,
) -> Groups:
    r"""Layer-wise learning-rate decay: the nearer a layer is to the input, the more slowly it learns.

    ``lr_of_layer = lr * decay**depth``; depth counts from the head, 0, over the layers down to the stem or embeddings.
    timm models define their layers. A Hugging Face model has embeddings, numbered layers (an encoder's, then its
    decoder's; the last norm belongs to the last one) and a head: the pooler and what stands on the base model. If a
    LightningModule holds such a model, its other parameters belong to the head. With ``pattern``, parameters that it
    does not match belong to the stem if they come before the first match, to the head if they come after the last,
    otherwise to the layer before them.

    Args:
        model: The model, or the LightningModule (``self`` in ``configure_optimizers``).
        lr: Learning rate of the head.
        decay: Factor from a layer to the one below, in [0, 1]; often 0.65 to 0.9.
        weight_decay: Weight decay, by which each group is split as by ``no_weight_decay_groups``; none by default.
        pattern: Regex searched in parameters' names; its first group is the layer's number, further ones count within.
        groups: Groups to split. One that has a learning rate keeps it in the place of ``lr``.

    Returns:
        Groups ``{"name": "depth_2", "params": [...], "lr": ...}`` for any optimizer and any scheduler; each trainable
        parameter is in one of them, a shared one by its first name.

    Raises:
        TypeError: If ``groups`` is not a list or tuple of parameter groups.
        ValueError: If a number is out of range, neither the model nor ``pattern`` tells the layers, or ``groups`` hold
            a parameter of another model.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        >>> groups = layer_decay_groups(model, 0.1, 0.5, pattern=r"^(\d+)", weight_decay=0.01)
        >>> [(group["name"], group["lr"], group["weight_decay"]) for group in groups[:3]]
        [('depth_2_decay', 0.025, 0.01), ('depth_2_no_decay', 0.025, 0.0), ('depth_1_decay', 0.05, 0.01)]

    References:
        Clark et al., ELECTRA, arXiv 2003.10555; Bao et al., BEiT, arXiv 2106.08254.
    """
    check_range("lr", lr, 0.0)
    check_range("decay", decay, 0.0, 1.0)
    keys = known_layers(model) if pattern is None else numbered_layers(model, pattern)
    depths = {key: depth for depth, key in enumerate(sorted(set(keys.values()), reverse=True))}

    def assign(name: str, _: nn.Parameter, group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return f"depth_{depths[keys[name]]}", {"lr": group.get("lr", lr) * decay ** depths[keys[name]]}

    return _split(model, groups, assign, weight_decay)


def discriminative_groups(
    model: nn.Module, lrs: Mapping[str, float], *, weight_decay: float | None = None, groups: Groups | None = None
) -> Groups:
    r"""Discriminative learning rates: the first pattern that selects a parameter gives its learning rate.

    Args:
        model: The model, or the LightningModule (``self`` in ``configure_optimizers``).
        lrs: Learning rates by pattern, in this order: regular expressions searched in parameters' names, or names of
            classes; ``""`` is found in every name.
        weight_decay: Weight decay, by which each group is split as by ``no_weight_decay_groups``; none by default.
        groups: Groups to split. A parameter that no pattern selects keeps the learning rate of its group.

    Raises:
        TypeError: If ``groups`` is not a list or tuple of parameter groups.
        ValueError: If a trainable parameter gets no learning rate, a pattern gives none, one is negative, or ``groups``
            hold a parameter of another model.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        >>> groups = discriminative_groups(model, {"^2": 0.1, "": 0.01})
        >>> [(group["name"], group["lr"], len(group["params"])) for group in groups]
        [('rest', 0.01, 4), ('^2', 0.1, 2)]
        >>> groups = layer_decay_groups(model, 0.1, 0.5, pattern=r"^(\d+)")
        >>> [group["lr"] for group in discriminative_groups(model, {"^2": 1.0}, groups=groups)]
        [0.025, 0.05, 1.0]

    References:
        Howard and Ruder, ULMFiT, arXiv 1801.06146.
    """
    if not isinstance(lrs, Mapping) or not lrs:
        raise TypeError(f'lrs must map patterns to learning rates, as {{"^head": 1e-3, "": 1e-4}}, got {lrs!r}.')
    for pattern, lr in lrs.items():
        check_range(f"lrs[{pattern!r}]", lr, 0.0)
    names = dict(model.named_parameters())  # frozen ones too, since a pattern for them is no mistake
    selected = {pattern: select_parameters(model, [pattern], "lrs") for pattern in lrs}
    winners = {name: next((pattern for pattern in lrs if name in selected[pattern]), None) for name in names}
    if useless := [pattern for pattern in lrs if pattern not in winners.values()]:
        raise ValueError(
            f"lrs: every pattern must give a parameter its learning rate, {useless[0]!r} gives none: it selects only"
            f" what an earlier one does (put general patterns last). {examples(names)}"
        )
    missing = [name for name, parameter in names.items() if parameter.requires_grad and winners[name] is None]

    def assign(name: str, _: nn.Parameter, group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        pattern = winners[name]
        if pattern is None and "lr" not in group:
            raise ValueError(
                f"lrs must give every trainable parameter a learning rate, {len(missing)} match no pattern: add one for"
                f' them, or "" at the end for all the rest. {examples(missing)}'
            )
        return ("", {}) if pattern is None else (pattern or "rest", {"lr": lrs[pattern]})

    return _split(model, groups, assign, weight_decay)


def no_weight_decay_groups(
    model: nn.Module, weight_decay: float, *, embeddings: bool = False, groups: Groups | None = None
) -> Groups:
    """Weight decay on all but biases, norms (anything one-dimensional) and what the model itself exempts.

    Args:
        model: The model, or the LightningModule; a module in it may exempt by ``no_weight_decay()``, as timm's do.
        weight_decay: Weight decay of all other parameters, at least 0.
        embeddings: Whether embeddings have no weight decay either.
        groups: Groups to split in two, which keep their names and settings; several unnamed ones are numbered.

    Raises:
        TypeError: If ``embeddings`` is not a bool, or ``groups`` is not a list or tuple of parameter groups.
        ValueError: If ``weight_decay`` is negative, a layer is lazy and has no weights yet, or ``groups`` hold a
            parameter of another model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> [(group["name"], len(group["params"])) for group in no_weight_decay_groups(model, 0.05)]
        [('decay', 2), ('no_decay', 4)]
        >>> groups = discriminative_groups(model, {"^2": 0.1, "": 0.01})
        >>> [(group["name"], group["lr"]) for group in no_weight_decay_groups(model, 0.05, groups=groups)]
        [('rest_decay', 0.01), ('rest_no_decay', 0.01), ('^2_decay', 0.1), ('^2_no_decay', 0.1)]
    """
    check_range("weight_decay", weight_decay, 0.0)
    check_bool("embeddings", embeddings)
    exempting = [(prefix, part) for prefix, part in model.named_modules() if hasattr(type(part), "no_weight_decay")]
    exempt = [f"{prefix}.{name}".lstrip(".") for prefix, part in exempting for name in part.no_weight_decay()]
    tables = {part.weight for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}

    def assign(name: str, parameter: nn.Parameter, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if is_lazy(parameter):
            raise ValueError(
                f"weight decay goes by shapes, and {name} has none yet: run a batch through the model first."
            )
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty vector where a weight was
        bare = len(shape) <= 1 or name.endswith("bias") or (embeddings and parameter in tables)
        if bare or any(fnmatch(name, pattern) for pattern in exempt):
            return "no_decay", {"weight_decay": 0.0}
        return "decay", {"weight_decay": weight_decay}

    return _split(model, groups, assign, None)


def _split(model: nn.Module, groups: Groups | None, assign: _Assign, weight_decay: float | None) -> Groups:
    """Split each group into parts; ``assign`` gives the label and the settings of the part of a parameter."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("FSDP1 hides the names and shapes of parameters: use FSDP2 (ModelParallelStrategy).")
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts: dict[tuple[int, str], dict[str, Any]] = {}
    given = [{"params": list(names)}] if groups is None else groups
    if not (isinstance(given, list | tuple) and given and all(isinstance(g, dict) and "params" in g for g in given)):
        raise TypeError(f"groups must be a list of parameter groups, dictionaries with 'params', got {given!r:.80}.")
    unnamed = sum(not group.get("name") for group in given)
    for position, group in enumerate(given):
        own = group.get("name") or (f"group_{position}" if unnamed > 1 else "")  # LearningRateMonitor refuses doubles
        for parameter in group["params"]:
            if parameter not in names:
                raise ValueError(f"groups hold a parameter that {type(model).__name__} lacks: pass their model.")
            if parameter.requires_grad:
                label, settings = assign(names[parameter], parameter, group)
                name = "_".join(filter(None, [own, label]))
                part = parts.setdefault((position, label), {**group, "name": name, **settings, "params": []})
                part["params"].append(parameter)
    if not parts:
        raise ValueError(f"{type(model).__name__} has no trainable parameters to group: unfreeze some.")
    made = [*parts.values()]
    return made if weight_decay is None else no_weight_decay_groups(model, weight_decay, groups=made)
