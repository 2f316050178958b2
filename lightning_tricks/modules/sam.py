"""Sharpness-aware minimization (SAM)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_range
from lightning_tricks.core.recorder import Step, StepRecorder
from lightning_tricks.core.replay import ModuleState, find_node, random_numbers_of
from lightning_tricks.core.trainer import (
    has_static_graph,
    is_fitting,
    require_whole_weights,
    wrap_method,
)
from lightning_tricks.core.weights import copy_, global_norm, unnoticed

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
    if not gradients:
        return torch.zeros(())
    norm = global_norm(gradients)
    scaled = torch._foreach_mul(list(gradients), rho / (norm + 1e-12))  # a zero gradient moves nothing
    torch._foreach_add_(list(weights), scaled)
    return norm


class SAMMixin(_Module):
    """Sharpness-aware minimization for a LightningModule: the gradient is taken at ``w + rho * g/||g||``.

    Every training batch is run twice: for g, the gradient at w, and again at the perturbed weights for the gradient
    that the optimizer gets. This happens inside ``backward``, so accumulation, clipping, mixed precision, schedules and
    checkpoints work by the Trainer's own arguments. Each micro-batch on each device has its own perturbation
    (m-sharpness). Perturbed are the weights that the optimizer trains. The module's own state is copied twice a step,
    so large tensors and lists belong into the data module.

    The second run starts from the same batch, random numbers and state as the first and logs nothing; afterwards
    buffers (BatchNorm statistics), metrics and plain attributes of the module are as the first run left them. What a
    step does to objects outside the module (a file, an object of your own) it does twice.

    Write the mixin *before* ``LightningModule`` and set ``sam`` on the class or in ``__init__``.

    Raises:
        TypeError: If the mixin comes after LightningModule.
        MisconfigurationException: At fit start or in the first step, for what cannot be right: ``sam`` is not a
            ``SAM``, manual optimization, ``dataloader_iter``, ``static_graph=True``, 16-bit weights, weights in shards,
            sparse gradients, reentrant activation checkpointing, a ``backward`` or ``configure_callbacks`` that leaves
            out ``super()``, a step that writes into its batch or into frozen parameters.

    Example:
        >>> class Net(SAMMixin, pl.LightningModule):
        ...     sam = SAM(rho=0.05)

    References:
        Foret et al., arXiv 2010.01412.
    """

    sam: SAM = SAM()
    _sam_recorder: StepRecorder | None = None
    _sam_replays = False
    _sam_aside: tuple[list[Tensor], list[Tensor]] | None = None  # weights that are perturbed now, and their own values

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if pl.LightningModule in order and order.index(pl.LightningModule) < order.index(SAMMixin):
            raise TypeError(f"SAMMixin must come first: class {cls.__name__}(SAMMixin, LightningModule).")

    @override
    def configure_callbacks(self) -> list[Callback]:
        inherited = super().configure_callbacks()
        return [*([inherited] if isinstance(inherited, Callback) else inherited), _SAMCallback()]

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self._sam_replays:
            super().log(*args, **kwargs)

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self._sam_recorder is None:
            name = type(self).__name__
            raise MisconfigurationException(f"{name}.configure_callbacks must include super().configure_callbacks().")
        first = self._sam_recorder.take()
        weights, gradients = self._sam_gradients(loss)
        ours = [weight.detach().clone() for weight in weights]
        after = ModuleState(self)
        try:
            first.state.restore()
            self._sam_aside = weights, ours
            sam_perturb_(weights, gradients, self.sam.rho)
            super().backward(self._sam_loss(first), *args, **kwargs)
        finally:
            copy_(weights, ours)
            after.restore()
            self._sam_aside = None

    def _sam_gradients(self, loss: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The optimizer's weights that the loss depends on, and their gradients; ``.grad`` is left alone."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        trained = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        pairs = [(w, g) for w, g in zip(trained, gradients, strict=True) if g is not None]
        if len(pairs) < len(trained) and find_node(loss, "CheckpointFunctionBackward".__eq__):
            raise MisconfigurationException("SAM sees no gradient in a reentrant checkpoint: pass use_reentrant=False.")
        if any(gradient.is_sparse for _, gradient in pairs):
            raise MisconfigurationException("SAM works on dense gradients, got sparse ones: pass sparse=False.")
        return [weight for weight, _ in pairs], [gradient for _, gradient in pairs]

    def _sam_loss(self, first: Step) -> Tensor:
        """The loss of the step run once more, divided and scaled as Lightning did with the first."""
        self._sam_replays = True
        try:
            with random_numbers_of(first.random, self.device):
                output = first.run()
        finally:
            self._sam_replays = False
        loss = output["loss"] if isinstance(output, Mapping) else output
        loss = loss / self.trainer.accumulate_grad_batches
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sam_recorder": None, "_sam_aside": None}


class _SAMCallback(Callback):
    """Checks the Trainer and records its training steps for the module."""

    def __init__(self) -> None:
        self._recorder = StepRecorder()
        self._undo = ExitStack()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if is_fitting(trainer) and isinstance(pl_module, SAMMixin):
            _check(trainer, pl_module)
            pl_module._sam_recorder = self._recorder
            self._recorder.start(trainer, pl_module)
            self._undo.callback(self._recorder.stop)
            self._undo.callback(wrap_method(trainer, "save_checkpoint", partial(_save, pl_module)))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, weight in pl_module.named_parameters() if isinstance(pl_module, SAMMixin) else ():
            if weight.requires_grad and weight.dtype not in (torch.float32, torch.float64):
                raise MisconfigurationException(
                    f"SAM needs fp32 weights, since 16-bit ones round its perturbation away; {name} is {weight.dtype}."
                    " Use precision='bf16-mixed' or '16-mixed'."
                )

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder.step is not None:
            raise MisconfigurationException(
                f"{type(pl_module).__name__}.backward must call super().backward(loss): SAM works inside it."
            )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo.close()
        if isinstance(pl_module, SAMMixin):
            pl_module._sam_recorder = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")


def _save(module: SAMMixin, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save a checkpoint with the module's own weights, also when it is asked for at perturbed ones."""
    if module._sam_aside is None:
        return original(*args, **kwargs)
    weights, ours = module._sam_aside
    perturbed = [weight.detach().clone() for weight in weights]
    with unnoticed(weights):
        try:
            copy_(weights, ours)
            return original(*args, **kwargs)
        finally:
            copy_(weights, perturbed)


def _check(trainer: pl.Trainer, pl_module: SAMMixin) -> None:
    name = type(pl_module).__name__
    if not isinstance(pl_module.sam, SAM):
        raise MisconfigurationException(f"{name}.sam must be a SAM(rho=...), got {pl_module.sam!r}.")
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(f"SAM needs automatic optimization, got {name}.automatic_optimization=False.")
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise MisconfigurationException(f"SAM needs the batch: {name}.training_step must not take dataloader_iter.")
    require_whole_weights(trainer, "SAM")
    if has_static_graph(trainer):
        raise MisconfigurationException(
            "DDP's static_graph=True allows no second run of a step: leave static_graph out."
        )


torch.serialization.add_safe_globals([SAM])  # a checkpoint with a SAM among its hyperparameters loads weights_only
