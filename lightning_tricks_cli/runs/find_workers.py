"""The number of loader workers for a LightningCLI configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks.data import WorkersResult, find_num_workers
from lightning_tricks_cli.runs.find_lr import read_model
from lightning_tricks_cli.runs.target import train_loader_of


def find_workers_of(configs: Sequence[Path], *, as_json: bool = False, **arguments: Any) -> WorkersResult:
    """Run ``find_num_workers`` on the training loader of configuration files, and print its advice.

    Args:
        configs: LightningCLI configurations with a ``class_path`` for model and data; later ones override earlier ones.
        as_json: Whether to print all that was measured instead of the advice.
        **arguments: Arguments of ``find_num_workers``.

    Returns:
        What was measured.

    Raises:
        ImportError: If jsonargparse is missing.
        OSError: If a configuration does not exist.
        ArgumentError: If a configuration is wrong.
        TypeError: If the training loader is no DataLoader.
        ValueError: If an argument is out of range, or a configuration has a checkpoint.
    """
    result = find_num_workers(train_loader_of(read_model(configs)), **arguments)
    print(json.dumps(result.to_dict()) if as_json else result)
    return result
