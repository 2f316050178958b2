"""Every trick on two devices whose collectives are NCCL's: equal ranks, the weights of two CPUs, and no more waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Trick
from tests.device.nccl import rank_with_nccl
from tests.device.runs import Fit, bare, beyond, fit, needs_of
from tests.device.waits import waits_of
from tests.nets import PlainNet
from tests.ranks import Cases, run_cases

SHARE = (  # something with the other ranks, each in another way
    *("AdaptiveClip", "EMA", "GradCacheMixin", "HardExampleFilter", "MoEBalance", "Preemption", "RewindOnSpike"),
    *("SkipNonFinite", "SWA"),
)
NAMES = [
    pytest.param(name, marks=[] if name in SHARE else pytest.mark.slow)
    for name, trick in SETTINGS.items()
    if "DDP" not in trick.refused
]


def two_devices(trick: Trick, folder: Path, *, simulate: bool) -> Fit:
    with rank_with_nccl() if simulate else nullcontext() as simulation:
        return fit(trick, "fp32", folder, simulation, PlainNet, strategy="ddp", devices=2)


@cache
def plain(folder: Path, *needs: Any) -> Fit:
    return two_devices(bare(*needs), folder, simulate=True)


def trained(name: str, folder: str) -> dict[str, Any]:
    """What this rank has found of a trick."""
    trick, here = SETTINGS[name], Path(folder) / name
    here.mkdir(exist_ok=True)
    found, expected = (two_devices(trick, here / str(simulate), simulate=simulate) for simulate in (True, False))
    usual = plain(Path(folder) / "plain", *needs_of(trick))
    return {
        "weights": {name: value.numpy() for name, value in found.weights.items()},
        "expected": {name: value.numpy() for name, value in expected.weights.items()},
        "devices": found.devices,
        "races": found.races,
        "logged": beyond(found.logged, usual.logged),
        "steps": beyond(found.steps, usual.steps),
        "where": [f"{wait.what} {wait.where}" for step in found.logged for wait in step if wait.ours],
    }


@pytest.fixture(scope="module")
def found(selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return run_cases(trained, selected("name"), str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", NAMES)
def test_two_devices_train_what_two_cpus_train(name: str, found: Cases) -> None:
    for rank in found[name]:
        assert all((value == found[name][0]["weights"][key]).all() for key, value in rank["weights"].items())
        close = 1e-6 if name == "AutoClip" else 0.0
        assert all(abs(value - rank["expected"][key]).max() <= close for key, value in rank["weights"].items())
        assert rank["devices"] == {"cuda"}
        assert rank["races"] == []
        assert rank["logged"] <= waits_of(name)[0] + 1, rank["where"]
        assert rank["steps"] <= waits_of(name)[0], rank["where"]
