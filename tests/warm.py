"""Workers of pytest-xdist, forked from the one process that has imported the tests and what they import.

A worker that execnet starts spends half a minute of processor time on imports, its own and those of its forkserver for
``tests.ranks``. Forked ones share them, so that a machine of two cores has more workers than it has cores: while the
ranks of one wait for each other, another works.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

# What modules of tests import as they are collected, beside what ranks import; another environment may lack some.
HEAVY = (
    "hypothesis",
    "jupytext",
    "optuna",
    "peft",
    "pytorch_lightning",
    "sklearn.linear_model",
    "tensordict",
    "timm.utils",
    "transformers.trainer_utils",
)
OTHER_NAMESPACE = re.compile(r"pytorch_lightning_tricks|tests\.pytorch_lightning")

_started = gateway_io.Popen2IOMaster  # execnet's own
_forked: list[tuple[multiprocessing.Process, int, int]] = []


class ForkedIO(Popen2IO):
    """execnet's connection to a process, of which it asks no more than this."""

    def __init__(self, execmodel: Any, process: multiprocessing.Process, stdin: int, stdout: int) -> None:
        super().__init__(os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), execmodel)
        self._process = process

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def fork_workers(count: int, tests: Sequence[Path]) -> None:
    """Fork so many workers, before execnet's first thread, and let execnet have them in place of new processes.

    Args:
        count: How many.
        tests: The files of tests that they will collect. Those of ``pytorch_lightning_tricks`` are left to them: they
            begin where it has not been imported. So are those that cannot be imported, whose error a worker reports.
    """
    if sys.platform != "linux" or torch.accelerator.is_available():  # forks can use neither CUDA nor macOS's frameworks
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of libraries would be errors here, too
        for name in ("tests.ranks_preload", *HEAVY):
            with suppress(ImportError):
                import_module(name)
        for path in tests:
            if not OTHER_NAMESPACE.search(path.read_text()):
                with suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):  # those are no Exception
                    import_module(".".join(path.with_suffix("").parts))
    gc.collect()
    gc.freeze()  # pages stay shared
    for _ in range(count):
        (stdin, to_worker), (from_worker, stdout) = os.pipe(), os.pipe()
        ours = [end for _, *ends in _forked for end in ends] + [to_worker, from_worker]
        process = multiprocessing.get_context("fork").Process(target=_work, args=(stdin, stdout, ours))
        process.start()
        os.close(stdin)
        os.close(stdout)
        _forked.append((process, to_worker, from_worker))
    gateway_io.Popen2IOMaster = _connect


def _connect(args: list[str], execmodel: Any) -> Popen2IO:
    """The next worker; one that replaces another, which died, is started by execnet."""
    return ForkedIO(execmodel, *_forked.pop(0)) if _forked else _started(args, execmodel)


def _work(stdin: int, stdout: int, others: list[int]) -> None:
    """Do what ``python -c "import sys;exec(eval(sys.stdin.readline()))"`` does, with which execnet starts a worker."""
    for end in others:  # else no one would see their ends closed
        os.close(end)
    logging.getLogger().handlers.clear()  # pytest's, of the other process
    warnings.resetwarnings()  # pytest's, too; what follows are Python's own
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    _fork_forkserver([stdin, stdout])
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    sys.argv = ["-c"]
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, "w" if fd else "r", closefd=False) for fd in range(3))
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


def _fork_forkserver(others: list[int]) -> None:
    """Let the forkserver of ``tests.ranks`` have the imports, too, and nothing that a test may change later."""
    import_module("tests.ranks")  # says what the forkserver has to import
    resource_tracker.ensure_running()

    def fork(path: Any, args: list[str], passed: list[int]) -> int:
        return os.fork() or _serve(args[-1], passed, others)

    spawn, util.spawnv_passfds = util.spawnv_passfds, fork
    forkserver.ensure_running()
    util.spawnv_passfds = spawn


def _serve(code: str, passed: list[int], others: list[int]) -> NoReturn:
    try:
        pipes = {os.fstat(end).st_ino for end in passed}
        own = [end for end in map(int, os.listdir("/proc/self/fd")) if end not in passed]
        for end in own:
            with suppress(OSError):  # that of the listing itself is closed by now
                if end in others or os.fstat(end).st_ino in pipes:
                    os.close(end)
        exec(code)  # until its worker, which has the other end of the pipe, has ended
    finally:
        os._exit(0)
