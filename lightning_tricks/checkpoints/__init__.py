"""Tools for checkpoints after training: average them, export their weights, write a folder of shards to one file."""

from lightning_tricks.checkpoints.average import average_checkpoints
from lightning_tricks.checkpoints.consolidate import consolidate
from lightning_tricks.checkpoints.export import export_weights
from lightning_tricks.checkpoints.export_adapters import export_adapters
from lightning_tricks.checkpoints.newest import newest_checkpoint
from lightning_tricks.checkpoints.post_hoc import PostHocSweep, post_hoc_average, post_hoc_sweep
from lightning_tricks.checkpoints.soup import greedy_soup

__all__ = [
    "PostHocSweep",
    "average_checkpoints",
    "consolidate",
    "export_adapters",
    "export_weights",
    "greedy_soup",
    "newest_checkpoint",
    "post_hoc_average",
    "post_hoc_sweep",
]
