"""The configuration of DeepSpeed for a ZeRO preset, as one dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from lightning_tricks.core.checks import check_choice

Offload = Literal["none", "cpu", "nvme"]
Stage = Literal[1, 2, 3]

_BUCKET = 200_000_000  # elements that travel at once: 0.4 GB in 16 bits, enough to use a link fully

# What is said elsewhere already, and where.
_ELSEWHERE = {
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "train_batch_size": "the batch size of the training loader",
    "optimizer": "configure_optimizers",
    "scheduler": "configure_optimizers",
    "amp": "precision=",
    "torch_autocast": "precision=",
}


def zero_config(
    *,
    stage: Stage = 3,
    offload: Offload = "none",
    nvme_path: str | None = None,
    precision: str = "bf16-mixed",
    config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration for DeepSpeed: ours, with the user's ``config`` merged over it key by key.

    Args:
        stage: What is sharded: optimizer states (1), gradients too (2), weights too (3).
        offload: Where optimizer states, and in stage 3 the weights, wait: "none" (on the device), "cpu", "nvme".
        nvme_path: Folder for "nvme".
        precision: "bf16-mixed", "16-mixed" or "32-true".
        config: Parts of a DeepSpeed configuration, for what has no argument here. It is read, never written to.

    Returns:
        A new dictionary that shares nothing with ``config``.

    Raises:
        TypeError: If ``config`` is no dictionary, or has none where DeepSpeed has a section.
        ValueError: If ``stage`` or ``offload`` do not exist or do not go together, or ``config`` contradicts an
            argument, or sets what the Trainer or the module set.

    Example:
        >>> zero_config(stage=2, config={"zero_optimization": {"overlap_comm": False}})["zero_optimization"]
        {'stage': 2, 'reduce_bucket_size': 200000000, 'allgather_bucket_size': 200000000, 'overlap_comm': False}
    """
    if type(stage) is not int or stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}.")
    check_choice("offload", offload, ("none", "cpu", "nvme"))
    _check_nvme(stage, offload, nvme_path)
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # for DeepSpeed's own log of throughput only
        "zero_allow_untested_optimizer": True,  # any elementwise optimizer works on shards
        "zero_force_ds_cpu_optimizer": False,  # one of torch's steps offloaded states as well, and compiles nothing
        "zero_optimization": {"stage": stage, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET},
    }
    zero = ours["zero_optimization"]
    zero["overlap_comm"] = True  # gradients travel while the backward pass goes on
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # else engine.save_16bit_model writes nothing
    if offload != "none":
        waits: dict[str, Any] = {"device": offload, "pin_memory": True}  # else each copy to the device blocks
        if offload == "nvme":
            waits["nvme_path"] = nvme_path
        zero["offload_optimizer"] = waits
        if stage == 3:
            zero["offload_param"] = dict(waits)
    if precision != "32-true":
        ours["bf16" if precision == "bf16-mixed" else "fp16"] = {"enabled": True}
    return ours if config is None else _merged(ours, _checked(config, ours))


def _check_nvme(stage: int, offload: str, nvme_path: str | None) -> None:
    if offload == "nvme" and stage != 3:
        raise ValueError(f"offload='nvme' needs stage=3, got stage={stage}. Pass stage=3, or offload='cpu'.")
    if (offload == "nvme") != (nvme_path is not None):
        raise ValueError(
            f"nvme_path= is the folder of offload='nvme' and of nothing else, got offload={offload!r} and"
            f" nvme_path={nvme_path!r}. Pass both or neither."
        )


def _checked(config: Mapping[str, Any], ours: Mapping[str, Any]) -> Mapping[str, Any]:
    """The user's config, which must not contradict what is said by arguments, or elsewhere."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dictionary, parts of a DeepSpeed configuration, got {config!r}.")
    for key, where in _ELSEWHERE.items():
        if key in config:
            raise ValueError(f"config={{{key!r}: {config[key]!r}}} is for {where} to say: remove it from config.")
    zero, our_zero = _section(config, "zero_optimization"), ours["zero_optimization"]
    _check_same("stage", zero.get("stage", our_zero["stage"]), our_zero["stage"], "stage=")
    for name in ("offload_optimizer", "offload_param"):
        device = (our_zero.get(name) or {}).get("device", "none")
        asked = (zero.get(name) or {}).get("device", device)
        if not (name == "offload_param" and asked == "none"):  # weights may stay while optimizer states leave
            _check_same(f"{name} device", asked, device, "offload= and stage=")
    for name in ("bf16", "fp16"):
        enabled = _section(config, name).get("enabled", name in ours)
        _check_same(f"{name} enabled", enabled, name in ours, "precision=")
    return config


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise TypeError(f"config[{name!r}] must be a dictionary, got {section!r}.")
    return section


def _check_same(what: str, asked: object, ours: object, argument: str) -> None:
    if asked != ours:
        raise ValueError(f"config says {what} {asked!r}, {argument} says {ours!r}: say it by {argument} only.")


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**ours, **deepcopy(dict(theirs))}
    for key in ours.keys() & theirs.keys():
        if isinstance(ours[key], Mapping) and isinstance(theirs[key], Mapping):
            merged[key] = _merged(ours[key], theirs[key])
    return merged
