"""Knowing what you have: cross-validation, ensembles, calibration and honest comparison."""

from lightning_tricks.evaluation.compare import Comparison, compare
from lightning_tricks.evaluation.cross_validate import CrossValidation, cross_validate
from lightning_tricks.evaluation.ensemble import Ensemble
from lightning_tricks.evaluation.label_errors import LabelErrors
from lightning_tricks.evaluation.label_report import LabelReport, label_report
from lightning_tricks.evaluation.soup_and_ensemble import SoupAndEnsemble, soup_and_ensemble
from lightning_tricks.evaluation.temperature import Temperature, fit_temperature
from lightning_tricks.evaluation.tta import tta

__all__ = [
    "Comparison",
    "CrossValidation",
    "Ensemble",
    "LabelErrors",
    "LabelReport",
    "SoupAndEnsemble",
    "Temperature",
    "compare",
    "cross_validate",
    "fit_temperature",
    "label_report",
    "soup_and_ensemble",
    "tta",
]
