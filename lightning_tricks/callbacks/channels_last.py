"""Convolutions on images whose channels lie together in memory."""

from __future__ import annotations

from typing import Any, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

_CONVOLUTIONS = nn.Conv2d | nn.ConvTranspose2d


def to_channels_last(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a layer, the 4-D ones in the memory format ``torch.channels_last``; nothing is copied if it is so.

    A forward pre-hook: ``layer.register_forward_pre_hook(to_channels_last)``.

    Args:
        layer: Whose inputs they are.
        inputs: Of shape (N, C, H, W), others are left alone.

    Example:
        >>> (x,) = to_channels_last(nn.Identity(), (torch.zeros(2, 3, 4, 4),))
        >>> x.shape, x.stride()
        (torch.Size([2, 3, 4, 4]), (48, 1, 12, 3))
    """
    return tuple(
        x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.ndim == 4 else x for x in inputs
    )


@final
class ChannelsLast(Callback):
    """Runs 2-D convolutions in ``torch.channels_last``, which many kernels are faster in, in fit and evaluation.

    An image (N, C, H, W) gets the strides (HWC, 1, WC, C). The input of every convolution is brought into this format,
    which its output and what follows keep, so that one copy at the first convolution is all. Shapes and values are the
    same and results equal but for rounding. Weights keep their own format: checkpoints, optimizers, averages and
    sharded weights do not notice. A module that calls ``view`` where it flattens images must call ``flatten``.

    What it gains depends on network, precision and device; ``benchmarks/speed.py`` measures it.

    Raises:
        MisconfigurationException: When a fit or an evaluation starts, if the module has no 2-D convolution.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[ChannelsLast()], accelerator="cpu", logger=False)
    """

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._hooks:
            return  # validation in a fit
        layers = [layer for layer in pl_module.modules() if isinstance(layer, _CONVOLUTIONS)]
        if not layers:
            raise MisconfigurationException(
                f"ChannelsLast is for 2-D convolutions, {type(pl_module).__name__} has none: leave ChannelsLast out."
            )
        torch.compiler.reset()  # code that was compiled without the hooks would go on without them
        self._hooks = [layer.register_forward_pre_hook(to_channels_last) for layer in layers]

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module)  # after configure_model

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module)

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
