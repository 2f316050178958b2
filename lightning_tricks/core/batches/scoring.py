"""The losses of samples before training on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.batches.paths import Path, described, get, mapped, put
from lightning_tricks.core.lightning.trainer import step_arguments
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.target import mixed_target
from lightning_tricks.core.replay.rerun import copy_containers, forbid_writes
from lightning_tricks.core.replay.trial import trial_steps


def per_sample_losses(
    trainer: pl.Trainer, batch: Any, targets: Sequence[Path], gradients: bool = False
) -> Tensor | None:
    """The losses of a batch's samples (B,), by a training step without gradients that leaves no trace.

    Several losses of the step are summed. None if the step returns None, to skip the batch.

    Args:
        trainer: The Trainer.
        batch: The batch.
        targets: The paths of the targets.
        gradients: Whether the step differentiates inside.

    Raises:
        MisconfigurationException: If the step computes no loss of ``torch.nn.functional`` from the targets.
    """
    module, found = trainer.lightning_module, list[Tensor]()
    plan = LossPlan(record=found.append)
    for path in targets:
        batch = put(batch, path, mixed_target([get(batch, path)], plan))
    arguments = step_arguments(module, copy_containers(batch), trainer.fit_loop.batch_idx + 1)
    with trial_steps(trainer, module, gradients=gradients), forbid_writes(module, batch):
        output = trainer.strategy.training_step(*arguments)
    plan.open = False
    if output is None:
        return None
    if not found:
        raise MisconfigurationException(
            f"{type(module).__name__}.training_step computed no loss of torch.nn.functional from the target, by which"
            ' HardExampleFilter(mode="prune") compares samples. Compute one, or name another target=.'
        )
    losses = torch.stack(found).detach()
    missing = losses == -torch.inf  # some of the losses may have no entry of a sample
    return losses.masked_fill(missing, 0.0).sum(0).masked_fill(missing.all(0), -torch.inf)


def shrunk(batch: Any, inputs: Sequence[Path], scale: float) -> Any:
    """The batch with smaller images or shorter sequences; masks and labels of their size shrink with them.

    Raises:
        MisconfigurationException: If the inputs are neither images (B, C, H, W) nor integer sequences (B, T).
    """
    x = get(batch, inputs[0])
    if x.is_floating_point() and x.ndim == 4:
        sides = x.shape[-2:]
        height, width = (max(1, round(scale * side)) for side in sides)
        for path in inputs:
            batch = put(batch, path, F.interpolate(get(batch, path), (height, width), mode="bilinear"))
        rows = (torch.arange(height, device=x.device) * sides[0] // height)[:, None]
        columns = torch.arange(width, device=x.device) * sides[1] // width
        return _changed(
            batch, lambda leaf: leaf.ndim > 2 and leaf.shape[-2:] == sides, lambda mask: mask[..., rows, columns]
        )
    if not x.is_floating_point() and x.ndim == 2:
        tokens = max(1, round(scale * x.shape[1]))
        return _changed(
            batch,
            lambda leaf: leaf.shape[:2] == x.shape and not (leaf.ndim == 2 and leaf.is_floating_point()),  # labels
            lambda leaf: leaf[:, :tokens],
        )
    raise MisconfigurationException(
        f"score_scale={scale} shrinks images (B, C, H, W) or integer sequences (B, T), got a batch with"
        f" {described(batch)}: name inputs=, or remove score_scale."
    )


def _changed(batch: Any, suits: Callable[[Tensor], bool], change: Callable[[Tensor], Tensor]) -> Any:
    return mapped(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) and suits(leaf) else leaf)
