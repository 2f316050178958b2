"""What this machine has for training, and what each preset misses on it."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch.torch_version import TorchVersion

from lightning_tricks.strategies.presets import presets
from lightning_tricks.strategies.zero.preset import OLDEST

__all__ = ["EnvironmentReport", "environment_report"]

Status = Literal["runs", "slower", "cannot run"]


@dataclass(frozen=True)
class Device:
    """A device that a process can train on: its kind as torch names it, its memory in bytes, whether it has bf16."""

    kind: str
    name: str
    memory: int
    bf16: bool


@dataclass(frozen=True)
class Environment:
    """What was found; None for what is missing.

    Args:
        versions: Of Python and of packages; for one that is there but cannot be imported, the error is in ``broken``.
        devices: The CUDA devices, or the CPU if there are none.
        backends: Of ``torch.distributed``.
        tools: Path of the C++ compiler, ninja, nvcc and libaio, with which DeepSpeed compiles its operators.
        broken: Why a package cannot be imported.
        deepspeed_fp16: Whether DeepSpeed computes in fp16 on these devices.
    """

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    tools: dict[str, str | None]
    broken: dict[str, str] = field(default_factory=dict)
    deepspeed_fp16: bool = True


@dataclass(frozen=True)
class PresetStatus:
    """Whether a preset runs: ``"runs"``, ``"slower"`` or ``"cannot run"``, the reasons and what helps against each."""

    name: str
    status: Status
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class EnvironmentReport:
    """What ``environment_report`` has found: the machine, and the presets on it.

    Example:
        >>> report = environment_report()
        >>> [preset.status for preset in report.presets if preset.name == "single_bf16"] != ["cannot run"]
        True
    """

    environment: Environment
    presets: tuple[PresetStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON or a table."""
        return asdict(self)


def environment_report() -> EnvironmentReport:
    """Look at this machine: versions, devices, compilers; and what each strategy preset misses, with the remedy.

    A preset ``"runs"`` if nothing is missing, is ``"slower"`` if something else is taken in its place, and ``"cannot
    run"`` otherwise. DeepSpeed and Ray are imported, if they are installed.

    Returns:
        The machine and the presets; ``.to_dict()`` for JSON.

    Example:
        >>> report = environment_report()
        >>> report.environment.versions["torch"] == str(torch.__version__)
        True
    """
    found = environment()
    return EnvironmentReport(found, tuple(missing(row, found) for row in presets()))


def environment() -> Environment:
    """What this machine has, without a view to any preset."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": pl.__version__,
    }
    broken = {}
    for package in ("deepspeed", "ray"):
        versions[package], error = _imported(package)
        if error:
            broken[package] = error
    backends = ("gloo", "nccl") if torch.distributed.is_available() else ()
    have = tuple(each for each in backends if getattr(torch.distributed, f"is_{each}_available")())
    there = versions["deepspeed"] is not None
    return Environment(versions, devices_here(), have, _tools(there), broken, there and _deepspeed_fp16())


def _deepspeed_fp16() -> bool:
    with _only_errors():
        from deepspeed.accelerator import get_accelerator

        return bool(get_accelerator().is_fp16_supported())


def _imported(package: str) -> tuple[str | None, str | None]:
    """The version of a package, and if it is there but cannot be imported the error."""
    try:
        with _only_errors():
            return str(import_module(package).__version__), None
    except ModuleNotFoundError as error:
        return None, None if error.name == package else str(error)
    except Exception as error:  # DeepSpeed raises various ones
        return None, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _only_errors() -> Iterator[None]:
    """DeepSpeed logs to standard output, which is for the report."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def devices_here() -> tuple[Device, ...]:
    """The CUDA devices that this process sees, or the CPU if there are none."""
    if torch.cuda.is_available():
        native = partial(torch.cuda.is_bf16_supported, including_emulation=False)
        return tuple(_cuda_device(index, native) for index in range(torch.cuda.device_count()))
    return (Device("cpu", f"{platform.machine()}, {os.cpu_count()} cores", host_memory(), True),)


def host_memory() -> int:
    """The bytes of this machine's memory, 0 where that cannot be asked."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _cuda_device(index: int, native: Any) -> Device:
    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        return Device("cuda", properties.name, properties.total_memory, native())


def _tools(deepspeed: bool) -> dict[str, str | None]:
    """As torch and DeepSpeed look for them when they compile an operator."""
    from torch.utils import cpp_extension

    compiler = shutil.which(cpp_extension.get_cxx_compiler())
    home = cpp_extension.CUDA_HOME
    nvcc = home and shutil.which("nvcc", path=os.path.join(home, "bin"))
    libaio = ctypes.util.find_library("aio")
    if deepspeed and compiler:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        with _only_errors():
            libaio = "libaio" if AsyncIOBuilder().is_compatible() else None  # links a program with it
    ninja = shutil.which("ninja") if cpp_extension.is_ninja_available() else None
    return {"compiler": compiler, "ninja": ninja, "nvcc": nvcc, "libaio": libaio}


def missing(preset: dict[str, Any], found: Environment) -> PresetStatus:
    """What a preset, a row of ``presets()``, misses in an environment."""
    cannot = _required(preset, found)
    slower = {**_precision(preset, found), **_optimizer(preset, found)}
    if found.devices[0].kind == "cpu":
        slower["no CUDA device: trains on the CPU"] = ""
    status: Status = "cannot run" if cannot else "slower" if slower else "runs"
    reasons = cannot or slower
    return PresetStatus(preset["name"], status, tuple(reasons), tuple(filter(None, dict.fromkeys(reasons.values()))))


def _required(preset: dict[str, Any], found: Environment) -> dict[str, str]:
    """Reasons why it cannot run, each with the remedy."""
    reasons, strategy = {}, preset["strategy"]
    backend = "nccl" if found.devices[0].kind == "cuda" else "gloo"
    if strategy != "SinglePreset" and backend not in found.backends:
        reasons[f"torch is built without {backend}"] = "install a torch for Linux from pytorch.org"
    if strategy != "ZeROPreset":
        return reasons
    if "deepspeed" in found.broken:
        reasons[f"deepspeed cannot be imported ({found.broken['deepspeed']})"] = "pip install -U deepspeed"
    elif found.versions["deepspeed"] is None:
        reasons["deepspeed is not installed"] = "pip install 'lightning-tricks[deepspeed]'"
    elif TorchVersion(found.versions["deepspeed"]) < OLDEST:
        reasons[f"deepspeed {found.versions['deepspeed']} is older than {OLDEST}"] = "pip install -U deepspeed"
    elif preset["precision"] == "16-mixed" and not found.deepspeed_fp16:
        reasons[f"DeepSpeed has no fp16 on this {found.devices[0].kind}"] = "take the form in bf16"
    if preset["arguments"].get("offload") == "nvme":
        reasons |= {f"{tool}, for DeepSpeed's async_io": remedy for tool, remedy in _compiles_not(found).items()}
        if found.tools["libaio"] is None and found.tools["compiler"]:
            reasons["no libaio, for DeepSpeed's async_io"] = "apt install libaio-dev"
    return reasons


def _compiles_not(found: Environment, *, cuda: bool = False) -> dict[str, str]:
    """What an operator of DeepSpeed cannot be compiled for the lack of, each with the remedy."""
    remedies = {
        "compiler": ("no C++ compiler", "apt install g++"),
        "ninja": ("no ninja", "pip install ninja"),
        "nvcc": ("no nvcc", f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME"),
    }
    return dict(remedies[tool] for tool in remedies if found.tools[tool] is None and (cuda or tool != "nvcc"))


def _precision(preset: dict[str, Any], found: Environment) -> dict[str, str]:
    if preset["precision"] == "16-mixed" and found.devices[0].kind == "cpu":
        return {"fp16 is slow on a CPU": "take the form in bf16"}
    without = sorted({device.name for device in found.devices if not device.bf16})
    if preset["precision"] != "bf16-mixed" or not without:
        return {}
    name = preset["name"].replace("bf16", "fp16")
    exists = any(row["name"] == name for row in presets())
    return {f"no bf16 on {', '.join(without)}": f"take {name}" if exists else "take a preset in fp16"}


def _optimizer(preset: dict[str, Any], found: Environment) -> dict[str, str]:
    """DeepSpeed's own AdamW is compiled; without it ``adamw`` takes torch's."""
    if preset["strategy"] != "ZeROPreset":
        return {}
    if preset["arguments"].get("offload", "none") != "none":
        name, lacks = "DeepSpeedCPUAdam", _compiles_not(found)
    elif found.devices[0].kind == "cuda":
        name, lacks = "FusedAdam", _compiles_not(found, cuda=True)
    else:
        return {}
    return {f"{tool}, for {name}: AdamW is torch's": remedy for tool, remedy in lacks.items()}
