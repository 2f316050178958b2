"""Sharpness-aware minimization (SAM)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.recorder import Step, again, micro_batches
from lightning_tricks.core.replay import ModuleState, first_run, random_numbers_of, random_state
from lightning_tricks.core.trainer import step_schedules
from lightning_tricks.modules.sam_engine import SAMEngine, loss_of
from lightning_tricks.modules.sam_rules import perturbed_weights
from lightning_tricks.modules.sam_setup import SAMCallback, check_window, require_manual


class SAMMixin(SAMEngine):
    """Sharpness-aware minimization for a LightningModule: the gradient is taken at ``w + rho * g/||g||``.

    Every training batch is run twice: for g, the gradient at w, and again at the perturbed weights for the gradient
    that the optimizer gets. This happens inside ``backward``, so accumulation, clipping, mixed precision, schedules and
    checkpoints work by the Trainer's own arguments. Each micro-batch on each device has its own perturbation
    (m-sharpness); under FSDP2 the devices have one together. Perturbed are the weights that the optimizer trains. The
    module's own state is copied twice a step, so large tensors and lists belong into the data module.

    The second run starts from the same batch, random numbers and state as the first and logs nothing; afterwards
    buffers (BatchNorm statistics), metrics and plain attributes of the module are as the first run left them. What a
    step does to objects outside the module (a file, an object of your own) it does twice.

    In a module with ``automatic_optimization = False`` call ``sam_backward(closure)`` in place of
    ``manual_backward(loss)``, or ``sam_step(closure)``, which also accumulates, clips and steps.

    Write the mixin *before* ``LightningModule`` and set ``sam`` on the class or in ``__init__``. ``||g||`` is logged as
    ``tricks/sam_grad_norm`` every ``log_every_n_steps``.

    Raises:
        TypeError: If the mixin comes after LightningModule.
        MisconfigurationException: At fit start or in the first step, for what cannot be right: ``sam`` is not a
            ``SAM``, ``dataloader_iter``, ``static_graph=True``, 16-bit weights, DeepSpeed, sparse gradients, reentrant
            activation checkpointing, a ``backward`` or ``configure_callbacks`` that leaves out ``super()``, a step that
            writes into its batch or into frozen parameters, manual optimization that never calls SAM.

    Example:
        >>> import lightning_tricks as lt
        >>> class Net(lt.SAMMixin, pl.LightningModule):
        ...     sam = lt.SAM(rho=0.05)

    References:
        Foret et al., arXiv 2010.01412.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if pl.LightningModule in order and order.index(pl.LightningModule) < order.index(SAMMixin):
            raise TypeError(f"SAMMixin must come first: class {cls.__name__}(SAMMixin, LightningModule).")

    @override
    def configure_callbacks(self) -> list[Callback]:
        inherited = super().configure_callbacks()
        return [*([inherited] if isinstance(inherited, Callback) else inherited), SAMCallback()]

    def sam_backward(self, closure: Callable[[], Tensor], optimizer: Any = None) -> Tensor:
        """Put the gradient at the perturbed weights into ``.grad``, as ``manual_backward`` the gradient at w.

        Args:
            closure: Computes the loss, from the forward pass on; is called twice.
            optimizer: Whose weights are perturbed; those of all optimizers if left out. Gradients are added to every
                weight that the loss depends on, so toggle the optimizer as in any manual optimization.

        Returns:
            The loss at the weights themselves, detached.

        Raises:
            MisconfigurationException: Outside of a fit with manual optimization.
        """
        require_manual(self, "sam_backward")
        own = self.optimizers() if optimizer is None else optimizer
        first_run()
        step = Step(partial(closure), random_state(self.device), ModuleState(self))
        loss = loss_of(closure())
        weights = perturbed_weights(self, self.sam, own if isinstance(own, list) else [own])
        self._sam_twice(self._sam_scaled(loss), step, weights, self.manual_backward)
        return loss.detach()

    def sam_step(
        self,
        closure: Callable[[], Tensor],
        optimizer: LightningOptimizer | None = None,
        accumulate: int = 1,
        clip_norm: float | None = None,
    ) -> Tensor:
        """``sam_backward``, and every so many calls one step: clip, optimizer, schedulers, ``zero_grad``.

        Call it once a batch for an optimizer; an epoch's last batch steps in any case. Schedulers of the optimizer
        follow their ``interval``: one that counts steps steps with the optimizer, one that counts epochs after the last
        batch, one on a plateau is left to you.

        Args:
            closure: Computes the loss of a micro-batch (a mean), from the forward pass on; is called twice.
            optimizer: The optimizer; may be left out if there is one only.
            accumulate: Calls that make one optimizer step, at least 1.
            clip_norm: Largest norm of the gradient, above 0; None for no clipping.

        Returns:
            The loss at the weights themselves, detached.

        Raises:
            TypeError: For a value of the wrong type, or a bare torch optimizer.
            ValueError: For a value out of range, or if ``optimizer`` is left out though there are several.
            MisconfigurationException: Outside of a fit with manual optimization.
        """
        require_manual(self, "sam_step")
        check_window(accumulate, clip_norm)
        own = self.optimizers() if optimizer is None else optimizer
        if isinstance(own, list):
            raise ValueError(f"sam_step needs one of the {len(own)} optimizers: pass optimizer=self.optimizers()[...].")
        if not isinstance(own, LightningOptimizer):
            raise TypeError(f"sam_step needs an optimizer of self.optimizers(), got {type(own).__name__}.")
        calls = self._sam_calls.get(id(own), 0) + 1
        ends = calls >= accumulate or self.trainer.is_last_batch
        with nullcontext() if ends else self._sam_unsynced():
            loss = self.sam_backward(lambda: loss_of(closure()) / accumulate, own) * accumulate
        assert self._sam_norm is not None, "just measured"
        self._sam_norm *= accumulate
        self._sam_calls[id(own)] = 0 if ends else calls
        if ends:
            if clip_norm is not None:
                limit = float(self._sam_scaled(torch.tensor(clip_norm, device=self.device)))
                self.clip_gradients(own.optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            own.step()
            own.zero_grad()
            step_schedules(self.trainer, own.optimizer)
        return loss

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        descend = partial(super().backward, *args, **kwargs)
        if not self.automatic_optimization:
            descend(loss)
            return
        if self._sam_recorder is None:
            name = type(self).__name__
            raise MisconfigurationException(
                f"SAM works in a Trainer's fit, in which {name}.configure_callbacks must include that of super()."
            )
        first = self._sam_recorder.take()
        if first is None:
            self._sam_norm = None
            descend(loss)  # a step without a perturbation
            return
        assert self._sam_held is not None, "setup comes first"
        self._sam_held.settle()  # so that the module's parameters are the optimizer's
        weights = perturbed_weights(self, self.sam, [self.optimizers()])
        if self.sam.micro_batch_size is None:
            self._sam_twice(loss, first, weights, partial(self._sam_descend, descend, 1.0))
        else:
            self._sam_micro_batches(first, weights, descend)

    def _sam_micro_batches(self, first: Step, weights: dict[Tensor, str], descend: Callable[[Tensor], None]) -> None:
        """Take each micro-batch by itself; the first run, of the whole batch, has logged and moved the statistics."""
        after, random, norms = ModuleState(self), first.random, []
        assert self.sam.micro_batch_size is not None, "asked for"
        parts = micro_batches(first, self.sam.micro_batch_size)
        try:
            for number, (share, run) in enumerate(parts, 1):
                with nullcontext() if number == len(parts) else self._sam_unsynced():
                    step = Step(again(run), random, first.state)
                    first.state.restore()
                    with random_numbers_of(random, self.device):
                        loss = self._sam_scaled(self._sam_loss(run) * share)
                        random = random_state(self.device)
                    norms.append(self._sam_twice(loss, step, weights, partial(self._sam_descend, descend, share)))
        finally:
            after.restore()
        self._sam_norm = torch.stack(norms).sum()

    def _sam_descend(self, descend: Callable[[Tensor], None], share: float, loss: Tensor) -> None:
        descend(self._sam_scaled(loss * share if share < 1 else loss))
