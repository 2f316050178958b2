"""Knowing what you have: cross-validation, ensembles, calibration and honest comparison."""

from lightning_tricks.evaluation.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
