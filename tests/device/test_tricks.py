"""Every trick trains on a device what it trains on the CPU, keeps everything there, and does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Enrolment
from tests.device.devices import CPU, Device, device
from tests.device.runs import Fit, bare, beyond, fit, needs_of
from tests.device.waits import waits_of
from tests.nets import assert_close, assert_equal

OTHER_BRANCH = ("AutoClip",)  # computes with numbers on the CPU, and with tensors on a device
OTHER_NUMBERS = ("NEFTune",)  # draws random numbers on the device, of a generator of its own
OTHER_MATHS = ("Float8",)  # torchao computes scales in float64, which not all devices have


def cases() -> list[Any]:
    """All pairs of a precision and a trick; quick are every third one in fp32, and every ninth in each other."""

    def pair(precision: str, name: str, number: int) -> Any:
        quick = not SETTINGS[name].twin and number % (3 if precision == "fp32" else 9) == 0
        return pytest.param(precision, name, marks=[] if quick else [pytest.mark.slow])

    shifts = {"fp32": 0, "bf16": 1, "fp16": 3}
    return [
        pair(precision, name, shift + number)
        for precision, shift in shifts.items()
        for number, (name, trick) in enumerate(SETTINGS.items())
        if precision not in trick.refused
    ]


def on_a_device(trick: Enrolment, precision: str, folder: Path, **settings: Any) -> Fit:
    lacks = [] if precision == "fp16" or trick in [SETTINGS[name] for name in OTHER_MATHS] else [torch.float64]
    with device("simulated cuda", lacks=lacks) as there:
        return fit(trick, precision, folder, there, **settings)


@cache
def plain(precision: str, *needs: Any) -> Fit:
    """A fit without a trick, of a network with what one needs."""
    with TemporaryDirectory() as folder:
        return on_a_device(bare(*needs), precision, Path(folder))


@pytest.mark.few(2)
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


def quick_every_sixth(first: int) -> list[Any]:
    names = enumerate(SETTINGS, first)
    return [pytest.param(name, marks=[] if number % 6 == 0 else [pytest.mark.slow]) for number, name in names]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, *case.values, marks=case.marks)
        for first, kind in enumerate(("mps", "xpu"), 2)
        for case in quick_every_sixth(first)
    ],
)
def test_a_device_that_lacks_types_of_numbers_trains_the_same(kind: str, name: str, tmp_path: Path) -> None:
    trick = SETTINGS[name]
    only = {"strategy": lambda: SingleDeviceStrategy(f"{kind}:0")}  # which "auto" makes of an accelerator it knows
    with device(f"simulated {kind}") as there:
        if name in OTHER_MATHS:
            refused = rf"rounds by float64 and float8, which torch does not do on a device of type '{kind}'"
            with pytest.raises(MisconfigurationException, match=refused):
                fit(trick, "fp32", tmp_path, there, **only)
            return
        found = fit(trick, "fp32", tmp_path / "a", there, **only)
    expected = fit(trick, "fp32", tmp_path / "b", CPU)
    (assert_close if name in OTHER_BRANCH else assert_equal)(found.weights, expected.weights)
    assert found.devices == {kind}
    assert found.races == []


class ListsForTuples(TorchCheckpointIO):
    """Saves lists in place of tuples, as Lightning's XLACheckpointIO does."""

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(self.listed(checkpoint), *args, **kwargs)

    def listed(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.listed(item) for key, item in value.items()}
        return [*map(self.listed, value)] if isinstance(value, list | tuple) else value


@pytest.mark.few(2)
@pytest.mark.parametrize("name", quick_every_sixth(4))
def test_a_move_may_make_new_parameters_and_a_checkpoint_lists_of_tuples(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are so on XLA."""
    replaces = torch.__future__.get_overwrite_module_params_on_conversion
    monkeypatch.setattr(torch.__future__, replaces.__name__, lambda: True)
    with device("simulated cuda") as there:
        found = fit(SETTINGS[name], "fp32", tmp_path / "a", there, plugins=[ListsForTuples()])
    monkeypatch.undo()
    expected = fit(SETTINGS[name], "fp32", tmp_path / "b", CPU)
    (assert_close if name in OTHER_BRANCH else assert_equal)(found.weights, expected.weights)
    assert found.devices == {"cuda"}


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
