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
from tests.conformance.trick import NEEDS, Trick
from tests.device.python_names import simulated
from tests.device.runs import Fit, beyond, fit
from tests.device.waits import waits_of
from tests.nets import assert_close, assert_equal

OTHER_BRANCH = ("AutoClip",)  # computes with numbers on the CPU, and with tensors on a device
OTHER_MATHS = ("Float8",)  # torchao computes scales in float64, which not all devices have


def cases() -> list[Any]:
    """All pairs of a precision and a trick; quick are fp32, and every sixth trick in each other precision."""

    def pair(precision: str, name: str, number: int) -> Any:
        quick = not SETTINGS[name].twin and (precision == "fp32" or number % 6 == 0)
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
    with simulated(lacks=lacks) as simulation:
        return fit(trick, precision, folder, simulation, **settings)


@cache
def plain(precision: str, needs: tuple[bool, ...], refused: tuple[str, ...]) -> Fit:
    """A fit without the trick, of the same network."""
    bare = Trick(**dict(zip(NEEDS, needs, strict=True)), refused=refused)
    with TemporaryDirectory() as folder:
        return on_a_device(bare, precision, Path(folder))


@pytest.mark.parametrize(("precision", "name"), cases())
def test_a_device_trains_the_same_and_is_not_waited_for(
    precision: str, name: str, tmp_path: Path, waits: Callable[..., None]
) -> None:
    trick = SETTINGS[name]
    found, expected = on_a_device(trick, precision, tmp_path / "a"), fit(trick, precision, tmp_path / "b")
    (assert_close if name in OTHER_BRANCH else assert_equal)(found.weights, expected.weights)
    assert found.devices == {"cuda"}
    assert found.races == []
    usual = plain(precision, tuple(getattr(trick, need) for need in NEEDS), trick.refused)
    step, why = waits_of(name)
    here = beyond(found.logged, usual.logged)
    assert here <= step + 1, [wait for one in found.logged for wait in one if wait.ours]
    if found.steps:  # of a trick that ends the fit there are none that do not log
        tells = precision == "fp16"  # a GradScaler waits when it tells its scale
        assert beyond(found.steps, usual.steps) <= step + tells, [w for one in found.steps for w in one if w.ours]
    if precision == "fp32":
        waits(name, step, max(here, 0), why)
