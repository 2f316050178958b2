"""Anti-aliasing of the strided layers of a convolutional network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_tricks.core.lightning.before_training import require_before_training
from lightning_tricks.core.selection import Patterns, check_patterns, select_modules

__all__ = ["add_blur_pool"]

_FEWEST_CHANNELS = 16  # as in Composer: the first convolution sees the image, whose blur would cost most


def blur_pool(x: Tensor, stride: int | tuple[int, int] = 1) -> Tensor:
    """Blur images by ``[1, 2, 1] / 4`` along both sides, then keep every ``stride``-th pixel, as timm's BlurPool2d.

    Args:
        x: Images (B, C, H, W) or (C, H, W). At the borders they are reflected; a single pixel is its own neighbour.
        stride: Distance of the pixels that stay, or one for each side.

    Example:
        >>> blur_pool(torch.eye(7)[None, None] * 16)[0, 0, 3]
        tensor([0., 1., 4., 6., 4., 1., 0.])
    """
    taps = (2 - (torch.arange(3, device=x.device, dtype=x.dtype) - 1).abs()) / 4  # made on the device: nothing waits
    weight = (taps[:, None] * taps).expand(x.shape[-3], 1, 3, 3)
    height, width = x.shape[-2:]
    if height > 1 and width > 1:
        padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    else:  # one pixel has no other that could be reflected
        padded = F.pad(x, (1, 1, 0, 0), mode="reflect" if width > 1 else "replicate")
        padded = F.pad(padded, (0, 0, 1, 1), mode="reflect" if height > 1 else "replicate")
    return F.conv2d(padded, weight, stride=stride, groups=x.shape[-3])


def add_blur_pool(model: nn.Module, *, modules: Patterns | None = None) -> list[str]:
    r"""Blur before strided convolutions and in strided max pooling, so that small shifts change outputs less.

    ``conv(x)`` is ``conv(blur(x))``, and ``max_pool(x, stride=s)`` is ``blur_pool(max_pool(x, stride=1), stride=s)``,
    of the same shape. Hooks do this, so names in the ``state_dict`` stay the same, and checkpoints load with and
    without it; a model that loads the weights does not have the hooks, unless its constructor calls this function. A
    copy or a pickle of the model keeps them. Call it before the optimizer is made and before ``torch.compile``.
    ``F.max_pool2d`` in a forward pass is not found.

    Args:
        model: The model, or the LightningModule.
        modules: Strided ``Conv2d`` and ``MaxPool2d`` layers, as regular expressions searched in modules' names, or
            names of classes; one or a sequence. None for all max pooling, and for the convolutions with at least 16
            input channels, which leaves out those that see the image.

    Returns:
        The names of the layers that blur.

    Raises:
        ValueError: If there is no such layer, a pattern selects nothing, a layer blurs already, or max pooling has
            ``ceil_mode`` or ``return_indices``.
        MisconfigurationException: When called in a fit that has made its optimizers.

    Example:
        >>> from torchvision.models import resnet18
        >>> add_blur_pool(resnet18())[:3]
        ['maxpool', 'layer2.0.conv1', 'layer2.0.downsample.0']

    References:
        Zhang, Making Convolutional Networks Shift-Invariant Again, arXiv 1904.11486; Composer's BlurPool.
    """
    check_patterns("modules", modules, optional=True)
    require_before_training(model, "add_blur_pool")
    named = dict(model.named_modules()) if modules is None else select_modules(model, modules)
    least = _FEWEST_CHANNELS if modules is None else 1
    found = {name: layer for name, layer in named.items() if _is_strided(layer, least)}
    blurring = {name: layer for name, layer in named.items() if _blurs(layer)}
    if blurring or not found:
        raise ValueError(
            f"add_blur_pool must be called once, {', '.join(blurring)} blurs already."
            if blurring
            else "add_blur_pool needs an nn.Conv2d or nn.MaxPool2d with a stride above 1, found none in"
            f" {type(model).__name__} with modules={modules!r}: name one in modules=."
        )
    for name, layer in found.items():
        if isinstance(layer, nn.MaxPool2d) and (layer.ceil_mode or layer.return_indices):
            raise ValueError(
                f"add_blur_pool needs max pooling without ceil_mode and return_indices, got {name}: {layer}. Leave it"
                " out of modules=."
            )
    for layer in found.values():
        if isinstance(layer, nn.MaxPool2d):
            layer.register_forward_hook(BlurPool(layer.stride))
            layer.stride = 1
        else:
            layer.register_forward_pre_hook(blur_inputs)
    return list(found)


def _is_strided(layer: nn.Module, least: int) -> bool:
    if not isinstance(layer, nn.Conv2d | nn.MaxPool2d):
        return False
    strides = layer.stride if isinstance(layer.stride, tuple) else (layer.stride,)
    return max(strides) > 1 and getattr(layer, "in_channels", least) >= least


def _blurs(layer: nn.Module) -> bool:
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]  # torch has no public list of hooks
    return any(hook is blur_inputs or isinstance(hook, BlurPool) for hook in hooks)


def blur_inputs(module: nn.Module, inputs: Any) -> Tensor:
    """Hook in front of a layer: its input is blurred."""
    return blur_pool(inputs[0])


class BlurPool:
    """Hook after max pooling of stride 1: its output is blurred, then pixels are left out; can be pickled."""

    def __init__(self, stride: int | tuple[int, int]) -> None:
        self.stride = stride

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Return the changed output."""
        return blur_pool(output, self.stride)
