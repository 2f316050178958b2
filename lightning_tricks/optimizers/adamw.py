"""AdamW in the fastest implementation that a strategy allows."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lightning_tricks.core.checks import check_decays, check_range, check_type
from lightning_tricks.core.lightning.compiler import prepare_to_compile
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.trainer import trainer_of

__all__ = ["adamw"]


def adamw(
    module: L.LightningModule,
    lr: float,
    *,
    params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """Make the fastest AdamW for the Trainer's strategy: torch's fused one, or DeepSpeed's.

    Every implementation computes ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``w = (1 - lr wd) w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` in the t-th step, as ``torch.optim.AdamW``:

    - under DeepSpeed with optimizer states offloaded to the host or to NVMe, ``DeepSpeedCPUAdam``;
    - under DeepSpeed on CUDA otherwise, ``FusedAdam`` in its AdamW mode;
    - everywhere else, ``torch.optim.AdamW(fused=True)``. It is not fused if torch does not support the weights' device
      or dtype, or if Lightning unscales or clips gradients itself (fp16, or ``gradient_clip_val`` in mixed precision),
      which it refuses to do for fused optimizers.

    DeepSpeed compiles its optimizers once, to ``TORCH_EXTENSIONS_DIR``. The lock of a compilation that was killed is
    removed. If DeepSpeed cannot compile, a warning says what is missing and how to install it, and
    ``torch.optim.AdamW`` is used.

    Args:
        module: The module whose ``configure_optimizers`` calls this. Without a Trainer, torch's AdamW is used.
        lr: The learning rate, at least 0.
        params: Weights, or parameter groups; by default all weights of the module. Weights that do not require
            gradients are left out.
        betas: The decays b1, b2 of the averages of gradients and of their squares, each in [0, 1).
        eps: A term added to the denominator, at least 0.
        weight_decay: The decoupled weight decay wd, at least 0.

    Returns:
        The optimizer, to be returned from ``configure_optimizers`` or passed to a schedule.

    Raises:
        TypeError: If ``params`` holds anything else.
        ValueError: If no weight requires gradients, or an argument is out of range.

    Example:
        >>> class Net(L.LightningModule):
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
    groups = _trainable_groups(module.parameters() if params is None else params)
    if not groups:
        raise ValueError(
            f"params: adamw needs weights that require gradients, got none of {type(module).__name__}. Unfreeze some."
        )
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    require_same_lightning(module, "adamw")
    trainer = trainer_of(module)
    if trainer is not None and engine_of(trainer).is_deepspeed:
        op = _deepspeed_op(trainer.strategy)
        if op is not None:
            try:
                return _deepspeed_adamw(op, groups, settings)
            except Exception as error:  # Compilation can raise almost any exception.
                _warn_of_fallback(op, error)
    weights = [weight for group in groups for weight in group["params"]]
    can_be_fused = all(weight.is_floating_point() and weight.device.type in ("cpu", "cuda") for weight in weights)
    return AdamW(groups, **settings, fused=can_be_fused and not _lightning_changes_gradients(trainer))


def _trainable_groups(params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of the weights that require gradients."""
    check_type("params", params, Iterable)
    items: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    trainable = []
    for group in groups:
        value = group.get("params") if isinstance(group, dict) else None
        weights = [value] if isinstance(value, Tensor) else list(value or [])
        if value is None or not all(isinstance(weight, Tensor) for weight in weights):
            raise TypeError(f"params must be weights, or groups with weights under 'params', got {group!r}.")
        trainable.append({**group, "params": [weight for weight in weights if weight.requires_grad]})
    return [group for group in trainable if group["params"]]


def _deepspeed_op(strategy: Any) -> str | None:
    """The name of DeepSpeed's AdamW operator for the device of the optimizer states; None without one."""
    zero = (strategy.config or {}).get("zero_optimization") or {}
    if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
        return "cpu_adam"
    return "fused_adam" if strategy.root_device.type == "cuda" else None


def _deepspeed_adamw(op: str, groups: list[dict[str, Any]], settings: dict[str, Any]) -> Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    prepare_to_compile(op)
    if op == "cpu_adam":
        return DeepSpeedCPUAdam(groups, **settings, adamw_mode=True)
    return FusedAdam(groups, **settings, adam_w_mode=True)


def _warn_of_fallback(op: str, error: Exception) -> None:
    from torch.utils import cpp_extension  # Imported late because it loads setuptools.

    tools = {
        "a C++ compiler (apt install g++)": shutil.which(cpp_extension.get_cxx_compiler()),
        "ninja (pip install ninja)": cpp_extension.is_ninja_available(),
    }
    if op == "fused_adam":
        tools[f"nvcc (the CUDA {torch.version.cuda} toolkit)"] = cpp_extension.CUDA_HOME
    missing = [tool for tool, path in tools.items() if not path]
    reason = f"missing: {', '.join(missing)}" if missing else f"{type(error).__name__}: {error.__cause__ or error}"
    rank_zero_warn(
        f"adamw: DeepSpeed's {op} cannot be compiled here; {reason}. Using torch.optim.AdamW instead, which takes the"
        " same steps at another speed."
    )


def _lightning_changes_gradients(trainer: L.Trainer | None) -> bool:
    """Whether Lightning unscales or clips gradients, which it refuses to do for fused optimizers."""
    if trainer is None or not isinstance(trainer.precision_plugin, MixedPrecision):
        return False
    return trainer.precision_plugin.scaler is not None or bool(trainer.gradient_clip_val)
