"""The compatibility matrix: its rows, its columns, and the file that holds what the tests found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.conformance.settings import SETTINGS

REGIMES = {
    "fp32": "fp32",
    "bf16": "bf16-mixed",
    "fp16": "fp16 GradScaler",
    "accumulate": "accumulate 3, ragged",
    "clip": "clip norm",
    "manual": "manual optimization",
    "DDP": "DDP x2",
    "FSDP2": "FSDP2 x2",
    "DeepSpeed": "ZeRO-3 x2",
    "compile": "torch.compile",
    "resume": "resume mid-epoch",
    "exception": "exception + retry",
    "second": "second Trainer",
    "again": "fit again",
    "yaml": "LightningCLI YAML",
    "several": "two optimizers",
    "iterable": "loader without a length",
    "compiled DDP": "torch.compile, DDP x2",
    "ranks": "checkpoint of one process in two, and of two in one",
    "LoRA": "beside LoRA",
    "namespace": "pytorch_lightning",
}
PRESETS = ("single_*", "ddp_*", "fsdp2_*", "hsdp_*", "tp_*", "zero*")  # families: rows of their own
PRESETS += ("ddp_diloco_*", "ddp_*(async_save=True)", "fsdp2_*(async_save=True)")
ROWS = (*SETTINGS, *PRESETS)
FOUND = ("right", "refused", "none")
NO_ROW = {  # of the names of lightning_tricks, and where in tests/ they are tested instead
    # parts of what has rows: SAMMixin, BatchTransform, the presets, all schedules
    "SAM": "modules/sam/test_rules.py",
    "CutOut": "callbacks/test_batch_transform.py",
    "ColOut": "callbacks/test_batch_transform.py",
    "SinglePreset": "pytorch_lightning/test_wrong_namespace.py",
    "DDPPreset": "strategies/ddp/test_preset.py",
    "FSDP2Preset": "strategies/fsdp2/test_preset.py",
    "ZeROPreset": "strategies/zero/test_preset.py",
    "preset": "strategies/test_single.py",
    "presets": "strategies/test_presets.py",
    "speed_preset": "strategies/test_speed.py",
    "ray_trainer": "strategies/test_ray.py",
    "UnknownTotalSteps": "core/lightning/test_steps.py",
    "optimizer_steps": "core/lightning/test_steps.py",
    # functions of tensors, which see no Trainer; those of embeddings gather them from the ranks
    "clip_loss": "losses/test_contrastive.py",
    "info_nce": "losses/test_contrastive.py",
    "logit_adjustment": "losses/test_logit_adjustment.py",
    "min_snr_weight": "losses/test_diffusion.py",
    "functional": "modules/test_blur_pool.py",
    "lr_scheduler": "schedules/test_lr_scheduler.py",  # the schedules once more, without their dictionaries
    # optimizers and their groups, each in the engines that it is for
    "adamw": "optimizers/test_adamw.py",
    "optimizers": "optimizers/test_by_name.py",
    "discriminative_groups": "schedules/test_param_groups.py",
    "layer_decay_groups": "schedules/test_param_groups.py",
    "no_weight_decay_groups": "schedules/test_param_groups.py",
    "effective_batch_size": "schedules/test_scaling.py",
    "scale_adam": "schedules/test_scaling.py",
    "scale_lr": "schedules/test_scaling.py",
    # changes of a network before a fit, which then trains another network
    "add_blur_pool": "modules/test_blur_pool.py",
    "add_squeeze_excite": "modules/test_squeeze_excite.py",
    "add_stochastic_depth": "modules/test_stochastic_depth.py",
    "drop_bias_before_batchnorm": "modules/test_bias_before_batchnorm.py",
    "freeze": "modules/test_freeze.py",
    "init_weights": "modules/test_init_weights.py",
    # after a fit: networks, files and scores
    "Ensemble": "evaluation/test_ensemble.py",
    "average_checkpoints": "checkpoints/test_average.py",
    "compare": "evaluation/test_compare.py",
    "consolidate": "checkpoints/test_consolidate.py",
    "cross_validate": "evaluation/test_fold_data.py",
    "export_adapters": "callbacks/test_lora.py",
    "export_weights": "checkpoints/test_export.py",
    "fit_temperature": "evaluation/test_temperature.py",
    "greedy_soup": "checkpoints/test_soup.py",
    "label_report": "evaluation/test_label_report.py",
    "merge_adapters": "callbacks/test_lora.py",
    "newest_checkpoint": "checkpoints/test_newest.py",
    "post_hoc_average": "checkpoints/test_post_hoc.py",
    "post_hoc_sweep": "checkpoints/test_post_hoc.py",
    "quantize": "modules/test_quantize.py",
    "sharpness": "modules/test_sharpness.py",
    "tta": "evaluation/test_tta.py",
    "soup_and_ensemble": "evaluation/test_ensemble.py",
    # loaders, which are the same for all tricks
    "BatchedDataset": "data/test_token_buckets.py",
    "DistributedWeightedSampler": "data/test_weighted_sampler.py",
    "bce_targets": "losses/test_bce_targets.py",
    "LengthBuckets": "data/test_length_buckets.py",
    "TokenBuckets": "data/test_token_buckets.py",
    "balanced_sampler": "data/test_weighted_sampler.py",
    "find_num_workers": "data/test_workers.py",
    "pack_sequences": "data/test_packing.py",
    # trials, which leave no trace, and reports
    "Hardware": "advisor/test_choose.py",
    "environment_report": "advisor/test_environment.py",
    "estimate_memory": "advisor/memory/test_estimate.py",
    "find_batch_size": "advisor/test_batch_size.py",
    "find_lr": "schedules/test_lr_finder.py",
    "find_non_finite": "advisor/test_non_finite.py",
    "inspect_training": "advisor/test_inspect_training.py",
    "plot_schedule": "schedules/test_plot.py",
    "profile_tricks": "advisor/test_profile.py",
    "TransformerShape": "advisor/simulate/test_transformer.py",
    "suggest_plan": "advisor/simulate/test_plan.py",
    "suggest_strategy": "advisor/test_choose.py",
}

Cell = tuple[str, str, str, str]  # row, regime, what was found, why
Waits = tuple[str, int, int, str]  # row, waits for the device in a step, in a step that logs, why

Memory = tuple[str, float, float, str]  # row, multiples of the weights on the device, in host memory, what


def as_json(
    cells: Iterable[tuple[Cell, str]],
    waits: Iterable[tuple[Waits, str]] = (),
    memory: Iterable[tuple[Memory, str]] = (),
) -> dict[str, Any]:
    """The contents of the file, of what was found and the tests that found it, in the order of rows and columns.

    Raises:
        ValueError: If a cell was found twice, or is neither "right" nor "refused" or "none" with a reason.
    """
    tricks: dict[str, dict[str, dict[str, str]]] = {row: {} for row in sorted(ROWS)}
    for (row, regime, found, why), test in cells:
        if regime in tricks[row]:
            raise ValueError(f"{row} x {regime} is found by two tests, {tricks[row][regime]['test']} and {test}.")
        if found not in FOUND or regime not in REGIMES or (found != "right" and not why):
            raise ValueError(f"{row} x {regime}: no such cell, {found!r} because {why!r} ({test}).")
        tricks[row][regime] = {"cell": found, "test": test, **({"why": readable(why)} if why else {})}
    ordered = {row: {regime: of[regime] for regime in REGIMES if regime in of} for row, of in tricks.items()}
    return {
        "versions": {name: version(name).split("+")[0] for name in ("torch", "lightning", "deepspeed")},
        "regimes": list(REGIMES),
        "tricks": ordered,
        "waits": {
            row: {"step": step, "logged": logged, "test": test, **({"why": why} if why else {})}
            for (row, step, logged, why), test in sorted(waits)
        },
        "memory": {
            row: {"device": on_device, "host": on_host, "test": test, **({"why": why} if why else {})}
            for (row, on_device, on_host, why), test in sorted(memory)
        },
    }


def readable(why: str) -> str:
    """A message without what only the tests have: their folder, and their kind of DeepSpeed."""
    return re.sub(r"'/[^']*/([^'/]+)'", r"'\1'", why).replace("CPUDeepSpeedStrategy", "DeepSpeedStrategy")


def empty(matrix: dict[str, Any]) -> list[str]:
    """The cells that no test has found."""
    cells = [f"{row} x {regime}" for row in ROWS for regime in REGIMES if regime not in matrix["tricks"].get(row, {})]
    return cells + [f"{what} of {row}" for what in ("waits", "memory") for row in SETTINGS if row not in matrix[what]]


def write(matrix: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(matrix, indent=1, ensure_ascii=False) + "\n")
