"""Real processes for tests: ``run_ranks(function, *args, nprocs=2)`` gives what the function returned on each rank.

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
from collections.abc import Callable
from contextlib import suppress
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
    ranks = [_start(function, args, _environment(rank, nprocs, port, nodes)) for rank in range(nprocs)]
    deadline = time.monotonic() + timeout
    try:
        results = [_receive(process, receiver, deadline) for process, receiver in ranks]
    finally:
        for process, _ in ranks:
            process.join(max(1.0, deadline - time.monotonic()) if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
    failed = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


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
