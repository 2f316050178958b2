"""What makes the tests faster, here and in the processes of ``tests.ranks``, and changes nothing else."""

from __future__ import annotations

import gc
import socket
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from lightning.fabric.utilities import registry
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch.distributed import TCPStore, rendezvous


def cache_entry_points() -> None:
    """Every Trainer looks for callbacks in the metadata of all installed packages: a fifth of a small fit's time."""
    registry.entry_points = cache(entry_points)


def freeze() -> None:
    """Lightning collects garbage in many places, each time half a second if all imported modules are looked through."""
    gc.collect()
    gc.freeze()


def leave_devices_out() -> None:
    """Without an accelerator, neither move logged values to a device nor keep seeds and their tracebacks for one.

    Lightning copies the description of each logged value with each move: together a sixth of a small fit's time.
    """
    if torch.accelerator.is_available():
        return
    result._ResultMetric.to = lambda self, *args, **kwargs: self
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None


def connect_at_once() -> None:
    """Wait for rank 0's store with a rank that asks first; torch would try again after half a second only."""

    def store(host_name: str, port: int, *, is_master: bool, **settings: Any) -> TCPStore:
        deadline = time.monotonic() + 5
        while not is_master and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((host_name, port)):
                break
            time.sleep(0.002)
        return TCPStore(host_name, port, is_master=is_master, **settings)

    rendezvous.TCPStore = store
