"""Strategy presets: one string for strategy and precision. Importing this package registers them with Lightning."""

from lightning_tricks.strategies.ddp.preset import DDPPreset
from lightning_tricks.strategies.fsdp2.preset import FSDP2Preset
from lightning_tricks.strategies.presets import preset, presets, register
from lightning_tricks.strategies.ray import ray_trainer
from lightning_tricks.strategies.single import SinglePreset
from lightning_tricks.strategies.speed import speed_preset
from lightning_tricks.strategies.zero.preset import ZeROPreset

__all__ = ["DDPPreset", "FSDP2Preset", "SinglePreset", "ZeROPreset", "preset", "presets", "ray_trainer", "speed_preset"]

register()
