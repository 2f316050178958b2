"""Real processes for tests: ``run_ranks(function, *args, nprocs=2)`` gives what the function returned on each rank.

``run_cases(function, cases, *args)`` does so for many cases in one set of processes, which costs much less.
``run_alone(function, *args)`` runs it in one process without torchrun's variables, where a new interpreter would spend
six seconds on its imports.

A forkserver that has imported torch and Lightning forks one child a rank with the variables of torchrun, so that a
strategy meets what it meets under torchrun. ``function`` must be importable from a test module.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection
from random import SystemRandom
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.ranks_preload"])


def run_ranks(
    function: Callable[..., Any], *args: Any, nprocs: int = 2, nodes: int = 1, timeout: float = 300
) -> list[Any]:
    """Run ``function(*args)`` once a rank; raise AssertionError with the traceback of each rank that failed.

    Several ``nodes`` are this machine each, as far as the variables tell.
    """
    port = _free_port()
    return _run(function, args, [_environment(rank, nprocs, port, nodes) for rank in range(nprocs)], timeout)


def run_alone(function: Callable[..., Any], *args: Any, timeout: float = 300) -> Any:
    """What ``function(*args)`` gives in a process of its own, which has imported what the forkserver has."""
    (value,) = _run(function, args, [{"OMP_NUM_THREADS": "1"}], timeout)
    return value


def printed(program: str) -> str:
    """What a program prints, for ``run_alone``: Python's own streams, not the descriptors."""
    with redirect_stdout(StringIO()) as shown:
        exec(program, {"__name__": "__main__"})
    return shown.getvalue()


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], environments: list[dict[str, str]], timeout: float
) -> list[Any]:
    ranks = [_start(function, args, environment) for environment in environments]
    deadline = time.monotonic() + timeout
    try:
        results = [_receive(process, receiver, deadline) for process, receiver in ranks]
    finally:
        for process, _ in ranks:
            process.join(max(1.0, deadline - time.monotonic()) if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
    return _values(results)


class Cases:
    """What a function returned on each rank, by its case; ``cases[case]`` raises the errors of one that failed."""

    def __init__(self) -> None:
        self._ranks: dict[Any, list[tuple[bool, Any]]] = {}

    def add(self, case: Any, ranks: list[tuple[bool, Any]]) -> None:
        self._ranks[case] = ranks

    def __getitem__(self, case: Any) -> list[Any]:
        return _values(self._ranks[case])


def run_cases(
    function: Callable[..., Any],
    cases: Iterable[Any],
    *args: Any,
    nprocs: int = 2,
    nodes: int = 1,
    timeout: float = 300,
) -> Cases:
    """Run ``function(case, *args)`` for every case, one after the other in the same processes.

    A case that fails hides no other: those behind it run in new processes.
    """
    found, left = Cases(), list(cases)
    while left:
        try:
            ranks = run_ranks(_in_turn, function, left, args, nprocs=nprocs, nodes=nodes, timeout=timeout)
        except AssertionError as error:  # A rank died or hung, in a case that it cannot name: each one by itself.
            if len(left) == 1:
                found.add(left[0], [(False, str(error))])
                break
            for case in left:
                alone = run_cases(function, [case], *args, nprocs=nprocs, nodes=nodes, timeout=timeout)
                found.add(case, alone._ranks[case])
            break
        told = list(zip(*ranks, strict=False))  # Of a rank that failed there is no more; others wait for it in vain.
        for case, values in zip(left, told, strict=False):
            found.add(case, list(values))
        left = left[len(told) :]
    return found


def _in_turn(function: Callable[..., Any], cases: list[Any], args: tuple[Any, ...]) -> list[tuple[bool, Any]]:
    """What the function returns for each case, or the traceback of the first one that fails, which is the last."""
    told: list[tuple[bool, Any]] = []
    for case in cases:
        try:
            told.append((True, function(case, *args)))
        except BaseException:  # whatever happens, the parent is told
            return [*told, (False, traceback.format_exc())]
    return told


def _values(ranks: list[tuple[bool, Any]]) -> list[Any]:
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(ranks) if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, value in ranks]


def _free_port() -> int:
    """One below those that the system itself hands out, to whoever connects before rank 0 listens."""
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", SystemRandom().randrange(16384, 32768)))  # tests seed random
            return int(sock.getsockname()[1])


def _environment(rank: int, nprocs: int, port: int, nodes: int = 1) -> dict[str, str]:
    node, local_rank = divmod(rank, nprocs // nodes)
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": node,
        "WORLD_SIZE": nprocs,
        "LOCAL_WORLD_SIZE": nprocs // nodes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _start(
    function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str]
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    receiver, sender = _context.Pipe(duplex=False)
    process = _context.Process(target=_child, args=(function, args, environment, sender))
    process.start()
    sender.close()
    return process, receiver


def _receive(process: multiprocessing.process.BaseProcess, receiver: Connection, deadline: float) -> tuple[bool, Any]:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        process.kill()
        return False, "no answer in time"
    try:
        return receiver.recv()
    except EOFError:
        process.join(5)
        return False, f"died with exit code {process.exitcode}"


def _child(
    function: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], sender: Connection
) -> None:
    os.environ.update(environment)
    # For the workers of loaders the platform's way, as under torchrun; else they would get a forkserver of their own.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        answer = pickle.dumps((True, function(*args)))
    except BaseException:  # whatever happens, the parent is told
        answer = pickle.dumps((False, traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()  # a live gloo group at exit aborts now and then
    sender.send_bytes(answer)
