"""What fits where: memory estimated without training, and a strategy suggested by it."""

from lightning_tricks.advisor.choose import Suggestion, suggest_strategy
from lightning_tricks.advisor.estimate import MemoryEstimate
from lightning_tricks.advisor.hardware import Hardware
from lightning_tricks.advisor.memory import estimate_memory

__all__ = ["Hardware", "MemoryEstimate", "Suggestion", "estimate_memory", "suggest_strategy"]
