"""The report on a machine tells the truth: of this one, of one without compilers, of one without DeepSpeed."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_tricks as lt
from lightning_tricks.advisor.environment import Device, Environment, environment_report, preset_status
from lightning_tricks.core.install import pip_install
from tests.device.devices import CUDA, device
from tests.nets import quiet
from tests.ranks import printed, run_alone

ZERO = [row["name"] for row in lt.presets() if row["strategy"] == "ZeROPreset"]


# -- what a preset misses, by a table ---------------------------------------------------------------------------------

A100 = Device("cuda", "A100", 80 * 2**30, True)
T4 = Device("cuda", "T4", 16 * 2**30, False)
CPU = Device("cpu", "x86_64", 64 * 2**30, True)
FULL = Environment(
    versions={"python": "3.12", "torch": "2.8", "lightning": "2.6", "deepspeed": "0.19.8", "ray": None},
    devices=(A100, A100),
    backends=("gloo", "nccl"),
    tools={"compiler": "/usr/bin/g++", "ninja": "/usr/bin/ninja", "nvcc": "/usr/local/cuda/bin/nvcc", "libaio": "yes"},
)


def without(*tools: str, **changes: Any) -> Environment:
    return replace(FULL, tools={**FULL.tools, **dict.fromkeys(tools)}, **changes)


def versions(**changes: str | None) -> dict[str, str | None]:
    return {**FULL.versions, **changes}


@pytest.mark.parametrize("name", [row["name"] for row in lt.presets()])
def test_nothing_is_missing_where_there_is_everything(name: str) -> None:
    assert status(name, FULL) == (name, "runs", (), ())


def status(name: str, found: Environment) -> tuple[str, str, tuple[str, ...], tuple[str, ...]]:
    row = next(row for row in lt.presets() if row["name"] == name)
    got = preset_status(row, found)
    return got.name, got.status, got.reasons, got.remedies


@pytest.mark.parametrize(
    ("name", "found", "expected", "reason", "remedy"),
    [
        ("ddp_bf16", replace(FULL, devices=(A100, T4)), "slower", "no bf16 on T4", "use ddp_fp16"),
        ("fsdp2_bf16", replace(FULL, devices=(T4,)), "slower", "no bf16 on T4", "use a preset in fp16"),
        ("ddp_fp16", replace(FULL, devices=(T4,)), "runs", "", ""),
        ("single_fp16", replace(FULL, devices=(CPU,)), "slower", "fp16 is slow on a CPU", "use the preset in bf16"),
        ("single_bf16", replace(FULL, devices=(CPU,), backends=()), "slower", "no CUDA device", ""),
        ("ddp_bf16", replace(FULL, devices=(CPU,), backends=()), "cannot run", "without gloo", "pytorch.org"),
        ("ddp_bf16", replace(FULL, backends=("gloo",)), "cannot run", "without nccl", "pytorch.org"),
        ("single_bf16", replace(FULL, backends=("gloo",)), "runs", "", ""),
        ("zero3_bf16", without("nvcc"), "slower", "no nvcc, for FusedAdam", "CUDA_HOME"),
        ("zero3_offload_bf16", without("nvcc"), "runs", "", ""),
        (
            "zero3_offload_bf16",
            without("compiler"),
            "slower",
            "no C++ compiler, for DeepSpeedCPUAdam",
            "apt install g++",
        ),
        ("zero3_offload_bf16", without("ninja"), "slower", "no ninja, for DeepSpeedCPUAdam", "pip install ninja"),
        ("zero3_nvme_bf16", without("libaio"), "cannot run", "no libaio", "apt install libaio-dev"),
        ("zero3_nvme_bf16", without("compiler", "libaio"), "cannot run", "no C++ compiler, for DeepSpeed's", "g++"),
        ("zero3_nvme_bf16", without("ninja"), "cannot run", "no ninja, for DeepSpeed's async_io", "ninja"),
        ("ddp_bf16", without("compiler", "ninja", "nvcc", "libaio"), "runs", "", ""),
        ("zero1_bf16", without(versions=versions(deepspeed=None)), "cannot run", "not installed", "pip install 'light"),
        ("zero1_bf16", without(versions=versions(deepspeed="0.18.9")), "cannot run", "older than 0.19.8", "install -U"),
        ("zero2_fp16", without(deepspeed_fp16=False), "cannot run", "support fp16 on this cuda", "in bf16"),
        ("zero2_bf16", without(deepspeed_fp16=False), "runs", "", ""),
        (
            "zero1_bf16",
            without(versions=versions(deepspeed=None), broken={"deepspeed": "MissingCUDAException: no CUDA_HOME"}),
            "cannot run",
            "MissingCUDAException: no CUDA_HOME",
            "pip install -U deepspeed",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(
    name: str, found: Environment, expected: str, reason: str, remedy: str
) -> None:
    _, got, reasons, remedies = status(name, found)
    assert got == expected
    assert reason in "; ".join(reasons)
    assert remedy in "; ".join(remedies)
    assert bool(reasons) == (expected != "runs")


# -- this machine -----------------------------------------------------------------------------------------------------

REPORT = """
import sys
{before}
from lightning_tricks_cli.main import main
assert main(["doctor", "--json"]) == 0
{after}
"""
BLOCKED = """
for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
    del sys.modules[name]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
sys.meta_path.insert(0, Blocker())
"""
UNCOMPILED = """
from deepspeed.ops.adam import DeepSpeedCPUAdam
import torch
try:
    DeepSpeedCPUAdam([torch.zeros(1, requires_grad=True)])
except Exception:
    pass
else:
    raise AssertionError("it can be compiled")
"""


def reported(tmp_path: Path, before: str = "", after: str = "", **environment: str) -> dict[str, Any]:
    program = REPORT.format(before=before, after=after)
    report = json.loads(run_alone(printed_with, program, {"TORCH_EXTENSIONS_DIR": str(tmp_path), **environment}))
    return {**report["environment"], "presets": {each["name"]: each for each in report["presets"]}}


def printed_with(program: str, environment: dict[str, str]) -> str:
    os.environ.update(environment)
    return printed(program)


def test_a_machine_without_compilers(tmp_path: Path) -> None:
    report = reported(tmp_path, after=UNCOMPILED, PATH=str(tmp_path))
    assert (report["tools"]["compiler"], report["tools"]["ninja"]) == (None, None)
    offload, nvme = report["presets"]["zero2_offload_bf16"], report["presets"]["zero3_nvme_bf16"]
    assert offload["status"] == "slower"
    assert "no C++ compiler, for DeepSpeedCPUAdam: AdamW is torch's" in offload["reasons"]
    assert offload["remedies"] == ["apt install g++", "pip install ninja"]
    assert nvme["status"] == "cannot run"
    assert report["presets"]["ddp_bf16"]["status"] != "cannot run"


def test_a_machine_without_deepspeed(tmp_path: Path) -> None:
    report = reported(tmp_path, before=BLOCKED)
    assert report["versions"]["deepspeed"] is None
    for name, preset in report["presets"].items():
        assert (preset["status"] == "cannot run") == (name in ZERO)
        if name in ZERO:
            assert preset["reasons"][0] == "deepspeed is not installed"
            assert preset["remedies"][0] == pip_install("deepspeed")


def test_this_machine() -> None:
    report = environment_report()
    found = report.environment
    assert found.versions["python"] == platform.python_version()
    assert found.versions["torch"] == torch.__version__
    assert ("nccl" in found.backends) == torch.distributed.is_nccl_available()
    assert found.devices[0].memory > 2**30
    assert [preset.name for preset in report.presets] == [row["name"] for row in lt.presets()]
    for preset in report.presets:
        if preset.status != "cannot run":
            L.Trainer(strategy=preset.name, **quiet)
    assert json.loads(json.dumps(report.to_dict()))["environment"]["versions"] == found.versions


@pytest.mark.parametrize("on", CUDA)
def test_a_gpu(on: str) -> None:
    with device(on):
        report = environment_report()
        total = torch.cuda.get_device_properties(0).total_memory
    found = report.environment.devices[0]
    assert (found.kind, found.memory) == ("cuda", total)
    single = next(preset for preset in report.presets if preset.name == "single_bf16")
    assert single.status == ("runs" if found.bf16 else "slower")
