"""timm's Lookahead, which shows the states of the optimizer inside."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_tricks.schedules.scheduler import prepare_hooks


def lookahead(kind: Any, inside: Optimizer, **settings: Any) -> Optimizer:
    """Put Lookahead around an optimizer.

    timm's own has an empty ``state``, so that whoever reads it (snapshots, FSDP2's checkpoints, local SGD) would miss
    the slow weights and all else, and its first step calls no hooks.

    Args:
        kind: ``timm.optim.Lookahead``.
        inside: The optimizer to put it around.
        settings: ``alpha``, the way of the slow weights to the fast ones, and ``k``, the steps between.
    """
    state = property(lambda self: self._base_optimizer.state, lambda self, _: None)
    made: Optimizer = type(kind.__name__, (kind,), {"__module__": kind.__module__, "state": state})(inside, **settings)
    prepare_hooks(made)
    return made
