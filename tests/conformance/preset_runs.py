"""The presets as they run on CPUs, and the full weights of whatever they cut into slices."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

import lightning_tricks as lt

TINY = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # else ZeRO-3 leaves so few weights whole
PLAN = {"layers.0": "colwise", "layers.2": "rowwise"}
IN_STEP = {"local_sgd_period": 1, "outer_lr": 1.0, "outer_momentum": 0.0}  # DiLoCo as data parallelism of SGD
PRECISIONS = {row["name"]: row["precision"] for row in lt.presets() if row["name"] != "zero3_nvme_bf16"}


def whole(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return of_deepspeed(module)
    state = {name: value.detach() for name, value in module.state_dict().items()}  # reshards FSDP2
    return {name: getattr(value, "full_tensor", value.clone)() for name, value in state.items()}


def of_deepspeed(module: L.LightningModule) -> dict[str, Tensor]:
    """The full parameters, put together from their slices."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    named = dict(module.named_parameters())
    trained = {name: safe_get_full_fp32_param(p).clone() for name, p in named.items() if p.requires_grad}
    with deepspeed.zero.GatheredParameters([p for p in named.values() if not p.requires_grad]):
        frozen = {name: p.detach().clone() for name, p in named.items() if not p.requires_grad}
    return {name: {**trained, **frozen}[name] for name in named}


def settings_of(name: str, precision: str) -> dict[str, Any]:
    """What a Trainer is given for a preset; one whose name ends in "+async" saves while training goes on."""
    name, later, _ = name.partition("+async")
    overrides: dict[str, Any] = {} if precision == PRECISIONS[name] else {"precision": precision}
    if later:
        overrides["async_save"] = True
    if name == "ddp_diloco_bf16":
        overrides |= IN_STEP
    if name.startswith("tp_"):
        overrides["plan"] = PLAN
    if name.startswith("zero"):
        overrides["config"] = TINY
        if precision == "16-mixed":  # from a scale of 2**16 the first steps would be left out
            overrides["config"] = {**TINY, "fp16": {"initial_scale_power": 4}}
    return lt.preset(name, **overrides)
