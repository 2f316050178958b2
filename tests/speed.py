"""What makes the tests faster, here and in the processes of ``tests.ranks``, and changes nothing else."""

from __future__ import annotations

import gc
import inspect
import logging
import socket
import time
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from _pytest.logging import catching_logs
from lightning.fabric.utilities import registry
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities import signature_utils
from torch.distributed import TCPStore, rendezvous


def cache_entry_points() -> None:
    """Every Trainer looks for callbacks in the metadata of all installed packages: a fifth of a small fit's time."""
    registry.entry_points = cache(entry_points)


def cache_signatures() -> None:
    """Lightning reads the parameters of a hook before each call of it: a fortieth of a small fit's time."""
    known: dict[CodeType, inspect.FullArgSpec] = {}

    def parameters(hook: Any) -> inspect.FullArgSpec:
        function = getattr(hook, "__func__", hook)
        if not isinstance(function, FunctionType) or hasattr(function, "__signature__"):
            return inspect.getfullargspec(hook)
        if function.__code__ not in known:
            known[function.__code__] = inspect.getfullargspec(hook)
        return known[function.__code__]

    signature_utils.inspect = SimpleNamespace(getfullargspec=parameters)


def listen_to_lightning() -> None:
    """Six times a test pytest looks for loggers that do not propagate, among all there are; ours is Lightning's."""
    if "attached_loggers" not in getattr(catching_logs, "__slots__", ()):  # another version of pytest
        return

    def enter(self: Any) -> Any:
        root, ours = logging.getLogger(), logging.getLogger("lightning.pytorch")
        self.attached_loggers.extend([root] if ours.propagate else [root, ours])
        for logger in self.attached_loggers:
            logger.addHandler(self.handler)
        if self.level is not None:
            self.handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(root.level, self.level))
        return self.handler

    catching_logs.__enter__ = enter


class Garbage:
    """Lightning collects garbage in many places, each time half a second if all imported modules are looked through.

    What is alive between two tests is left out of the next collections whenever they have become slow.
    """

    def __init__(self) -> None:
        self._slow, self._began = True, 0.0
        gc.callbacks.append(self._watch)
        gc.disable()  # until the first test: imports leave little garbage

    def _watch(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        elif info["generation"] == 2:
            self._slow = time.thread_time() - self._began > 0.05

    def freeze(self) -> None:
        if self._slow:
            gc.enable()
            gc.collect()
            gc.freeze()
            self._slow = False


def leave_devices_out() -> None:
    """Without an accelerator, neither move logged values to a device nor keep seeds and their tracebacks for one.

    Lightning copies the description of each logged value with each move: together a sixth of a small fit's time.
    """
    if torch.accelerator.is_available():
        return
    move = result._ResultMetric.to
    result._ResultMetric.to = lambda self, *args, **kwargs: (
        move(self, *args, **kwargs) if torch.cuda.is_available() else self  # as in tests.device
    )
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
