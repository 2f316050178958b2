"""The backward pass that ends a step, in which DDP averages gradients; apart from the parts, which are of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn

from lightning_tricks.callbacks.fits_memory.parts import Forward, trained_weights
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.trainer import scaled
from lightning_tricks.core.out_of_memory import free_memory_of, out_of_memory
from lightning_tricks.core.replay.graph import nodes_of
from lightning_tricks.core.weights.gradients import GradientsBefore


def descend(trainer: L.Trainer, forward: Forward, before: GradientsBefore, backward: Callable[[Tensor], None]) -> bool:
    """Add the gradients of all parts to ``.grad``; those of the last one by its backward pass.

    A rank that runs out of memory meanwhile adds zeros for the rest of its weights, so that no other waits for it.

    Args:
        trainer: The Trainer.
        forward: The forward pass, which is used up.
        before: The gradients before, of which copies are made where the pass adds to them.
        backward: The module's own backward pass, of a loss.
    """
    loss, forward.loss = forward.loss, None
    assert loss is not None, "a forward pass is used once"
    weights = trained_weights(trainer.lightning_module)
    averages = _averages_gradients(trainer)
    done: set[Tensor] = set()
    hooks = [weight.register_post_accumulate_grad_hook(done.add) for weight in weights] if averages else []
    try:
        with before.copying():
            _add(forward.gradients, forward.factor)
            if averages:  # only now, since ranks may drop what DDP has prepared for in a forward pass
                prepare_for_backward(trainer.strategy.model, loss)  # type: ignore[arg-type]
            try:
                backward(scaled(trainer, loss))
            except Exception as error:
                if averages and out_of_memory(error):
                    used = {node.variable for node in nodes_of(loss) if hasattr(node, "variable")}
                    del loss
                    free_memory_of(error)
                    _add_zeros(used - done)
                raise
    finally:
        for hook in hooks:
            hook.remove()
    return True


def _averages_gradients(trainer: L.Trainer) -> bool:
    """Whether DDP averages gradients over ranks in a backward pass now."""
    model: Any = trainer.strategy.model
    return engine_of(trainer) is Engine.DDP and bool(model.require_backward_grad_sync)


def _add(gradients: list[tuple[nn.Parameter, Tensor]], factor: Tensor | None) -> None:
    """Add gradients, times a factor, to those of weights, in new tensors; the list is emptied."""
    while gradients:
        assert factor is not None, "known with the gradients"
        weight, gradient = gradients.pop()
        gradient = gradient * factor
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _add_zeros(weights: set[Tensor]) -> None:
    """Take part in what the other ranks wait for: the average of the gradients that this rank does not have."""
    if weights:
        torch.stack([(weight * 0).sum().float() for weight in weights]).sum().backward()
