"""The machine that figures belong to, and how it is prepared."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

LIGHTNING = "lightning" if find_spec("lightning") else "pytorch-lightning"
MMAP_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD = -4, -3, -1  # of malloc.h


def machine(*packages: str) -> dict[str, object]:
    """The CPU, and the versions of Python, torch, Lightning and those of the packages named that are installed."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    versions = {}
    for name in ("torch", LIGHTNING, *packages):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **versions,
    }


def lent(device: str, *packages: str) -> dict[str, object]:
    """The machine with what else times depend on: threads, the GPU, and how busy it is with other work."""
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    load = [round(each, 1) for each in os.getloadavg()]
    return {**machine(*packages), **gpu, "threads": torch.get_num_threads(), "load": load}


def missing(packages: Sequence[str]) -> list[str]:
    """Those of the packages that are not installed."""
    return [name for name in packages if find_spec(name.replace("-", "_")) is None]


def prepare(peers: Sequence[str]) -> None:
    """Raise if a peer is not installed; quiet what Lightning says in every fit."""
    if absent := missing(peers):
        raise SystemExit(f"The peers are missing: {', '.join(absent)}. Run: python -m pip install '.[bench]'")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # which devices there are
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec")


@contextmanager
def kept_memory() -> Iterator[None]:
    """Have malloc keep freed memory for what comes next, as on a GPU; only glibc can be asked to.

    Whether large tensors are made of fresh pages depends on what was there before, and takes up to five times as long
    as copying them.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        libc.mallopt(MMAP_MAX, 65536)  # its defaults
        libc.mallopt(MMAP_THRESHOLD, 128 * 1024)
        libc.mallopt(TRIM_THRESHOLD, 128 * 1024)
        libc.malloc_trim(0)


def available(device: str) -> int:
    """Bytes of the device's memory that nobody uses."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), 0)


def table(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print rows of figures under their names."""
    columns = list(next(iter(rows.values())))
    print(f"\n{title:<42}" + "".join(f"{column:>16}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<42}" + "".join(f"{row[column]!s:>16}" for column in columns), flush=True)
