"""Every trick on two devices whose collectives are NCCL's: equal ranks, the weights of two CPUs, and no more waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.conformance.runs import ShardedNet
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Trick
from tests.device.nccl import rank_with_nccl
from tests.device.runs import Fit, bare, beyond, fit, needs_of
from tests.device.waits import waits_of
from tests.nets import PlainNet
from tests.ranks import Cases, run_cases

SHARE = (  # something with the other ranks, each in another way
    *("AdaptiveClip", "EMA", "GradCacheMixin", "HardExampleFilter", "MoEBalance", "Preemption", "RewindOnSpike"),
)
CASES = [
    pytest.param(engine, name, marks=[] if name in SHARE and engine == "DDP" else [pytest.mark.slow])
    for engine in ("DDP", "FSDP2")
    for name, trick in SETTINGS.items()
    if engine not in trick.refused
]


def two_devices(trick: Trick, folder: Path, engine: str, *, simulate: bool) -> Fit:
    fsdp = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    base, strategy = (ShardedNet, fsdp) if engine == "FSDP2" else (PlainNet, lambda: "ddp")
    with rank_with_nccl() if simulate else nullcontext() as simulation:
        return fit(trick, "fp32", folder, simulation, base, strategy, devices=2)


@cache
def plain(folder: Path, engine: str, *needs: Any) -> Fit:
    return two_devices(bare(*needs), folder, engine, simulate=True)


def trained(case: tuple[str, str], folder: str) -> dict[str, Any]:
    """What this rank has found of a trick."""
    engine, name = case
    trick, here = SETTINGS[name], Path(folder, engine, name)
    here.mkdir(parents=True, exist_ok=True)
    found, expected = (two_devices(trick, here / str(on), engine, simulate=on) for on in (True, False))
    usual = plain(Path(folder, engine, "plain"), engine, *needs_of(trick))
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
    folder = str(tmp_path_factory.mktemp("ranks"))
    cases = [(engine, name) for engine in selected("engine") for name in selected("name", engine=engine)]
    return run_cases(trained, cases, folder)


@pytest.mark.parametrize(("engine", "name"), CASES)
def test_two_devices_train_what_two_cpus_train(name: str, engine: str, found: Cases) -> None:
    for rank in found[engine, name]:
        first = found[engine, name][0]["weights"]
        assert all((value == first[key]).all() for key, value in rank["weights"].items())
        close = 1e-6 if name == "AutoClip" or engine == "FSDP2" else 0.0
        assert all(abs(value - rank["expected"][key]).max() <= close for key, value in rank["weights"].items())
        assert rank["devices"] == {"cuda"}
        assert rank["races"] == []
        assert rank["logged"] <= waits_of(name)[0] + 1, rank["where"]
        assert rank["steps"] <= waits_of(name)[0], rank["where"]
