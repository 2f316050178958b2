"""Refuses network changes that the optimizer, already built, would not train."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks.core.call_stack import callers
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.trainer import is_fitting

# The hooks of a fit before its optimizers are made; in a second fit the Trainer still has those of the first.
_EARLY = ("prepare_data", "setup", "configure_model", "configure_sharded_model", "configure_optimizers")


def require_before_training(model: nn.Module, change: str) -> None:
    """Raise if this call comes from a fit that has made the optimizers of ``model``.

    The Trainer is found on the call stack, so ``model`` may be any part of the LightningModule.

    Args:
        model: The network that is about to be changed.
        change: The name of the function that changes it, for the error message.

    Raises:
        MisconfigurationException: If an optimizer of a running fit holds parameters of the network.
    """
    for trainer in (owner for owner in callers() if isinstance(owner, L.Trainer) and is_fitting(owner)):
        hook = trainer.lightning_module._current_fx_name
        held = {id(weight) for optimizer in trainer.optimizers for weight in weights_of(optimizer)}
        flat = bool(held) and engine_of(trainer).is_deepspeed  # DeepSpeed's optimizer holds flat copies
        if hook not in _EARLY and (flat or any(id(weight) in held for weight in model.parameters())):
            raise MisconfigurationException(
                f"{change} must change a network before its optimizer is made, which would not train new parameters,"
                f" got one in training ({hook or 'fit'}): call it in __init__, setup or configure_model."
            )
