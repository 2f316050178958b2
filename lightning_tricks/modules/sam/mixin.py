"""Sharpness-aware minimization (SAM) for a LightningModule that one writes oneself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.core.replay.undone_fit import is_trial
from lightning_tricks.modules.sam.engine import SAMEngine
from lightning_tricks.modules.sam.rules import SAM
from lightning_tricks.modules.sam.trainer_hooks import MixinHooks

if TYPE_CHECKING:
    _Module = L.LightningModule  # what the mixin is mixed into; at run time it is a plain class
else:
    _Module = object

__all__ = ["SAMMixin"]


class SAMMixin(_Module):
    """Sharpness-aware minimization for a LightningModule: the gradient is taken at ``w + rho * g/||g||``.

    Every training batch is run twice: for g, the gradient at w, and again at the perturbed weights for the gradient
    that the optimizer gets. This happens inside ``backward``, so accumulation, clipping, mixed precision, schedules and
    checkpoints work by the Trainer's own arguments. Each micro-batch on each device has its own perturbation
    (m-sharpness); under FSDP2 the devices have one together. Perturbed are the weights that the optimizer trains. The
    module's own state is copied twice a step, so large tensors and lists belong in the data module.

    The second run starts from the same batch, random numbers and state as the first and logs nothing; afterwards
    buffers (BatchNorm statistics), metrics and plain attributes of the module are as the first run left them, and so
    are weights that the step itself writes by their ``.data``, such as a momentum encoder's. What a step does to
    objects outside the module (a file, an object of your own) it does twice.

    In a module with ``automatic_optimization = False`` call ``sam_backward(closure)`` in place of
    ``manual_backward(loss)``, or ``sam_step(closure)``, which also accumulates, clips and steps.

    Write the mixin *before* ``LightningModule`` and set ``sam`` on the class or in ``__init__``. ``||g||`` is logged as
    ``tricks/sam_grad_norm`` every ``log_every_n_steps``.

    Raises:
        TypeError: If the mixin comes after LightningModule.
        MisconfigurationException: At fit start or in the first step, for what cannot be right: ``sam`` is not a
            ``SAM``, ``dataloader_iter``, ``static_graph=True``, 16-bit weights, DeepSpeed, sparse gradients, reentrant
            activation checkpointing, a ``backward`` or ``configure_callbacks`` that leaves out ``super()``, a step that
            writes into its batch or, not by their ``.data``, into parameters, manual optimization that never calls SAM.

    Example:
        >>> import lightning_tricks as lt
        >>> class Net(lt.SAMMixin, L.LightningModule):
        ...     sam = lt.SAM(rho=0.05)

    References:
        Foret et al., arXiv 2010.01412.
    """

    sam: SAM = SAM()
    _sam: SAMEngine | None = None  # while a fit runs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if L.LightningModule in order and order.index(L.LightningModule) < order.index(SAMMixin):
            raise TypeError(f"SAMMixin must come first: class {cls.__name__}(SAMMixin, LightningModule).")

    @override
    def configure_callbacks(self) -> list[Callback]:
        inherited = super().configure_callbacks()
        return [*([inherited] if isinstance(inherited, Callback) else inherited), MixinHooks(self)]

    def sam_backward(self, closure: Callable[[], Tensor], optimizer: Any = None) -> Tensor:
        """Put the gradient at the perturbed weights into ``.grad``, in place of ``manual_backward(loss)``.

        Args:
            closure: A function without arguments that runs the forward pass and returns the loss, a scalar; it is
                called twice.
            optimizer: The optimizer whose weights are perturbed; None for those of all optimizers. Gradients are
                added to every weight that the loss depends on, so toggle the optimizer as in any manual optimization.

        Returns:
            The loss at the weights themselves, detached.

        Raises:
            MisconfigurationException: Outside of a fit with manual optimization, for a closure that calls backward or
                steps an optimizer, and if the gradient would be added to that of ``sam_step``.
        """
        return self._sam_by_hand("sam_backward").descend_by_hand(closure, optimizer)

    def sam_step(
        self,
        closure: Callable[[], Tensor],
        optimizer: LightningOptimizer | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
    ) -> Tensor:
        """Run ``sam_backward``; every ``accumulate``-th call clips, steps optimizer and schedulers, clears gradients.

        Call it once a batch for an optimizer; an epoch's last batch steps in any case. Schedulers of the optimizer
        follow their ``interval``: one that counts steps steps with the optimizer, one that counts epochs after the last
        batch, one on a plateau is left to you.

        Args:
            closure: A function without arguments that runs the forward pass on a micro-batch and returns the loss, a
                scalar (a mean); it is called twice.
            optimizer: The optimizer whose weights are perturbed and stepped; None if there is one only.
            accumulate: The number of calls per optimizer step, at least 1.
            clip_norm: The largest norm of the gradient, above 0; None for no clipping.

        Returns:
            The loss at the weights themselves, detached.

        Raises:
            TypeError: For a value of the wrong type, or a bare torch optimizer.
            ValueError: For a value out of range, or if ``optimizer`` is left out though there are several.
            MisconfigurationException: Outside of a fit with manual optimization, for a closure that calls backward or
                steps an optimizer, for an optimizer or its schedule that is stepped by hand as well, if the gradient
                would be added to that of ``sam_backward``, and if gradients of earlier calls were cleared.
        """
        return self._sam_by_hand("sam_step").step_by_hand(closure, optimizer, accumulate, clip_norm)

    def _sam_by_hand(self, method: str) -> SAMEngine:
        if self.automatic_optimization or self._sam is None:
            raise MisconfigurationException(
                f"{method} belongs in the training_step of a fit with automatic_optimization=False; with automatic"
                " optimization SAM works by itself."
            )
        return self._sam

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        inherited = super().backward
        if self.automatic_optimization and self._sam is not None:
            self._sam.descend(loss, lambda uphill: inherited(uphill, *args, **kwargs))
        elif self.automatic_optimization and not is_trial(self.trainer):
            raise MisconfigurationException(
                f"SAM works in a Trainer's fit, in which {type(self).__name__}.configure_callbacks must include that of"
                " super()."
            )
        else:
            if self._sam is not None:
                self._sam.closures.refuse_backward()
            inherited(loss, *args, **kwargs)

    @override
    def on_validation_model_zero_grad(self) -> None:
        if self._sam is None or not any(self._sam.steps.calls.values()):  # not while sam_step accumulates
            super().on_validation_model_zero_grad()

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        if not is_replaying():
            super().log(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_sam": None}


def is_sam(module: object) -> bool:
    """Whether a module inherits ``SAMMixin``; under ``SAMCallback`` the steps of any module run twice."""
    return isinstance(module, SAMMixin)
