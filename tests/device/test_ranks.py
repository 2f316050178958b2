"""Every trick on two devices whose collectives are NCCL's: equal ranks, the weights of two CPUs, and no more waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import ModelParallelStrategy

from tests.conformance.runs import ShardedNet
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Trick
from tests.device.devices import Device, require_devices
from tests.device.nccl import rank_device
from tests.device.runs import Fit, bare, beyond, fit, needs_of
from tests.device.waits import waits_of
from tests.few import few
from tests.nets import PlainNet
from tests.ranks import Cases, run_cases

SHARE = (  # something with the other ranks, each in another way
    *("AdaptiveClip", "EMA", "GradCacheMixin", "HardExampleFilter", "MoEBalance", "Preemption", "RewindOnSpike"),
)
ENGINES = [
    pytest.param(engine, name, marks=[] if name in SHARE and engine == "DDP" else [pytest.mark.slow])
    for engine in ("DDP", "FSDP2")
    for name, trick in SETTINGS.items()
    if engine not in trick.refused
    # When a folder is loaded, torch steps the optimizer, which those of schedulefree allow amid training only.
    and (engine, name) != ("FSDP2", "ScheduleFree")
]


def two_devices(trick: Trick, folder: Path, engine: str, there: Device) -> Fit:
    fsdp = partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    base, strategy = (ShardedNet, fsdp) if engine == "FSDP2" else (PlainNet, lambda: "ddp")
    return fit(trick, "fp32", folder, there, base, strategy, devices=2)


@cache
def plain(folder: Path, engine: str, *needs: Any) -> Fit:
    with rank_device("simulated cuda") as there:
        return two_devices(bare(*needs), folder, engine, there)


def trained(case: tuple[str, str], folder: str, on: str) -> dict[str, Any]:
    """What this rank finds of a trick."""
    engine, name = case
    trick, here = SETTINGS[name], Path(folder, on, engine, name)
    with rank_device(on) as there:
        found = two_devices(trick, here, engine, there)
    told = {"weights": {name: value.numpy() for name, value in found.weights.items()}, "devices": found.devices}
    if there.simulation is not None:
        usual = plain(Path(folder, engine, "plain"), engine, *needs_of(trick))
        told["logged"], told["steps"] = beyond(found.logged, usual.logged), beyond(found.steps, usual.steps)
        told["where"] = [f"{wait.what} {wait.where}" for step in found.logged for wait in step if wait.ours]
        told["races"] = found.races
    return told


@pytest.fixture(scope="module")
def found(
    selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], list[dict[str, Any]]]:
    """What the ranks find in a place, all tricks in the same two processes."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    cases = [(engine, name) for engine in selected("engine") for name in selected("name", engine=engine)]

    @cache
    def of(on: str) -> Cases:
        return run_cases(trained, cases, folder, on)

    return lambda on, engine, name: of(on)[engine, name]


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    for key, value in one["weights"].items():
        assert abs(value - other["weights"][key]).max() <= tolerance, key


@pytest.mark.parametrize(("engine", "name"), few(ENGINES, 4))
def test_two_devices_train_what_two_cpus_train(name: str, engine: str, found: Any) -> None:
    first, second = found("simulated cuda", engine, name)
    assert_same(first, second)
    assert_same(first, found("host cpu", engine, name)[0], 1e-6 if name == "AutoClip" or engine == "FSDP2" else 0.0)
    for rank in (first, second):
        assert rank["devices"] == {"cuda"}
        assert rank["races"] == []
        assert rank["logged"] <= waits_of(name)[0] + 1, rank["where"]
        assert rank["steps"] <= waits_of(name)[0], rank["where"]


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "name"), ENGINES)
def test_so_do_two_real_devices(name: str, engine: str, found: Any) -> None:
    require_devices(2)
    first, second = found("real cuda", engine, name)
    assert_same(first, second)
    assert_same(first, found("host cpu", engine, name)[0], 1e-4)
    assert first["devices"] == {"cuda"}
