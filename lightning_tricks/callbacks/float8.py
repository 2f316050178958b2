"""Float8: the matrix products of linear layers run in 8 bits while they train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, final, get_args

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightning_tricks.core.adapters.quantization import linear_layers
from lightning_tricks.core.checks import check_bool, check_choice, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.install import library
from lightning_tricks.core.lightning.engine import TORCH, Engine, require_engine
from lightning_tricks.core.selection import Patterns, check_patterns
from lightning_tricks.core.trick import Trick

__all__ = ["Float8"]

Recipe = Literal["tensorwise", "rowwise"]
CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # of the first CUDA devices with such a product
MULTIPLE = 16  # float8 products need sizes that are multiples of this


def float8_twin(layer: nn.Linear, recipe: Recipe, *, emulate: bool = False) -> nn.Linear:
    """A layer of torchao that has the parameters of another layer, and computes with them in float8.

    Args:
        layer: The layer, whose sizes are multiples of 16.
        recipe: "tensorwise" or "rowwise".
        emulate: Whether products of rounded numbers are computed in fp32.

    Raises:
        ModuleNotFoundError: If torchao is missing, with the extra to install.

    Example:
        >>> layer = nn.Linear(16, 16)
        >>> twin, x = float8_twin(layer, "tensorwise", emulate=True), torch.randn(4, 16)
        >>> twin.weight is layer.weight, bool(0 < (twin(x) - layer(x)).abs().max() < 0.5)
        (True, True)
    """
    torchao = library("torchao.float8", "Float8", "8bit")
    config = torchao.Float8LinearConfig.from_recipe_name(recipe)
    # Gradients of weights are products over the samples, whose number is no multiple of 16 either.
    return torchao.convert_to_float8_training(layer, config=replace(config, emulate=emulate, pad_inner_dim=True))


@final
class Float8(Trick):
    """Linear layers train with products in 8 bits: ``y = (float8(s*x) @ float8(t*w).T) / (s*t)``, backward as well.

    The scales s and t are computed anew for every product, from the largest of the numbers: e4m3 has 4 bits of
    exponent and 3 of mantissa, up to 448. With "tensorwise", gradients are rounded to e5m2. Weights, their gradients
    and optimizer states keep their precision, names and classes, so checkpoints load anywhere. Layers in evaluation
    mode compute as always, so validation and export are those of the plain network. The arithmetic is torchao's. It
    makes large products faster, of thousands of inputs and outputs, and needs ``Compile`` for that: eager code loses
    more by the rounding.

    Args:
        modules: The linear layers, or modules that hold some, by patterns (a regular expression searched in names, or
            the name of a class; one or a sequence). Each must have multiples of 16 as sizes. By default all layers that
            do; the others keep their precision.
        recipe: "tensorwise" for one scale of a tensor, which is the fastest; "rowwise" for one of a row, which is more
            accurate where some numbers are much larger than the rest.
        emulate: Whether to round where there is no such product, and to compute in fp32. It is slow, and shows what
            float8 does to the loss. The device needs float64 and float8 as types of numbers, which MPS, XLA and some
            of XPU do not have.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        ModuleNotFoundError: If torchao is missing, with the extra to install.
        MisconfigurationException: At fit start, if the device has no such products, under ZeRO-3, if there are no such
            layers, or if one has adapters, a weight computed from others, or another forward pass by another trick.

    Example:
        >>> trainer = L.Trainer(callbacks=[Float8(emulate=True)], accelerator="cpu", logger=False)

    References:
        Micikevicius et al., arXiv 2209.05433.
    """

    conflicts = (
        Conflict(
            ("Float8",),
            "both compute the same products",
            "Remove one of them, or name other modules",
            lambda one, other: one.modules == other.modules,
        ),
        Conflict(
            ("QAT",),
            "products in float8 would not be those of the weights that QAT rounds",
            "Remove one of them, or name other modules in both",
            lambda one, other: one.modules is None or other.modules is None or one.modules == other.modules,
        ),
        Conflict(
            ("LoRA",),
            "LoRA replaces the layers that would compute in float8",
            "Remove one of them: Float8 is for a training of all weights",
        ),
    )
    changes_network = True

    def __init__(
        self, modules: Patterns | None = None, *, recipe: Recipe = "tensorwise", emulate: bool = False
    ) -> None:
        super().__init__()
        check_patterns("modules", modules, optional=True)
        check_choice("recipe", recipe, get_args(Recipe))
        check_bool("emulate", emulate)
        self.modules, self.recipe, self.emulate = modules, recipe, emulate

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # Products in float8 save a view of the weight for the backward pass, which ZeRO-3 does not free.
        freed = (*TORCH, Engine.ZERO0, Engine.ZERO1, Engine.ZERO2)
        require_engine(trainer, "Float8", *freed, why="where gathered weights do not stay until the backward pass")
        self._check_device(trainer.strategy.root_device)
        for layer in self._layers(pl_module).values():
            self._wrap(layer, "forward", partial(_linear, layer, float8_twin(layer, self.recipe, emulate=self.emulate)))

    def _check_device(self, device: torch.device) -> None:
        needed = CAPABILITY[self.recipe]
        has_it = device.type == "cuda" and torch.cuda.get_device_capability(device) >= needed
        if not self.emulate and not has_it:
            raise MisconfigurationException(
                f"{self.written()} needs a CUDA device of compute capability {needed[0]}.{needed[1]} or more, got"
                f" {torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type}: leave it out there,"
                " or see what it does to the loss by emulate=True, which is slow."
            )
        if device.type not in ("cpu", "cuda"):
            self._try_on(device)

    def _try_on(self, device: torch.device) -> None:
        """Raise if a small layer does not compute on the device, which may lack the types of numbers."""
        layer = nn.utils.skip_init(nn.Linear, MULTIPLE, MULTIPLE, device=device)
        twin, x = float8_twin(layer, self.recipe, emulate=True), torch.ones(MULTIPLE, MULTIPLE, device=device)
        try:
            twin(x).sum().backward()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise MisconfigurationException(
                f"{self.written()} rounds by float64 and float8, which torch does not do on a device of type"
                f" {device.type!r}: leave it out there, or train on cuda or cpu."
            ) from error

    def _layers(self, pl_module: L.LightningModule) -> dict[str, nn.Linear]:
        """The layers that compute in float8, by name."""
        try:
            found = linear_layers(pl_module, self.modules)
        except ValueError as error:
            raise MisconfigurationException(f"{self.written()}: {error}") from None
        fits = {
            name: layer
            for name, layer in found.items()
            if layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
        }
        if not fits or (self.modules is not None and len(fits) < len(found)):
            others = [f"{n} ({x.in_features} -> {x.out_features})" for n, x in found.items() if n not in fits]
            raise MisconfigurationException(
                f"{self.written()}: the sizes of a layer must be multiples of {MULTIPLE} for products in float8, got"
                f" {some(others)}: name other modules, or make these larger."
            )
        if wrapped := [name for name, layer in fits.items() if "forward" in vars(layer)]:
            raise MisconfigurationException(
                f"{self.written()}: {some(wrapped)} have another forward pass already (of another Float8, or another"
                " trick or wrapper), which float8 would leave out: name other modules in one of them."
            )
        return fits


def _linear(layer: nn.Linear, twin: nn.Linear, forward: Callable[..., Tensor], input: Tensor) -> Any:
    if not layer.training:
        return forward(input)
    # FSDP2 and ZeRO exchange the parameters of the layer itself, and pruning computes the weight from others, so the
    # twin is given those of this call.
    parts = {"weight": layer.weight, "bias": layer.bias}
    return functional_call(twin, {name: part for name, part in parts.items() if part is not None}, (input,))
