"""What this machine has for training, and what each strategy preset lacks on it."""

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

import lightning as L
import torch
from torch.torch_version import TorchVersion

from lightning_tricks.core.install import pip_install
from lightning_tricks.core.lightning.compiler import stale_locks
from lightning_tricks.strategies.presets import presets
from lightning_tricks.strategies.zero.preset import OLDEST_DEEPSPEED

__all__ = ["EnvironmentReport", "environment_report"]

Status = Literal["runs", "slower", "cannot run"]


@dataclass(frozen=True)
class Device:
    """A device to train on.

    Args:
        kind: The type of the device, as torch names it.
        name: The name of the product.
        memory: The memory in bytes.
        bf16: Whether it computes in bf16.
    """

    kind: str
    name: str
    memory: int
    bf16: bool


@dataclass(frozen=True)
class Environment:
    """The software and the devices of a machine.

    Args:
        versions: The versions of Python and of packages; None for a package that is missing or cannot be imported.
        devices: The CUDA devices, or the CPU if there are none.
        backends: The available backends of ``torch.distributed``.
        tools: The paths of the C++ compiler, ninja, nvcc and libaio, with which DeepSpeed compiles its operators; None
            for a missing one.
        broken: The errors of installed packages that cannot be imported.
        deepspeed_fp16: Whether DeepSpeed computes in fp16 on these devices.
        stale_locks: The locks of DeepSpeed's compilations that were killed; the next run removes them.
    """

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    tools: dict[str, str | None]
    broken: dict[str, str] = field(default_factory=dict)
    deepspeed_fp16: bool = True
    stale_locks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PresetStatus:
    """Whether a preset runs in an environment.

    Args:
        name: The name of the preset.
        status: ``"runs"``, ``"slower"`` or ``"cannot run"``.
        reasons: Why it does not run, or runs slower.
        remedies: Remedies for the reasons.
    """

    name: str
    status: Status
    reasons: tuple[str, ...]
    remedies: tuple[str, ...]


@dataclass(frozen=True)
class EnvironmentReport:
    """The result of ``environment_report``.

    Args:
        environment: The software and the devices of this machine.
        presets: The status of every strategy preset.

    Example:
        >>> report = environment_report()
        >>> [preset.status for preset in report.presets if preset.name == "single_bf16"] != ["cannot run"]
        True
    """

    environment: Environment
    presets: tuple[PresetStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """All values, for JSON."""
        return asdict(self)


def environment_report() -> EnvironmentReport:
    """Report this machine's versions, devices and compilers, and what each strategy preset lacks.

    A preset ``"runs"`` if it lacks nothing, is ``"slower"`` if something else replaces what it lacks, and ``"cannot
    run"`` otherwise. DeepSpeed and Ray are imported if they are installed.

    Returns:
        The machine and the presets; ``to_dict()`` gives values for JSON.

    Example:
        >>> report = environment_report()
        >>> report.environment.versions["torch"] == str(torch.__version__)
        True
    """
    detected = environment()
    return EnvironmentReport(detected, tuple(preset_status(row, detected) for row in presets()))


def environment() -> Environment:
    """Detect the software and the devices of this machine."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": L.__version__,
    }
    broken = {}
    for package in ("deepspeed", "ray"):
        versions[package], error = _imported(package)
        if error:
            broken[package] = error
    backends = ("gloo", "nccl") if torch.distributed.is_available() else ()
    available = tuple(name for name in backends if getattr(torch.distributed, f"is_{name}_available")())
    deepspeed = versions["deepspeed"] is not None
    fp16 = deepspeed and _deepspeed_fp16()
    locks = tuple(map(str, stale_locks())) if deepspeed else ()
    return Environment(versions, devices_here(), available, _tools(deepspeed), broken, fp16, locks)


def _deepspeed_fp16() -> bool:
    with _output_to_stderr():
        from deepspeed.accelerator import get_accelerator

        return bool(get_accelerator().is_fp16_supported())


def _imported(package: str) -> tuple[str | None, str | None]:
    """The version of a package, and the error if it is installed but cannot be imported."""
    try:
        with _output_to_stderr():
            return str(import_module(package).__version__), None
    except ModuleNotFoundError as error:
        return None, None if error.name == package else str(error)
    except Exception as error:  # DeepSpeed raises various exceptions.
        return None, f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Keep DeepSpeed's log out of standard output, which is for the report."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def devices_here() -> tuple[Device, ...]:
    """The CUDA devices that this process sees, or the CPU if there are none."""
    if torch.cuda.is_available():
        native = partial(torch.cuda.is_bf16_supported, including_emulation=False)
        return tuple(_cuda_device(index, native) for index in range(torch.cuda.device_count()))
    return (Device("cpu", f"{platform.machine()}, {os.cpu_count()} cores", host_memory(), True),)


def host_memory() -> int:
    """The memory of this machine in bytes, 0 if the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def _cuda_device(index: int, native: Any) -> Device:
    properties = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        return Device("cuda", properties.name, properties.total_memory, native())


def _tools(deepspeed: bool) -> dict[str, str | None]:
    """Find the compilers and libraries in the same way as torch and DeepSpeed do."""
    from torch.utils import cpp_extension

    compiler = shutil.which(cpp_extension.get_cxx_compiler())
    home = cpp_extension.CUDA_HOME
    nvcc = home and shutil.which("nvcc", path=os.path.join(home, "bin"))
    libaio = ctypes.util.find_library("aio")  # only looks it up, as a compiler's linker does; nothing is loaded
    if deepspeed and compiler:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        with _output_to_stderr():
            libaio = "libaio" if AsyncIOBuilder().is_compatible() else None  # Links a program with libaio.
    ninja = shutil.which("ninja") if cpp_extension.is_ninja_available() else None
    return {"compiler": compiler, "ninja": ninja, "nvcc": nvcc, "libaio": libaio}


def preset_status(preset: dict[str, Any], environment: Environment) -> PresetStatus:
    """Whether a preset, a row of ``presets()``, runs in an environment."""
    blocking = _blocking_reasons(preset, environment)
    slower = {**_precision_reasons(preset, environment), **_optimizer_reasons(preset, environment)}
    if environment.devices[0].kind == "cpu":
        slower["no CUDA device: trains on the CPU"] = ""
    status: Status = "cannot run" if blocking else "slower" if slower else "runs"
    reasons = blocking or slower
    return PresetStatus(preset["name"], status, tuple(reasons), tuple(filter(None, dict.fromkeys(reasons.values()))))


def _blocking_reasons(preset: dict[str, Any], environment: Environment) -> dict[str, str]:
    """Reasons why a preset cannot run, with their remedies."""
    reasons, strategy, version = {}, preset["strategy"], environment.versions["deepspeed"]
    backend = "nccl" if environment.devices[0].kind == "cuda" else "gloo"
    if strategy != "SinglePreset" and backend not in environment.backends:
        reasons[f"torch is built without {backend}"] = "install a torch for Linux from pytorch.org"
    if strategy != "ZeROPreset":
        return reasons
    if "deepspeed" in environment.broken:
        reasons[f"deepspeed cannot be imported ({environment.broken['deepspeed']})"] = "pip install -U deepspeed"
    elif version is None:
        reasons["deepspeed is not installed"] = pip_install("deepspeed")
    elif TorchVersion(version) < OLDEST_DEEPSPEED:
        reasons[f"deepspeed {version} is older than {OLDEST_DEEPSPEED}"] = "pip install -U deepspeed"
    elif preset["precision"] == "16-mixed" and not environment.deepspeed_fp16:
        reasons[f"DeepSpeed does not support fp16 on this {environment.devices[0].kind}"] = "use the preset in bf16"
    if preset["arguments"].get("offload") == "nvme":
        missing = _missing_build_tools(environment)
        reasons |= {f"{tool}, for DeepSpeed's async_io": remedy for tool, remedy in missing.items()}
        if environment.tools["libaio"] is None and environment.tools["compiler"]:
            reasons["no libaio, for DeepSpeed's async_io"] = "apt install libaio-dev"
    return reasons


def _missing_build_tools(environment: Environment, *, cuda: bool = False) -> dict[str, str]:
    """The missing tools that DeepSpeed needs to compile an operator, with their remedies."""
    remedies = {
        "compiler": ("no C++ compiler", "apt install g++"),
        "ninja": ("no ninja", "pip install ninja"),
        "nvcc": ("no nvcc", f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME"),
    }
    return dict(remedies[tool] for tool in remedies if environment.tools[tool] is None and (cuda or tool != "nvcc"))


def _precision_reasons(preset: dict[str, Any], environment: Environment) -> dict[str, str]:
    """Reasons why the precision is slow, with their remedies."""
    if preset["precision"] == "16-mixed" and environment.devices[0].kind == "cpu":
        return {"fp16 is slow on a CPU": "use the preset in bf16"}
    without_bf16 = sorted({device.name for device in environment.devices if not device.bf16})
    if preset["precision"] != "bf16-mixed" or not without_bf16:
        return {}
    name = preset["name"].replace("bf16", "fp16")
    exists = any(row["name"] == name for row in presets())
    return {f"no bf16 on {', '.join(without_bf16)}": f"use {name}" if exists else "use a preset in fp16"}


def _optimizer_reasons(preset: dict[str, Any], environment: Environment) -> dict[str, str]:
    """Reasons why ``adamw`` uses torch's AdamW, because DeepSpeed cannot compile its own, with their remedies."""
    if preset["strategy"] != "ZeROPreset":
        return {}
    if preset["arguments"].get("offload", "none") != "none":
        name, missing = "DeepSpeedCPUAdam", _missing_build_tools(environment)
    elif environment.devices[0].kind == "cuda":
        name, missing = "FusedAdam", _missing_build_tools(environment, cuda=True)
    else:
        return {}
    return {f"{tool}, for {name}: AdamW is torch's": remedy for tool, remedy in missing.items()}
