"""Batches of rows with parts beside inputs and targets, steps that use them, and what is raised for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_tricks as lt
from tests.nets import PlainNet, assert_equal, build, data, fit, weights


def with_sam(kind: type[Any], **settings: Any) -> type[Any]:
    return type(f"Sharp{kind.__name__}", (lt.SAMMixin, kind), {"sam": lt.SAM(**settings)})


class AttrDict(dict[str, Any]):
    """A dictionary whose keys are attributes, as many projects have one."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def batches(collate: Callable[[Tensor, Tensor], Any]) -> DataLoader[Any]:
    return DataLoader(data(24), 8, collate_fn=lambda rows: collate(*torch.utils.data.default_collate(rows)))


def refused(kind: type[PlainNet], message: str, callbacks: list[Callback], **settings: Any) -> None:
    """A fit is refused before its first optimizer step."""
    module = build(kind)
    before = weights(module)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, callbacks=callbacks, limit_val_batches=0, **settings)
    assert_equal(weights(module), before)


ROWS = data(24).tensors


EXTRA, WEIGHT = torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), torch.linspace(0.1, 2, 24)


IDS = torch.arange(24)


mixed_loss = partial(F.cross_entropy, reduction="none")


def fed(make: Callable[[Tensor, Tensor, Tensor], Any]) -> DataLoader[Any]:
    """Batches that are made of inputs, targets and the numbers of samples."""
    batches = [make(ROWS[0][ids], ROWS[1][ids], ids) for ids in IDS.split(8)]
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


def with_extra(**extra: Tensor) -> DataLoader[Any]:
    return fed(lambda x, y, ids: {"x": x, "y": y, **{name: part[ids] for name, part in extra.items()}})


def stepping(step: Callable[[Any, Any], Tensor]) -> type[PlainNet]:
    """A module with this training step."""
    return type("Steps", (PlainNet,), {"training_step": lambda self, batch, batch_idx: step(self, batch)})
