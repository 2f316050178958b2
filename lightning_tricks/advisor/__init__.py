"""Advice on memory, batch size and strategy."""

from lightning_tricks.advisor.batch_size import BatchSizeResult, find_batch_size
from lightning_tricks.advisor.environment import EnvironmentReport, environment_report

__all__ = ["BatchSizeResult", "EnvironmentReport", "environment_report", "find_batch_size"]
