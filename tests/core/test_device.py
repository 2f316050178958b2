"""What the host learns from the device, and how often it waits for it."""

from __future__ import annotations

import pytest
import torch

from lightning_tricks.core.device import fetched, reached
from tests.device.devices import EVERY, device


@pytest.mark.parametrize("on", ["host cpu", *EVERY])
def test_tensors_come_together(on: str) -> None:
    given = [torch.tensor(1.5), torch.tensor([[2, 3], [4, 5]]), torch.tensor([True, False]), torch.zeros(0, 3)]
    with device(on) as there:
        tensors = [each.to(there.name) for each in given]
        with there.waits(at_most=1):
            found = fetched(tensors)
    assert [each.device.type for each in found] == ["cpu"] * 4
    for one, expected in zip(found, given, strict=True):
        assert torch.equal(one, expected.float())
    assert fetched([]) == []


@pytest.mark.parametrize("on", EVERY)
def test_what_was_copied_is_there_when_the_device_has_come_to_it(on: str) -> None:
    with device(on) as there:
        x = torch.ones(1000, device=there.name)
        with there.waits(at_most=0):
            for number in range(2, 6):
                x.fill_(float(number))
                if number == 3:
                    copied, wait = x.to("cpu", non_blocking=True, copy=True), reached(x.device)
        wait()
        wait()
        assert copied.eq(3).all()
        if there.simulation is not None:
            assert not there.simulation.races


def test_a_simulated_device_finds_a_copy_that_is_read_before() -> None:
    with device("simulated cuda") as there:
        copied = torch.ones(3, device=there.name).to("cpu", non_blocking=True)
        wait = reached(torch.device(there.name))
        copied.sum()
        wait()
        copied.sum()
    assert [race.what for race in there.simulation.races] == [  # type: ignore[union-attr]
        "reads a non_blocking copy, for which nobody has waited"
    ]
