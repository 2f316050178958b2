"""Quantization-aware training: linear layers train and are validated as if their weights were rounded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import lightning as L
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.adapters.quantization import (
    Precision,
    check_precision,
    quantized,
    require_torchao,
    rounded_layers,
)
from lightning_tricks.core.checks import check_duration
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.fit import plan_step
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.selection import Patterns, check_patterns
from lightning_tricks.core.trick import Trick

__all__ = ["QAT"]


def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """Weights as ``quantize`` rounds them, in a tensor whose gradient is that of the weights.

    Args:
        weight: Weights of a linear layer (outputs, inputs).
        precision: "int8" or "int4".

    Example:
        >>> import torch
        >>> weight = torch.tensor([[0.9, 0.44]], requires_grad=True)
        >>> rounded(weight, "int4").sum().backward()
        >>> weight.grad
        tensor([[1., 1.]])
    """
    zero = weight - weight.detach()
    return quantized(weight.detach(), precision).dequantize() + zero


@final
class QAT(Trick):
    """Quantization-aware training: linear layers compute with ``w' = scale * round(w / scale)``.

    The weights w take the gradient of w', and the network learns ones that keep their accuracy when
    ``quantize(module, precision)`` quantizes them after the fit: with the same ``precision`` and ``modules`` it
    computes what was validated. In checkpoints the weights are w, under their usual names, so they load anywhere.
    Validation, ``trainer.test`` and ``trainer.predict`` compute with w', too, where this callback is given. The
    arithmetic is torchao's. It pays for few bits and small networks; 8 bits seldom need it.

    Args:
        precision: "int8" or "int4".
        modules: The linear layers, or modules that hold some, by patterns (a regular expression searched in names, or
            the name of a class; one or a sequence); all by default. Those with one input are not rounded.
        start: When rounding begins (int optimizer steps, float fraction of training).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        ModuleNotFoundError: If torchao is missing, with the extra to install.
        MisconfigurationException: At fit start, if there are no such layers, or if one has adapters, a weight of 64
            bits or computed from others, or another forward pass by another trick or QAT.

    Example:
        >>> trainer = L.Trainer(callbacks=[QAT("int4")], accelerator="cpu", logger=False)

    References:
        Jacob et al., arXiv 1712.05877.
    """

    conflicts = (
        Conflict(
            ("QAT",),
            "a weight would be rounded twice",
            "Remove one of them, or name other modules",
            lambda one, other: one.modules == other.modules,
        ),
        Conflict(
            ("LoRA",),
            "the weights that adapters are merged into are not those that are rounded here",
            "Merge the adapters first (merge_adapters), and train the merged network with QAT, or take"
            ' LoRA(base="int8")',
        ),
        Conflict(
            ("tensor_parallel",),
            "weights and inputs are rounded by their largest values, and each process sees its part of them",
            "Take fsdp2_bf16",
        ),
    )
    changes_network = True
    durations = ("start",)

    def __init__(
        self, precision: Precision = "int8", *, modules: Patterns | None = None, start: int | float = 0
    ) -> None:
        super().__init__()
        check_precision(precision)
        check_patterns("modules", modules, optional=True)
        check_duration("start", start)
        self.precision, self.modules, self.start = precision, modules, start
        self._rounds = False

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._round(pl_module, rounds=self.start == 0)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._rounds = plan_step(trainer) >= self._steps["start"]

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, _: int) -> None:
        self._rounds = plan_step(trainer) >= self._steps["start"]

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not is_fitting(trainer):
            self._round(pl_module)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._round(pl_module)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._round(pl_module)

    def _round(self, pl_module: L.LightningModule, *, rounds: bool = True) -> None:
        """Wrap the forward pass of each layer until this trick is closed."""
        self._rounds = rounds
        require_torchao()
        try:
            layers = rounded_layers(pl_module, self.modules, lazy=True)
        except ValueError as error:
            raise MisconfigurationException(f"{self.written()}: {error}") from None
        for name, layer in layers.items():
            if "forward" in vars(layer):
                raise MisconfigurationException(
                    f"{self.written()}: {name}.forward is another one already (of another QAT, or another trick or"
                    " wrapper), and rounding would leave that out: name other modules in one of them."
                )
            self._wrap(layer, "forward", partial(_linear, self, layer))
            # torch leaves its fast path of nn.TransformerEncoderLayer, which reads weights past layers, for a hook.
            self._undo.callback(layer.register_forward_pre_hook(_no_change).remove)


def _no_change(layer: nn.Module, inputs: Any) -> None:
    """A hook that does nothing."""


def _linear(trick: QAT, layer: nn.Linear, forward: Callable[..., Tensor], input: Tensor) -> Tensor:
    if not trick._rounds or input.shape[-1] == 1:  # a lazy layer may have got one input
        return forward(input)
    return F.linear(input, rounded(layer.weight, trick.precision), layer.bias)
