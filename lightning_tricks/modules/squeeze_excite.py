"""Squeeze-and-excitation for a network that was built without it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_tricks.core.checks import check_count
from lightning_tricks.core.install import library
from lightning_tricks.core.lightning.before_training import require_before_training
from lightning_tricks.core.output_hooks import hook_output
from lightning_tricks.core.selection import Patterns, check_patterns, last_norms, select_modules

__all__ = ["add_squeeze_excite"]

_CHANNELS = ("out_channels", "num_features", "num_channels")  # of convolutions, BatchNorm and GroupNorm


def add_squeeze_excite(model: nn.Module, *, modules: Patterns | None = None, ratio: int = 16) -> list[str]:
    """Squeeze-and-excitation: each channel of a layer's output is weighted by the means of all its channels.

    ``y`` is ``y * sigmoid(W2 relu(W1 mean(y)))``, where W1 has ``ratio`` times fewer outputs than ``y`` has channels:
    timm's ``SqueezeExcite``, which becomes the submodule ``squeeze_excite`` of the layer. The names of all other
    parameters stay as they are, so weights of the plain network load with ``strict=False``, and the new ones train
    from their initial values, which halve the outputs. A copy or a pickle keeps the change. Call this before the
    optimizer is made.

    Args:
        model: The model, or the LightningModule.
        modules: The layers, as regular expressions searched in modules' names, or names of classes; one or a sequence.
            A layer is a convolution or a norm with outputs (B, C, H, W), usually the last one of a residual branch.
            None for the last ``bn`` of each ``BasicBlock`` and ``Bottleneck``, as in the ResNets of torchvision and
            timm.
        ratio: Reduction from the channels to the hidden units, at least 1; timm rounds their number to a multiple of 8.

    Returns:
        The names of the layers.

    Raises:
        ModuleNotFoundError: If timm is missing, with the extra to install.
        TypeError: If ``ratio`` is not an integer.
        ValueError: For a ratio out of range, if there is no such layer, or for one whose number of channels is unknown
            or that has it already.
        MisconfigurationException: When called in a fit that has made its optimizers.

    Example:
        >>> from torchvision.models import resnet18
        >>> model = resnet18()
        >>> add_squeeze_excite(model)[:2]
        ['layer1.0.bn2', 'layer1.1.bn2']
        >>> model.layer1[0].bn2.squeeze_excite.fc1.weight.shape
        torch.Size([8, 64, 1, 1])

    References:
        Hu et al., Squeeze-and-Excitation Networks, arXiv 1709.01507.
    """
    check_count("ratio", ratio)
    check_patterns("modules", modules, optional=True)
    require_before_training(model, "add_squeeze_excite")
    layers: Any = library("timm.layers", "add_squeeze_excite", "vision")
    found = last_norms(model) if modules is None else select_modules(model, modules)
    if not found:
        raise ValueError(
            f"add_squeeze_excite needs residual blocks of a ResNet, found none in {type(model).__name__} with"
            " modules=None: name layers in modules=."
        )
    added: dict[str, nn.Module] = {}
    for name, layer in found.items():
        channels = next((getattr(layer, key) for key in _CHANNELS if hasattr(layer, key)), None)
        weight = next(layer.parameters(recurse=False), None)
        if hasattr(layer, "squeeze_excite"):
            raise ValueError(f"modules must not have squeeze-and-excitation yet, {name} has: call it once.")
        if not isinstance(channels, int):
            raise ValueError(
                f"modules must be convolutions or norms, whose channels are known, {modules!r} selects {name}, a"
                f" {type(layer).__name__}: end the pattern with $."
            )
        made = layers.SqueezeExcite(channels, rd_ratio=1 / ratio)
        added[name] = made if weight is None else made.to(weight.device, weight.dtype)
    for name, layer in found.items():
        layer.add_module("squeeze_excite", added[name])
        hook_output(model, name, excite_outputs)
    return list(found)


def excite_outputs(module: Any, inputs: Any, output: Tensor) -> Tensor:
    """Hook after a layer: the channels of its output are weighted."""
    return module.squeeze_excite(output)
