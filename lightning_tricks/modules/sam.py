"""Sharpness-aware minimization (SAM)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.checks import check_range
from lightning_tricks.core.replay import RandomState, random_numbers_of, random_state, state_kept
from lightning_tricks.core.trainer import (
    callbacks_of,
    has_static_graph,
    is_fitting,
    require_whole_weights,
    wrap_method,
)
from lightning_tricks.core.weights import copy_, global_norm, trainable

if TYPE_CHECKING:
    _Module = pl.LightningModule  # what the mixin is mixed into; at run time it is a plain class
else:
    _Module = object


@dataclass(frozen=True)
class SAM:
    """Settings of sharpness-aware minimization: minimise the loss at ``w + rho * g/||g||`` in place of w.

    Args:
        rho: Radius of the perturbation, at least 0; 0.05 is common for clean data, 0.1 to 0.5 under label noise.

    Raises:
        ValueError: For a negative or infinite radius.

    Example:
        >>> SAM(rho=0.05)
        SAM(rho=0.05)

    References:
        Foret et al., arXiv 2010.01412.
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        check_range("rho", self.rho, 0.0)


@torch.no_grad()
def sam_perturb_(weights: Sequence[Tensor], gradients: Sequence[Tensor], rho: float) -> Tensor:
    """Move the weights uphill in place: ``w += rho * g / ||g||``, the norm taken over all gradients together.

    Args:
        weights: Tensors to move.
        gradients: Their gradients, any scale.
        rho: Length of the move.

    Returns:
        ``||g||``, a scalar tensor.

    Example:
        >>> w = torch.zeros(2)
        >>> sam_perturb_([w], [torch.tensor([3.0, 4.0])], rho=0.5), w
        (tensor(5.), tensor([0.3000, 0.4000]))
    """
    norm = global_norm(gradients)
    scaled = torch._foreach_mul(list(gradients), rho / (norm + 1e-12))  # a zero gradient moves nothing
    torch._foreach_add_(list(weights), scaled)
    return norm


class SAMMixin(_Module):
    """Sharpness-aware minimization for a LightningModule: the gradient is taken at ``w + rho * g/||g||``.

    Every training batch is run twice: for g, the gradient at w, and again at the perturbed weights for the gradient
    that the optimizer gets. This happens inside ``backward``, so accumulation, clipping, mixed precision, schedules and
    checkpoints work by the Trainer's own arguments. Each micro-batch on each device has its own perturbation
    (m-sharpness). The second run sees the same batch and random numbers, logs nothing, and leaves buffers (BatchNorm
    statistics) and metrics as the first run did.

    Write the mixin *before* ``LightningModule`` and set ``sam`` on the class or in ``__init__``.

    Raises:
        TypeError: If the mixin comes after LightningModule.
        MisconfigurationException: At fit start: ``sam`` is not a ``SAM``, manual optimization, ``static_graph=True``,
            16-bit weights, or a strategy that shards the weights.

    Example:
        >>> class Net(SAMMixin, pl.LightningModule):
        ...     sam = SAM(rho=0.05)

    References:
        Foret et al., arXiv 2010.01412.
    """

    sam: SAM = SAM()
    _sam_replays = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if pl.LightningModule in order and order.index(pl.LightningModule) < order.index(SAMMixin):
            raise TypeError(f"SAMMixin must come first: class {cls.__name__}(SAMMixin, LightningModule).")

    @override
    def configure_callbacks(self) -> list[Callback]:
        inherited = super().configure_callbacks()
        return [*([inherited] if isinstance(inherited, Callback) else inherited), _Recorder()]

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self._sam_replays:
            super().log(*args, **kwargs)

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        recorders = callbacks_of(self.trainer, _Recorder)
        if not recorders or recorders[0].step is None:
            raise MisconfigurationException(
                f"SAM did not see the training step of {type(self).__name__}: its configure_callbacks must return"
                " [*super().configure_callbacks(), ...]."
            )
        parameters = list(trainable(self).values())
        found = zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True)
        pairs = [(weight, gradient) for weight, gradient in found if gradient is not None]
        weights, gradients = [weight for weight, _ in pairs], [gradient for _, gradient in pairs]
        before = [weight.detach().clone() for weight in weights]
        try:
            sam_perturb_(weights, gradients, self.sam.rho)
            with state_kept(self):  # until backward is through: the graph holds on to the buffers
                super().backward(self._sam_loss(recorders[0].step, recorders[0].random), *args, **kwargs)
        finally:
            copy_(weights, before)

    def _sam_loss(self, step: Callable[[], Any], random: RandomState) -> Tensor:
        """The loss of the step run once more, divided and scaled as Lightning did with the first."""
        self._sam_replays = True
        try:
            with random_numbers_of(random, self.device):
                output = step()
        finally:
            self._sam_replays = False
        loss = output["loss"] if isinstance(output, Mapping) else output
        loss = loss / self.trainer.accumulate_grad_batches
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)


class _Recorder(Callback):
    """Keeps the training step that runs, with its batch and random state, to be run again."""

    def __init__(self) -> None:
        self.step: Callable[[], Any] | None = None
        self.random: RandomState = {}
        self._unwrap: Callable[[], None] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_fitting(trainer) or not isinstance(pl_module, SAMMixin):
            return
        _check(trainer, pl_module)
        self._unwrap = wrap_method(trainer.strategy, "training_step", self._record)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not isinstance(pl_module, SAMMixin):
            return
        for name, weight in trainable(pl_module).items():
            if weight.dtype not in (torch.float32, torch.float64):
                raise MisconfigurationException(
                    f"SAM needs fp32 weights, since 16-bit ones round its perturbation away; {name} is {weight.dtype}."
                    " Use precision='bf16-mixed' or '16-mixed'."
                )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        self.step, self.random = None, {}
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def _record(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.step = partial(original, *args, **kwargs)
        self.random = random_state(original.__self__.root_device)  # type: ignore[attr-defined]
        return self.step()


def _check(trainer: pl.Trainer, pl_module: SAMMixin) -> None:
    if not isinstance(pl_module.sam, SAM):
        raise MisconfigurationException(
            f"{type(pl_module).__name__}.sam must be a SAM(rho=...), got {pl_module.sam!r}."
        )
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"SAMMixin works in automatic optimization, got {type(pl_module).__name__}.automatic_optimization=False."
            " Set it to True, or leave the mixin out."
        )
    require_whole_weights(trainer, "SAM")
    if has_static_graph(trainer):
        raise MisconfigurationException(
            "SAM runs every step twice, which DDP's static_graph=True does not allow: leave static_graph out."
        )
