"""Strategy presets: one string for strategy and precision. Importing this registers the strings with Lightning."""

from lightning_tricks.strategies.presets import preset, presets, register

__all__ = ["preset", "presets"]

register()
