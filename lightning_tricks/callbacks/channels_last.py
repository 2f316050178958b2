"""Convolutions in the memory format channels-last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_tricks.core.lightning.engine import UNSHARDED, engine_of
from lightning_tricks.core.trick import Trick

__all__ = ["ChannelsLast"]


def to_channels_last(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert the 4-D inputs of a layer to ``torch.channels_last``; inputs in this format are not copied.

    It is a forward pre-hook: ``layer.register_forward_pre_hook(to_channels_last)``.

    Args:
        layer: The layer.
        inputs: Positional arguments of the layer; only tensors (N, C, H, W) are converted.

    Example:
        >>> (x,) = to_channels_last(nn.Identity(), (torch.zeros(2, 3, 4, 4),))
        >>> x.shape, x.stride()
        (torch.Size([2, 3, 4, 4]), (48, 1, 12, 3))
    """
    return tuple(
        x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.ndim == 4 else x for x in inputs
    )


@final
class ChannelsLast(Trick):
    """Runs 2-D convolutions in ``torch.channels_last``, where many kernels are faster, in fit and evaluation.

    An image (N, C, H, W) gets the strides (HWC, 1, WC, C), as do the weights of convolutions. The input of every
    convolution is converted to this format, and its output keeps the format, so usually only the first convolution
    copies its input. Results are equal up to rounding. The ``state_dict`` of a checkpoint is contiguous as always, and
    so are the weights when a fit or an evaluation ends or fails. A module that flattens images by ``view`` must use
    ``flatten``. Under FSDP2 and DeepSpeed, which flatten weights, and for layers that ``configure_model`` makes, only
    the images are converted.

    The gain depends on network, precision and device; ``benchmarks/cost/speed.py`` measures it.

    Raises:
        MisconfigurationException: When a fit or an evaluation starts, if the module has no 2-D convolution.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ChannelsLast()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._begun = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if engine_of(trainer) not in UNSHARDED:
            return
        # DDP lays out its gradients like the weights when it starts, so these are converted before.
        for layer in _convolutions(pl_module):
            weight = dict(layer.named_parameters(recurse=False)).get("weight")
            if weight is not None and not is_lazy(weight) and weight.is_contiguous():
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
                self._undo.callback(_restore, weight)
        self._wrap(trainer.strategy, "lightning_module_state_dict", _contiguous)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._begun:
            return  # a validation in a fit
        layers = _convolutions(pl_module)  # found here, after configure_model
        if not layers:
            raise MisconfigurationException(
                f"ChannelsLast needs 2-D convolutions, {type(pl_module).__name__} has none: leave ChannelsLast out."
            )
        torch.compiler.reset()  # code that was compiled without the hooks would not call them
        for layer in layers:
            self._undo.callback(layer.register_forward_pre_hook(to_channels_last).remove)
        self._begun = True

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    @override
    def _close(self) -> None:
        super()._close()
        self._begun = False


def _convolutions(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]


def _contiguous(state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return {name: value.contiguous() if isinstance(value, Tensor) else value for name, value in state_dict().items()}


def _restore(weight: nn.Parameter) -> None:
    weight.data = weight.data.contiguous()
