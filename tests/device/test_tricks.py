"""Every trick trains on a device what it trains on the CPU, keeps everything there, and does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Trick
from tests.device.devices import CPU, Device, device
from tests.device.runs import Fit, bare, beyond, fit, needs_of
from tests.device.waits import waits_of
from tests.nets import assert_close, assert_equal

OTHER_BRANCH = ("AutoClip",)  # computes with numbers on the CPU, and with tensors on a device
OTHER_NUMBERS = ("NEFTune",)  # draws random numbers on the device, of a generator of its own
OTHER_MATHS = ("Float8",)  # torchao computes scales in float64, which not all devices have


def cases() -> list[Any]:
    """All pairs of a precision and a trick; quick are every second one in fp32, and every ninth in each other."""

    def pair(precision: str, name: str, number: int) -> Any:
        quick = not SETTINGS[name].twin and number % (2 if precision == "fp32" else 9) == 0
        return pytest.param(precision, name, marks=[] if quick else [pytest.mark.slow])

    shifts = {"fp32": 0, "bf16": 1, "fp16": 3}
    return [
        pair(precision, name, shift + number)
        for precision, shift in shifts.items()
        for number, (name, trick) in enumerate(SETTINGS.items())
        if precision not in trick.refused
    ]


def on_a_device(trick: Trick, precision: str, folder: Path, **settings: Any) -> Fit:
    lacks = [] if precision == "fp16" or trick in [SETTINGS[name] for name in OTHER_MATHS] else [torch.float64]
    with device("simulated cuda", lacks=lacks) as there:
        return fit(trick, precision, folder, there, **settings)


@cache
def plain(precision: str, *needs: Any) -> Fit:
    """A fit without a trick, of a network with what one needs."""
    with TemporaryDirectory() as folder:
        return on_a_device(bare(*needs), precision, Path(folder))


@pytest.mark.parametrize(("precision", "name"), cases())
def test_a_device_trains_the_same_and_is_not_waited_for(
    precision: str, name: str, tmp_path: Path, waits: Callable[..., None]
) -> None:
    trick = SETTINGS[name]
    found, expected = on_a_device(trick, precision, tmp_path / "a"), fit(trick, precision, tmp_path / "b", CPU)
    (assert_close if name in OTHER_BRANCH else assert_equal)(found.weights, expected.weights)
    assert found.devices == {"cuda"}
    assert found.races == []
    usual, (step, why) = plain(precision, *needs_of(trick)), waits_of(name)
    logged = beyond(found.logged, usual.logged)
    assert logged <= step + 1, [wait for each in found.logged for wait in each if wait.ours]
    # A trick that ends the fit has logged each step; a GradScaler waits when it tells its scale.
    unlogged = beyond(found.steps, usual.steps)
    assert unlogged <= step + (precision == "fp16"), [wait for each in found.steps for wait in each if wait.ours]
    if precision == "fp32":
        waits(name, step, max(logged, 0), why)


TOLERANCES = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}  # of other kernels, which add in another order


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "name"), cases())
def test_so_does_a_real_device(precision: str, name: str, tmp_path: Path) -> None:
    trick = SETTINGS[name]
    still = precision != "fp16" and name != "Compile" and waits_of(name)[0] == 0  # compiling may wait
    found = fit(trick, precision, tmp_path / "a", Device("cuda"), still=still)
    expected = fit(trick, precision, tmp_path / "b", CPU)
    if name not in OTHER_NUMBERS:
        assert_close(found.weights, expected.weights, TOLERANCES[precision])
    assert found.devices == {"cuda"}
