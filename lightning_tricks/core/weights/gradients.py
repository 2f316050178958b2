"""The base class of callbacks that change gradients just before an optimizer steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.trainer import grad_scaler, is_fitting
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.by_engine import local_gradients
from lightning_tricks.core.weights.local import LocalWeights


class GradientCallback(Trick):
    """Changes gradients after accumulation, reduction over the ranks and unscaling; a subclass says how.

    Lightning calls the hook once per optimizer step, also in manual optimization, and clips by itself afterwards.
    """

    needs_step_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self._weights: LocalWeights | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._weights = local_gradients(trainer, pl_module, type(self).__name__)
            self._undo.callback(setattr, self, "_weights", None)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._weights is None:  # outside of a fit: a step that adapts the module to a test set
            return
        _require_unscaled(trainer, optimizer, type(self).__name__)
        if found := [parameter for parameter in weights_of(optimizer) if parameter.grad is not None]:
            require_dense(pl_module, [(p, p.grad) for p in found if p.grad is not None], type(self).__name__)
            self._change(trainer, optimizer, found, self._weights)

    @abstractmethod
    def _change(
        self, trainer: L.Trainer, optimizer: Optimizer, parameters: list[nn.Parameter], weights: LocalWeights
    ) -> None:
        """Change the gradients of an optimizer's parameters; ``parameters`` are those that have a gradient."""


def require_dense(module: nn.Module, gradients: Sequence[tuple[Tensor, Tensor]], trick: str) -> None:
    """Raise for sparse gradients.

    Args:
        module: The module that the parameters belong to.
        gradients: Pairs of parameters and their gradients.
        trick: The name of the trick, for the error message.

    Raises:
        MisconfigurationException: If some gradients are sparse.
    """
    if sparse := {id(parameter) for parameter, gradient in gradients if gradient.is_sparse}:
        names = [name for name, parameter in module.named_parameters() if id(parameter) in sparse]
        raise MisconfigurationException(
            f"{trick} works on dense gradients, got sparse ones for {', '.join(names)}: pass sparse=False to the layer,"
            f" or remove {trick}."
        )


def _require_unscaled(trainer: L.Trainer, optimizer: Optimizer, trick: str) -> None:
    # Lightning refuses gradient_clip_val for the same reason, and by the same attribute: torch has no public name.
    if grad_scaler(trainer) and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise MisconfigurationException(
            f"{trick} needs unscaled gradients, got {type(optimizer).__name__}(fused=True) under"
            f" precision={trainer.precision!r}, which unscales them in its own step: leave fused=True out, or use"
            " precision='bf16-mixed'."
        )


class GradientsBefore:
    """The gradients of weights before a backward pass, which can be undone by them.

    A gradient that is there already is copied when the pass adds to it. By then the pass has freed activations, so that
    the most memory that a step takes is seldom more than without the copies.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._before = [(weight, weight.grad) for weight in weights]
        self._copies: dict[Tensor, Tensor] = {}

    def set_aside(self) -> None:
        """Leave the weights without gradients, until ``restore``."""
        for weight, _ in self._before:
            weight.grad = None

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copy gradients that a backward pass inside the block adds to."""
        held = [(weight, gradient) for weight, gradient in self._before if gradient is not None]
        handles = [weight.register_hook(partial(self._copy, weight, gradient)) for weight, gradient in held]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _copy(self, weight: Tensor, gradient: Tensor, _: Tensor) -> None:
        if weight.grad is gradient and weight not in self._copies:
            self._copies[weight] = gradient.clone()

    def restore(self) -> None:
        """Give the weights the gradients that they had."""
        for weight, gradient in self._before:
            if gradient is not None and (copy := self._copies.get(weight)) is not None:
                gradient.copy_(copy)
            weight.grad = gradient
