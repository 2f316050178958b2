"""Advice before training: memory, strategy, batch size, this machine, and probable mistakes."""

from lightning_tricks.advisor.batch_size import BatchSizeResult, find_batch_size
from lightning_tricks.advisor.choose import Suggestion, suggest_strategy
from lightning_tricks.advisor.doctor import Doctor
from lightning_tricks.advisor.environment import EnvironmentReport, environment_report
from lightning_tricks.advisor.hardware import Hardware
from lightning_tricks.advisor.inspect_training import InspectTraining, TrainingInspection, inspect_training
from lightning_tricks.advisor.memory.estimate import MemoryEstimate, estimate_memory
from lightning_tricks.advisor.non_finite import NonFiniteOrigin, find_non_finite
from lightning_tricks.advisor.profile import TricksProfile, profile_tricks
from lightning_tricks.advisor.simulate.plan import TrainingPlan, suggest_plan
from lightning_tricks.advisor.simulate.transformer import TransformerShape

__all__ = [
    "BatchSizeResult",
    "Doctor",
    "EnvironmentReport",
    "Hardware",
    "InspectTraining",
    "MemoryEstimate",
    "NonFiniteOrigin",
    "Suggestion",
    "TrainingInspection",
    "TrainingPlan",
    "TransformerShape",
    "TricksProfile",
    "environment_report",
    "estimate_memory",
    "find_batch_size",
    "find_non_finite",
    "inspect_training",
    "profile_tricks",
    "suggest_plan",
    "suggest_strategy",
]
