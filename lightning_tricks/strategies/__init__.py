"""Strategy presets: one string for strategy and precision. Importing this registers the strings with Lightning."""

from lightning_tricks.strategies.ddp import DDPPreset
from lightning_tricks.strategies.deepspeed import ZeROPreset
from lightning_tricks.strategies.fsdp import FSDP2Preset
from lightning_tricks.strategies.optimizers import adamw
from lightning_tricks.strategies.presets import preset, presets, register
from lightning_tricks.strategies.ray import ray_trainer
from lightning_tricks.strategies.single import SinglePreset

__all__ = ["DDPPreset", "FSDP2Preset", "SinglePreset", "ZeROPreset", "adamw", "preset", "presets", "ray_trainer"]

register()
