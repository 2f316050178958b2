"""Knowing what you have: cross-validation, ensembles, calibration and honest comparison."""

from lightning_tricks.evaluation.cross_validate import CrossValidation, cross_validate

__all__ = ["CrossValidation", "cross_validate"]
