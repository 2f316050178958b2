"""The DeepSpeed configuration of a ZeRO preset, a pure function; apart from the preset, which needs a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from lightning_tricks.core.checks import check_choice

Offload = Literal["none", "cpu", "nvme"]
Stage = Literal[1, 2, 3]

_BUCKET = 200_000_000  # Elements per message: 0.4 GB in 16 bits, enough for the full bandwidth of a link.

# Keys of a DeepSpeed configuration that the Trainer or the module sets, and where.
_SET_ELSEWHERE = {
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
    """Make the DeepSpeed configuration of a preset, with the user's ``config`` merged over it key by key.

    Args:
        stage: The ZeRO stage: shard optimizer states (1), gradients too (2), weights too (3).
        offload: The place of optimizer states, and in stage 3 of the weights: "none" (the device), "cpu" or "nvme".
        nvme_path: A folder on the NVMe disk; required for "nvme" only.
        precision: The precision to train in: "bf16-mixed", "16-mixed" or "32-true".
        config: Parts of a DeepSpeed configuration, for settings without an argument here. It is never modified.

    Returns:
        A new dictionary that shares nothing with ``config``.

    Raises:
        TypeError: If ``config``, or a section of it, is not a dictionary.
        ValueError: If ``stage`` or ``offload`` is unknown, if they cannot be combined, or if ``config`` contradicts an
            argument, the Trainer or the module.

    Example:
        >>> zero_config(stage=2, config={"zero_optimization": {"overlap_comm": False}})["zero_optimization"]
        {'stage': 2, 'reduce_bucket_size': 200000000, 'allgather_bucket_size': 200000000, 'overlap_comm': False}
    """
    if type(stage) is not int or stage not in (1, 2, 3):
        raise ValueError(f"stage must be 1, 2 or 3, got {stage!r}.")
    check_choice("offload", offload, ("none", "cpu", "nvme"))
    _check_nvme(stage, offload, nvme_path)
    defaults: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # Only used in DeepSpeed's own log of throughput.
        "zero_allow_untested_optimizer": True,  # Any elementwise optimizer works on shards.
        "zero_force_ds_cpu_optimizer": False,  # torch's optimizers can step offloaded states without compilation.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": _BUCKET, "allgather_bucket_size": _BUCKET},
    }
    zero = defaults["zero_optimization"]
    zero["overlap_comm"] = True  # Reduce gradients while the backward pass runs.
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # Otherwise engine.save_16bit_model writes nothing.
    if offload != "none":
        section: dict[str, Any] = {"device": offload, "pin_memory": True}  # Copies from unpinned memory would block.
        if offload == "nvme":
            section["nvme_path"] = nvme_path
        zero["offload_optimizer"] = section
        if stage == 3:
            zero["offload_param"] = dict(section)
    if precision != "32-true":
        defaults["bf16" if precision == "bf16-mixed" else "fp16"] = {"enabled": True}
    if config is None:
        return defaults
    _check_config(config, defaults)
    return _merged(defaults, config)


def _check_nvme(stage: int, offload: str, nvme_path: str | None) -> None:
    if offload == "nvme" and stage != 3:
        raise ValueError(f"offload='nvme' needs stage=3, got stage={stage}. Pass stage=3, or offload='cpu'.")
    if (offload == "nvme") != (nvme_path is not None):
        raise ValueError(
            f"nvme_path= and offload='nvme' belong together, got offload={offload!r} and nvme_path={nvme_path!r}. Pass"
            " both or neither."
        )


def _check_config(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise if the user's config contradicts an argument, the Trainer or the module."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dictionary with parts of a DeepSpeed configuration, got {config!r}.")
    for key, setting in _SET_ELSEWHERE.items():
        if key in config:
            raise ValueError(f"config must not contain {key!r}, got {config[key]!r}. Use {setting} instead.")
    zero, default_zero = _section(config, "zero_optimization"), defaults["zero_optimization"]
    _check_same("stage", zero.get("stage", default_zero["stage"]), default_zero["stage"], "stage=")
    for name in ("offload_optimizer", "offload_param"):
        default_device = (default_zero.get(name) or {}).get("device", "none")
        device = (zero.get(name) or {}).get("device", default_device)
        if name == "offload_param" and device == "none":
            continue  # Weights may stay on the device while optimizer states are offloaded.
        _check_same(f"{name} device", device, default_device, "offload= and stage=")
    for name in ("bf16", "fp16"):
        enabled = _section(config, name).get("enabled", name in defaults)
        _check_same(f"{name} enabled", enabled, name in defaults, "precision=")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise TypeError(f"config[{name!r}] must be a dictionary, got {section!r}.")
    return section


def _check_same(setting: str, configured: object, default: object, argument: str) -> None:
    if configured != default:
        raise ValueError(
            f"config has {setting} {configured!r}, but {argument} gives {default!r}. Set it with {argument} only."
        )


def _merged(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **deepcopy(dict(overrides))}
    for key in defaults.keys() & overrides.keys():
        if isinstance(defaults[key], Mapping) and isinstance(overrides[key], Mapping):
            merged[key] = _merged(defaults[key], overrides[key])
    return merged
