"""What DeepSpeed needs and cannot do: each error says what to do."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch._dynamo import OptimizedModule
from torch.torch_version import TorchVersion

from lightning_tricks.core.plain import load_zero

OLDEST = "0.19.0"  # 0.17 and 0.18 accumulate wrongly in stage 2; 0.18.9 fails with torch 2.13


def require_deepspeed() -> None:
    """Raise unless DeepSpeed is there, and new enough."""
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError("ZeROPreset needs DeepSpeed: pip install 'lightning-tricks[deepspeed]'") from error
    if TorchVersion(deepspeed.__version__) < OLDEST:
        raise ImportError(
            f"ZeROPreset needs DeepSpeed {OLDEST} or newer, got {deepspeed.__version__}:"
            " pip install -U 'lightning-tricks[deepspeed]'"
        )


def check_clipping(preset: str, algorithm: str | None) -> None:
    """Raise for gradients that are to be clipped by value."""
    if algorithm == "value":
        raise MisconfigurationException(
            f"strategy={preset!r} clips gradients by their norm, got gradient_clip_algorithm='value'."
            " Pass gradient_clip_algorithm='norm', or leave it out."
        )


def check_device(preset: str, device_type: str, precision: str) -> None:
    """DeepSpeed decides for one kind of device as it is imported."""
    from deepspeed.accelerator import get_accelerator

    its = get_accelerator().device_name()
    if precision == "16-mixed" and its == device_type and not get_accelerator().is_fp16_supported():
        raise MisconfigurationException(
            f"strategy={preset!r} trains in '16-mixed', which DeepSpeed does not support on this {its}. Use a preset in"
            " bf16, or preset(..., precision='bf16-mixed')."
        )
    if its != device_type:
        raise MisconfigurationException(
            f"strategy={preset!r} trains on {device_type}, but DeepSpeed was imported for {its}. Set"
            f" DS_ACCELERATOR={device_type} in the environment before Python starts, or choose another accelerator=."
        )


def check_compiled(preset: str, module: nn.Module) -> None:
    """Raise for submodules that torch.compile has wrapped, whose weights ZeRO-3 does not find; it looks for them."""
    if compiled := [name for name, each in module.named_modules() if isinstance(each, OptimizedModule)]:
        raise MisconfigurationException(
            f"strategy={preset!r} gathers weights as their modules run, and cannot where torch.compile(submodule)"
            f" stands in between, got {compiled[0]!r}. Leave torch.compile out and add"
            " callbacks=[lightning_tricks.Compile()]."
        )


def check_nvme(preset: str, path: str) -> None:
    """Raise unless the folder can be written to and DeepSpeed can use it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        raise MisconfigurationException(
            f"strategy={preset!r} offloads to nvme_path={path!r}, which is no folder that can be written to. Make it,"
            " or pass one on the NVMe disk."
        )
    if not AsyncIOBuilder().is_compatible():
        raise MisconfigurationException(
            f"strategy={preset!r} reads and writes nvme_path={path!r} by DeepSpeed's async_io, which needs libaio and"
            " cannot be built here. Install it (apt install libaio-dev), or pass offload='cpu'."
        )


def check_file(path: str | Path) -> None:
    """Raise for a folder, where one file is asked for."""
    if os.path.isdir(path):
        raise MisconfigurationException(
            f"load_full_weights=True loads one file, got the folder ckpt_path={str(path)!r}. Leave load_full_weights"
            " out to load shards."
        )


def check_shards(preset: str, path: Path, ranks: int | None) -> None:
    """Raise for one file, and for the shards of other than so many ranks, if that matters."""
    if path.is_file():
        raise MisconfigurationException(
            f"ckpt_path={str(path)!r} is one file, and strategy={preset!r} loads shards: pass load_full_weights=True to"
            " take the weights in it, without optimizer states."
        )
    saved = len(list(path.glob("*/*_optim_states.pt")))
    if ranks is not None and saved not in (0, ranks):
        raise MisconfigurationException(
            f"ckpt_path={str(path)!r} has the shards of {saved} processes, and DeepSpeed loads them on as many, got"
            f" {ranks}. Resume on {saved}, or make its weights one file, with lightning-tricks consolidate, and load"
            " that into the module."
        )


def refuse_code(strategy: ParallelStrategy, folder: Path) -> None:
    """Raise on all ranks before one of them unpickles, as DeepSpeed does, what could run code."""
    latest = folder / "latest"
    files = sorted((folder / latest.read_text().strip()).glob("*.pt")) if latest.is_file() else []
    wrong = None
    try:
        for file in files[strategy.global_rank :: strategy.world_size]:
            load_zero(file)
    except ValueError as error:
        wrong = error
    if not strategy.reduce_boolean_decision(wrong is None):
        raise wrong or ValueError(f"another rank has refused a file in {folder}.")
