"""Presets in real workers of Ray Train."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_tricks.checkpoints import consolidate
from lightning_tricks.examples.digits import Digits, DigitsData
from lightning_tricks.strategies.ray import ray_trainer
from tests.nets import assert_close, quiet
from tests.ranks import run_ranks

ROOT = Path(__file__).parent.parent.parent
STEPS = 30  # in two epochs
FAST = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.mark.parametrize("name", ["accelerator", "devices", "num_nodes"])
def test_what_ray_decides_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"from Ray, got {name}\. Pass ScalingConfig"):
        ray_trainer("ddp_bf16", **{name: 2})


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-tricks\[ray\]"):
        ray_trainer("ddp_bf16")


def in_ray(*arguments: str) -> str:
    """What a script of its own Ray, all of which ends with it, prints."""
    environment = {**os.environ, **FAST, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=900)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


with_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: make test-all")


def without_ray(path: str) -> None:
    L.seed_everything(0)
    run = L.Trainer(**{**quiet, "devices": 2, "max_epochs": -1, "max_steps": STEPS, "strategy": "ddp_bf16"})
    run.fit(Digits(), datamodule=DigitsData(batch_size=32))
    run.save_checkpoint(path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same in two processes without Ray, which nothing disturbs."""
    path = tmp_path_factory.mktemp("expected") / "last.ckpt"
    run_ranks(without_ray, str(path))
    return torch.load(path, weights_only=True)


@pytest.mark.slow
@with_ray
def test_the_script_trains_as_two_processes_do(expected: dict[str, Any], tmp_path: Path) -> None:
    options = ["--steps", str(STEPS), "--storage", str(tmp_path / "storage")]
    output = in_ray(str(ROOT / "configs/multi_node/ray_train.py"), *options)
    found = torch.load(re.findall(r"last checkpoint: (\S+)", output)[0], weights_only=True)
    assert found["global_step"] == expected["global_step"] == STEPS
    assert_close(found["state_dict"], expected["state_dict"], 1e-6)


@pytest.fixture(scope="module")
def in_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    output = in_ray("-m", "tests.strategies.ray_child", str(folder), str(STEPS))
    return json.loads(re.findall("FOUND (.*)", output)[0])


@pytest.mark.slow
@with_ray
def test_the_trainer_is_what_ray_says(in_workers: dict[str, Any]) -> None:
    facts = {"device": "cpu", "devices": 2, "nodes": 1, "world": 2, "environment": True}
    assert in_workers["facts"] == [{**facts, "precision": "bf16-mixed", "preset": "ddp_bf16"}] * 2
    assert re.match("ray_trainer must be called .* got a call from outside. Call it in", in_workers["outside"])


@pytest.mark.slow
@with_ray
@pytest.mark.parametrize("how", ["failed", "killed"])
def test_a_run_that_failed_ends_as_one_that_nothing_disturbs(
    how: str, in_workers: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Also where a checkpoint was never finished, and an earlier one or none is used."""
    found = torch.load(in_workers[how], weights_only=True)
    assert found["global_step"] == STEPS
    assert_close(found["state_dict"], expected["state_dict"], 1e-6)


@pytest.mark.slow
@with_ray
def test_a_sharded_run_whose_worker_was_killed_goes_on(
    in_workers: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    consolidate(in_workers["sharded"], tmp_path / "weights.pt")
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert f"step={STEPS}" in in_workers["sharded"]
    assert_close(found, expected["state_dict"], 1e-5)


@pytest.mark.slow
@with_ray
def test_one_worker_is_one_device(in_workers: dict[str, Any]) -> None:
    L.seed_everything(0)
    run = L.Trainer(**{**quiet, "max_epochs": -1, "max_steps": STEPS, "strategy": "single_bf16"})
    module = Digits()
    run.fit(module, datamodule=DigitsData(batch_size=32))
    found = torch.load(in_workers["alone"], weights_only=True)
    assert_close(found["state_dict"], module.state_dict(), 1e-6)
