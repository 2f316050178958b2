"""What is done with checkpoint files after training: average them, export their weights."""

from lightning_tricks.checkpoints.average import average_checkpoints
from lightning_tricks.checkpoints.export import export_weights
from lightning_tricks.checkpoints.soup import greedy_soup

__all__ = ["average_checkpoints", "export_weights", "greedy_soup"]
