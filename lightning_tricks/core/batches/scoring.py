"""The losses of samples before training on them; apart from the filter, whose hooks only choose by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.batches.form import in_form_of, require_no_attributes
from lightning_tricks.core.batches.paths import Path, described, get, is_attention_mask, put, spelled, walk
from lightning_tricks.core.lightning.trainer import step_arguments
from lightning_tricks.core.mixed_targets.loss_plan import ChangeArguments, LossPlan
from lightning_tricks.core.mixed_targets.target import mixed_target
from lightning_tricks.core.replay.own_batch import copy_containers, forbid_writes
from lightning_tricks.core.replay.trial import trial_steps

_TRICK = "HardExampleFilter"


def per_sample_losses(
    trainer: L.Trainer,
    batch: Any,
    targets: Sequence[Path],
    change_arguments: ChangeArguments | None,
    gradients: bool = False,
) -> Tensor | None:
    """The losses of a batch's samples (B,), by a training step without gradients that leaves no trace.

    Several losses of the step are summed. None if the step returns None, to skip the batch.

    Args:
        trainer: The Trainer.
        batch: The batch.
        targets: The paths of the targets.
        change_arguments: What another trick changes in the losses, as in a ``LossPlan``.
        gradients: Whether the step differentiates inside.

    Raises:
        MisconfigurationException: If the step computes no loss of ``torch.nn.functional`` from the targets.
    """
    module, found = trainer.lightning_module, list[Tensor]()
    plan = LossPlan(record=found.append)
    plan.change_arguments = change_arguments
    for path in targets:
        require_no_attributes(target := get(batch, path), spelled(path), _TRICK)
        batch = put(batch, path, mixed_target([target], plan))
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
            image = get(batch, path)
            small = F.interpolate(image, (height, width), mode="bilinear")
            batch = put(batch, path, in_form_of(small, image, spelled(path), _TRICK))
        rows = (torch.arange(height, device=x.device) * sides[0] // height)[:, None]
        columns = torch.arange(width, device=x.device) * sides[1] // width
        return _changed(
            batch, lambda path, leaf: leaf.ndim > 2 and leaf.shape[-2:] == sides, lambda mask: mask[..., rows, columns]
        )
    if not x.is_floating_point() and x.ndim == 2:
        tokens = max(1, round(scale * x.shape[1]))

        def is_of_tokens(path: Path, leaf: Tensor) -> bool:  # and no labels of samples
            known = leaf.ndim > 2 or not leaf.is_floating_point() or is_attention_mask(path)
            return known and leaf.shape[:2] == x.shape

        return _changed(batch, is_of_tokens, lambda leaf: leaf[:, :tokens])
    raise MisconfigurationException(
        f"score_scale={scale} shrinks images (B, C, H, W) in floating-point numbers, to which on_after_batch_transfer"
        f" may convert them, or integer sequences (B, T), got a batch with {described(batch)}: name inputs=, or remove"
        " score_scale."
    )


def _changed(batch: Any, suits: Callable[[Path, Tensor], bool], change: Callable[[Tensor], Tensor]) -> Any:
    for path, leaf in walk(batch):
        if isinstance(leaf, Tensor) and suits(path, leaf):
            batch = put(batch, path, in_form_of(change(leaf), leaf, spelled(path), _TRICK))
    return batch
