"""A step that runs a second time on an XLA device draws the same random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import lightning_tricks as lt
from tests.core.test_random_numbers import require_the_same_numbers
from tests.device.devices import Device
from tests.nets import Net, build, fit


def test_the_devices_generator_is_among_them(xla: Device) -> None:
    require_the_same_numbers(torch.device(xla.name, 0))


def test_both_passes_of_sam_have_the_same_dropout(xla: Device) -> None:
    masks: list[torch.Tensor] = []

    class Dropped(lt.SAMMixin, Net):
        sam = lt.SAM(0.1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            mask = F.dropout(torch.ones(len(x), 8, device=self.device), 0.5)
            masks.append(mask.cpu())
            return F.cross_entropy(self(x * mask), y)

    fit(build(Dropped), accelerator=xla.accelerator, max_steps=3)
    assert len(masks) == 6
    for first, second in zip(masks[::2], masks[1::2], strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(masks[0], masks[2])
