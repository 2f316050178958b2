"""AdamW, by the fastest implementation that a strategy allows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_tricks.core.checks import check_decays, check_range, check_type

__all__ = ["adamw"]

DEAD = 900  # seconds after which nothing compiles any more; it takes about 60


def adamw(
    module: pl.LightningModule,
    lr: float,
    *,
    params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """The fastest AdamW for the Trainer's strategy: torch's fused one, or DeepSpeed's where states are offloaded.

    Each computes ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``w = (1 - lr wd) w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` in the t-th step, as ``torch.optim.AdamW``:

    - under DeepSpeed with optimizer states offloaded to the host or to NVMe, ``DeepSpeedCPUAdam``;
    - under DeepSpeed on CUDA otherwise, ``FusedAdam`` in its AdamW mode;
    - everywhere else, ``torch.optim.AdamW(fused=True)``, or without ``fused`` where torch does not know the weights'
      device or dtype, or where Lightning unscales or clips gradients itself (``gradient_clip_val`` in mixed precision,
      fp16), which it refuses to do for fused optimizers.

    DeepSpeed compiles its two once, in about a minute, to ``TORCH_EXTENSIONS_DIR``. If it cannot, a warning says what
    is missing and how to install it, and ``torch.optim.AdamW`` is taken. On the host the two are close: for 50 million
    weights, DeepSpeed's took 1.04 times the time of torch's fused one with one thread, 0.7 times with four.

    Args:
        module: The module, whose ``configure_optimizers`` asks. Without a Trainer, the choice is torch's.
        lr: Learning rate, at least 0.
        params: Weights, or parameter groups; by default all of the module's. Those that do not train are left out.
        betas: Decays b1, b2 of the averages of gradients and of their squares, each in [0, 1).
        eps: Added to the denominator, at least 0.
        weight_decay: Decoupled decay wd, at least 0.

    Returns:
        The optimizer, for ``configure_optimizers`` to return or to give to a schedule.

    Raises:
        ValueError: If no weight trains.

    Example:
        >>> class Net(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(2, 2)
        ...     def configure_optimizers(self):
        ...         return adamw(self, lr=3e-4)
        >>> Net().configure_optimizers().defaults["fused"]
        True

    References:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, https://arxiv.org/abs/1711.05101
    """
    check_range("lr", lr, 0.0)
    check_range("eps", eps, 0.0)
    check_range("weight_decay", weight_decay, 0.0)
    check_decays("betas", betas)
    groups = _training(module.parameters() if params is None else params)
    if not groups:
        raise ValueError(f"params: adamw needs weights that train, got none of {type(module).__name__}: unfreeze some.")
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    trainer = _trainer(module)
    if trainer is not None and isinstance(trainer.strategy, DeepSpeedStrategy):
        op = _deepspeed_op(trainer.strategy)
        if op is not None:
            try:
                return _deepspeed_adamw(op, groups, settings)
            except Exception as error:  # whatever a compiler can fail with
                _warn_of_fallback(op, error)
    weights = [weight for group in groups for weight in group["params"]]
    return AdamW(groups, **settings, fused=_fusible(weights) and not _lightning_touches_gradients(trainer))


def _training(params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of the weights that train."""
    check_type("params", params, Iterable)
    given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    found = []
    for group in groups:
        inner = group.get("params") if isinstance(group, dict) else None
        weights = [inner] if isinstance(inner, Tensor) else list(inner or [])
        if inner is None or not all(isinstance(weight, Tensor) for weight in weights):
            raise TypeError(f"params must be weights, or groups with weights under 'params', got {group!r}.")
        found.append({**group, "params": [weight for weight in weights if weight.requires_grad]})
    return [group for group in found if group["params"]]


def _trainer(module: pl.LightningModule) -> pl.Trainer | None:
    try:
        return module.trainer
    except RuntimeError:  # Lightning's way to say that there is none
        return None


def _deepspeed_op(strategy: DeepSpeedStrategy) -> str | None:
    """The name of DeepSpeed's operator for where it keeps optimizer states."""
    zero = (strategy.config or {}).get("zero_optimization") or {}
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        return "cpu_adam"
    return "fused_adam" if strategy.root_device.type == "cuda" else None


def _deepspeed_adamw(op: str, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    _require_no_dead_lock(op)
    if op == "cpu_adam":
        return DeepSpeedCPUAdam(groups, **settings, adamw_mode=True)
    return FusedAdam(groups, **settings, adam_w_mode=True)


def _require_no_dead_lock(op: str) -> None:
    """Raise where a compilation was killed: torch would wait for the end of it."""
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for lock in (root / op / "lock", *root.glob(f"*/{op}/lock")):
        if lock.exists() and time.time() - lock.stat().st_mtime > DEAD:
            raise TimeoutError(f"{lock} is of a compilation that did not end: delete it")


def _warn_of_fallback(op: str, error: Exception) -> None:
    from torch.utils import cpp_extension  # which loads setuptools

    tools = {
        "a C++ compiler (apt install g++)": shutil.which(cpp_extension.get_cxx_compiler()),
        "ninja (pip install ninja)": cpp_extension.is_ninja_available(),
    }
    if op == "fused_adam":
        tools[f"nvcc (the CUDA {torch.version.cuda} toolkit)"] = cpp_extension.CUDA_HOME
    missing = [tool for tool, found in tools.items() if not found]
    because = f"missing: {', '.join(missing)}" if missing else f"{type(error).__name__}: {error.__cause__ or error}"
    rank_zero_warn(
        f"adamw: DeepSpeed's {op} cannot be compiled here; {because}. Taking torch.optim.AdamW instead, whose steps are"
        " the same, at another speed."
    )


def _fusible(weights: list[Tensor]) -> bool:
    return all(weight.is_floating_point() and weight.device.type in ("cpu", "cuda") for weight in weights)


def _lightning_touches_gradients(trainer: pl.Trainer | None) -> bool:
    """Whether Lightning's mixed precision unscales or clips, for which it wants an optimizer that is not fused."""
    if trainer is None or not isinstance(trainer.precision_plugin, MixedPrecision):
        return False
    return trainer.precision_plugin.scaler is not None or bool(trainer.gradient_clip_val)
