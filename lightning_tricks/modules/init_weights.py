"""Recipes of initial weights, for a network that is trained from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tricks.core.checks import check_choice
from lightning_tricks.core.lightning.before_training import require_before_training
from lightning_tricks.core.selection import Patterns, check_patterns, last_norms, select_modules

__all__ = ["init_weights"]

Recipe = Literal["trunc_normal", "kaiming", "zero_residual"]
_MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


_trunc_normal = partial(nn.init.trunc_normal_, std=0.02)
_kaiming = partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu")


def init_weights(model: nn.Module, recipe: Recipe, *, modules: Patterns | None = None) -> list[str]:
    r"""Initialise a network by a recipe: truncated normal weights, Kaiming's, or residual branches that begin at zero.

    - "trunc_normal": normal weights of linear layers, convolutions and embeddings, with std 0.02 and none above 2, as
      in vision transformers;
    - "kaiming": normal weights of linear layers and convolutions, with ``std = sqrt(2 / fan_out)``, as in ResNets;
    - "zero_residual": weights and biases of the last layer of residual branches are 0, so blocks begin as identities.

    The first two set biases to 0, and norms to weight 1 and bias 0. Whatever is selected is overwritten, pretrained
    weights too: load those afterwards. Layers of other kinds (such as attention with weights of its own) stay as they
    are; look at the names that this returns.

    Args:
        model: The model, or the LightningModule.
        recipe: The recipe.
        modules: The layers, as regular expressions searched in modules' names, or names of classes; one or a sequence.
            None for all; under "zero_residual" for the last ``bn`` of each ``BasicBlock`` and ``Bottleneck``, as
            in the ResNets of torchvision and timm. For a vision transformer of timm ``r"(attn\.proj|mlp\.fc2)$"``.

    Returns:
        The names of the parameters that were set.

    Raises:
        ValueError: For another recipe, a pattern that selects nothing, layers without parameters of this kind, weights
            that are shared with a layer outside of them, are on the meta device, or are computed (parametrized).
        MisconfigurationException: When called in a fit that has made its optimizers.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        >>> init_weights(model, "trunc_normal", modules="^0")
        ['0.weight', '0.bias']
        >>> init_weights(model, "zero_residual", modules="2") and bool(model(torch.ones(1, 4)).any())
        False

    References:
        He et al., arXiv 1502.01852; Goyal et al., arXiv 1706.02677 (zero_residual); timm's vision transformers.
    """
    check_choice("recipe", recipe, get_args(Recipe))
    check_patterns("modules", modules, optional=True)
    require_before_training(model, "init_weights")
    if modules is not None:
        layers = select_modules(model, modules)
    else:
        layers = last_norms(model) if recipe == "zero_residual" else dict(model.named_modules())
    steps = dict(_planned(layers, recipe))
    if not steps:
        raise ValueError(
            f"init_weights needs layers with parameters for recipe={recipe!r}, found none in {type(model).__name__}"
            f" with modules={modules!r}: name them in modules=."
        )
    _check(model, list(steps))
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, fill in steps.items():
        fill(named[name])
    return list(steps)


def _planned(layers: dict[str, nn.Module], recipe: Recipe) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What fills each parameter, by name."""
    matrix = _trunc_normal if recipe == "trunc_normal" else _kaiming
    for path, layer in layers.items():
        if recipe == "zero_residual" and isinstance(layer, (*_MATRICES, *_NORMS)):
            fills: dict[str, Callable[[Any], Any]] = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}
        elif isinstance(layer, _MATRICES) or (isinstance(layer, nn.Embedding) and recipe == "trunc_normal"):
            fills = {"weight": matrix, "bias": nn.init.zeros_}
        elif isinstance(layer, _NORMS) and recipe != "zero_residual":
            fills = {"weight": nn.init.ones_, "bias": nn.init.zeros_}
        else:
            continue
        if nn.utils.parametrize.is_parametrized(layer):
            raise ValueError(
                f"init_weights sets weights that a layer has, those of {path} are computed from others: call it before"
                " weight_norm, spectral_norm or another parametrization."
            )
        yield from ((f"{path}.{own}" if path else own, fills[own]) for own, _ in layer.named_parameters(recurse=False))


def _check(model: nn.Module, names: list[str]) -> None:
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        if named[name].is_meta:
            raise ValueError(f"init_weights needs weights that exist, {name} is on the meta device: call to_empty().")
        if outside := [other for other in owners[id(named[name])] if other not in names]:
            raise ValueError(
                f"init_weights must not change shared weights by one of their layers, {name} is {outside[0]} as well:"
                " select both in modules=, or neither."
            )
