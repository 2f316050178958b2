"""What changes batches never makes the host wait for the device: on the meta device, nothing can be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_tricks as lt
from lightning_tricks.core.batches.cutting import is_pairwise
from lightning_tricks.core.batches.pipeline import BatchContext

X, Y = torch.zeros(8, 3, 16, 16, device="meta"), torch.zeros(8, dtype=torch.long, device="meta")


class Copies(TorchDispatchMode):
    """Counts copies to the device, and those for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._to_copy and torch.device(kwargs.get("device", "cpu")).type == "meta":
            self.copies += 1
            self.waits += not kwargs.get("non_blocking", False)
        return func(*args, **kwargs)


class Reads(TorchDispatchMode):
    """Counts what is read of the values of tensors."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.nonzero)
        self.numbers += func.overloadpacket in reads
        return func(*args, **kwargs or {})


def context(*batch: Any) -> BatchContext:
    return BatchContext(batch, 0, random.Random(0))


CHANGES: dict[str, tuple[Callable[[], Any], int]] = {
    "Mixup": (lambda: lt.Mixup(1.0)._change(None, context(X, Y)), 1),  # type: ignore[arg-type]
    "Mixup of samples": (lambda: lt.Mixup(1.0, per_sample=True)._change(None, context(X, Y)), 2),  # type: ignore[arg-type]
    "CutMix": (lambda: lt.CutMix()._change(None, context(X, Y)), 1),  # type: ignore[arg-type]
    "CutOut": (lambda: lt.CutOut().of_batch(X), 1),
    "CutOut of a sample": (lambda: lt.CutOut()(X[0]), 0),
    "ColOut": (lambda: lt.ColOut().of_batch(X), 2),
    "ColOut of a sample": (lambda: lt.ColOut()(X[0]), 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_random_numbers_are_moved_to_the_device_once_and_nobody_waits(name: str) -> None:
    change, copies = CHANGES[name]
    with Copies() as seen:
        change()
    assert (seen.copies, seen.waits) == (copies, 0)


LABELS = torch.zeros(8, 6, dtype=torch.long, device="meta")
LOSSES: dict[str, tuple[torch.Tensor, Any]] = {
    "of samples": (Y, lambda z, y: F.cross_entropy(z[:, 0], y)),
    "of tokens": (LABELS, lambda z, y: F.cross_entropy(z.flatten(0, 1), y.view(-1))),
    "of tokens in dimensions": (LABELS, lambda z, y: F.cross_entropy(z.transpose(1, 2), y)),
    "of the next tokens": (
        LABELS,
        lambda z, y: F.cross_entropy(z.flatten(0, 1), F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)),
    ),
    "by hand": (LABELS, lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").mean()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_hardest_of_losses_are_chosen_without_looking_at_them(name: str) -> None:
    labels, loss_of = LOSSES[name]
    made, trick = context(X, labels), lt.HardExampleFilter(mode="loss")
    made.plan.choose = lambda losses: (trick._keep(losses, 4), 1.0)
    made.plan_targets(trick, [(1,)])
    x, y = made.finished()
    logits = x.flatten(1)[:, :24].unflatten(1, (6, 4)).requires_grad_()
    with Copies() as seen:
        loss = loss_of(logits, y)
        loss.backward()
    assert loss.shape == ()
    assert seen.waits == 0


def test_pairs_of_samples_are_told_from_features_by_one_number() -> None:
    windows = torch.arange(15.0).unfold(0, 8, 1)
    for features in (torch.rand(8, 8), windows, torch.rand(8, 8, 3)):
        with Reads() as seen:
            assert not is_pairwise(features, 8)
        assert seen.numbers == 1


@pytest.mark.parametrize("kind", [lt.Mixup, lambda: lt.HiddenMixup("layers.2")])
def test_features_are_told_from_pairs_in_the_first_batch_on_a_device(kind: Any, monkeypatch: Any) -> None:
    x, y = torch.rand(8, 8), torch.arange(8) % 2
    for on_device, reads in ((False, 3), (True, 1)):
        monkeypatch.setattr(torch.Tensor, "is_cpu", not on_device)
        trick, found = kind(), 0
        for _ in range(3):
            with Reads() as seen:
                trick._checked(context(x, y))
            found += seen.numbers
        assert found == (reads if isinstance(trick, lt.Mixup) else 0)
    mirrored = torch.cdist(x, x)
    for _ in range(2):
        with pytest.raises(MisconfigurationException, match="pairs of samples"):
            lt.Mixup()._checked(context(mirrored, y))
