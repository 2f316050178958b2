"""Parameter groups for an optimizer; each function can split further, as ``groups``, what another one returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from lightning_tricks.core.checks import check_range, compiled, examples
from lightning_tricks.schedules.layers import known_layers, numbered_layers

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
    A timm model says its layers. A Hugging Face model has embeddings, numbered layers (an encoder's, then its
    decoder's; the last norm belongs to the last one) and a head: the pooler and what stands on the base model. Of a
    LightningModule that holds one, the other parameters belong to the head. With ``pattern``, what it does not match
    belongs to the stem before the first match, to the head behind the last, to the layer before it in between.

    Args:
        model: The model, or the LightningModule (``self`` in ``configure_optimizers``).
        lr: Learning rate of the head.
        decay: Factor from a layer to the one below, in [0, 1]; often 0.65 to 0.9.
        weight_decay: If given, splits each group as ``no_weight_decay_groups`` does.
        pattern: Regex found in parameters' names, whose first group is the layer's number (further ones: within it).
        groups: Groups to split. One that has a learning rate keeps it in the place of ``lr``.

    Returns:
        Groups ``{"name": "depth_2", "params": [...], "lr": ...}`` for any optimizer and any scheduler; each trainable
        parameter is in one of them, a shared one by its first name.

    Raises:
        ValueError: If a number is out of range, or neither the model nor ``pattern`` tells the layers.

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
    r"""Discriminative learning rates: the first pattern that is found in a parameter's name gives its learning rate.

    Args:
        model: The model, or the LightningModule (``self`` in ``configure_optimizers``).
        lrs: Learning rates by regex, searched in each parameter's name in this order; ``""`` is found in every name.
        weight_decay: If given, splits each group as ``no_weight_decay_groups`` does.
        groups: Groups to split. A parameter in whose name no pattern is found keeps the learning rate of its group.

    Raises:
        ValueError: If a trainable parameter gets no learning rate, a pattern gives none, or one is negative.

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
    names = dict(model.named_parameters())  # the frozen ones too: a pattern of theirs is no mistake
    winners = {name: next((each for each in lrs if compiled("lrs", each).search(name)), None) for name in names}
    if useless := [pattern for pattern in lrs if pattern not in winners.values()]:
        raise ValueError(
            f"lrs: every pattern must give a parameter its learning rate, {useless[0]!r} gives none: it is found in no"
            f" name, or only where an earlier one is (put general patterns last). {examples(names)}"
        )
    missing = [name for name, each in names.items() if each.requires_grad and winners[name] is None]

    def assign(name: str, _: nn.Parameter, group: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        pattern = winners[name]
        if pattern is None and "lr" not in group:
            raise ValueError(
                f"lrs must give every trainable parameter a learning rate, {len(missing)} match no pattern: add one for"
                f' them, or "" at the end for all the rest. {examples(missing)}'
            )
        return ("", {}) if pattern is None else (pattern or "rest", {"lr": lrs[pattern]})

    return _split(model, groups, assign, weight_decay)


def no_weight_decay_groups(model: nn.Module, weight_decay: float, *, groups: Groups | None = None) -> Groups:
    """Weight decay, but none on biases, norms (all that has one dimension) and what the model exempts itself.

    Args:
        model: The model, or the LightningModule; a module in it may exempt by ``no_weight_decay()``, as timm's do.
        weight_decay: Weight decay of the others.
        groups: Groups to split in two each, which keep their names and settings; several unnamed ones are numbered.

    Raises:
        ValueError: If ``weight_decay`` is negative.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> [(group["name"], len(group["params"])) for group in no_weight_decay_groups(model, 0.05)]
        [('decay', 2), ('no_decay', 4)]
        >>> groups = discriminative_groups(model, {"^2": 0.1, "": 0.01})
        >>> [(group["name"], group["lr"]) for group in no_weight_decay_groups(model, 0.05, groups=groups)]
        [('rest_decay', 0.01), ('rest_no_decay', 0.01), ('^2_decay', 0.1), ('^2_no_decay', 0.1)]
    """
    check_range("weight_decay", weight_decay, 0.0)
    listing = [(prefix, each) for prefix, each in model.named_modules() if hasattr(type(each), "no_weight_decay")]
    exempt = [f"{prefix}.{name}".lstrip(".") for prefix, each in listing for name in each.no_weight_decay()]

    def assign(name: str, parameter: nn.Parameter, _: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 leaves an empty vector where a weight was
        if len(shape) <= 1 or name.endswith("bias") or any(fnmatch(name, each) for each in exempt):
            return "no_decay", {"weight_decay": 0.0}
        return "decay", {"weight_decay": weight_decay}

    return _split(model, groups, assign, None)


def _split(model: nn.Module, groups: Groups | None, assign: _Assign, weight_decay: float | None) -> Groups:
    """Each group in parts: ``assign`` gives the label and the settings of the part that a parameter belongs to."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("FSDP1 hides the names and shapes of parameters: use FSDP2 (ModelParallelStrategy).")
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts: dict[tuple[int, str], dict[str, Any]] = {}
    given = [{"params": list(names)}] if groups is None else groups
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
