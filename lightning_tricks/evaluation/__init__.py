"""Knowing what you have: cross-validation, ensembles, calibration and honest comparison."""

__all__ = []
