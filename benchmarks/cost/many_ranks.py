"""What a rank costs among up to 64 of one machine: its work in a step, alone and with callbacks, and its memory.

The ranks are forked from one process that has imported everything, so that they fit into the memory. A rank's work is
the processor's time, of all its threads, which waiting does not add to.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rows import Row, figure, row, target
from scaling import line, points
from settings import Settings

NAME = "many_ranks"
PEERS: tuple[str, ...] = ()
LIMIT = 600  # seconds of all fits of the ranks
PLAIN, TRICKS, MEMORY = "a rank's step, plain", "a rank's step, EMA and SkipNonFinite", "memory of a rank's own"
LINE, EXPLAINED = "line a rank's step, EMA and SkipNonFinite", "explained"


def costs(ranks: int) -> list[dict[str, float]]:
    """What each rank has written."""
    from ranks_many import main

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_many"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            values |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": NAME}
            environment = {name: str(value) for name, value in values.items()}
            processes.append(context.Process(target=main, args=(environment, folder)))
            processes[-1].start()
        for process in processes:
            process.join(LIMIT)
            if process.exitcode:
                raise RuntimeError(f"a rank of {ranks} ended with exit code {process.exitcode}")
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def run(settings: Settings) -> list[Row]:
    """All numbers of ranks, and the line through a rank's step."""
    found: list[Row] = []
    for ranks in settings.pick("ranks", (4, 8, 16, 32, 64), (2, 4, 8), (2,)):
        told, what = costs(ranks), f"{ranks} ranks"
        found.append(row(PLAIN, what, [1e3 * each["plain"] for each in told], "ms"))
        found.append(row(TRICKS, what, [1e3 * each["tricks"] for each in told], "ms"))
        found.append(row(MEMORY, what, [each["bytes"] / 1e6 for each in told], "MB"))
    return [*found, *lines(found)]


def lines(rows: Sequence[Row]) -> list[Row]:
    """The line through the points, if there are three; sums over a ring of ranks make its slope."""
    numbers, measured = points({"rows": [each._asdict() for each in rows]}, TRICKS)
    if len(numbers) < 3:
        return []
    fitted = line(numbers, [each["median"] for each in measured])
    return [row(LINE, "slope", [fitted.slope], "ms a rank"), row(LINE, EXPLAINED, [fitted.explained], "share")]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A rank's work grows by the same with each other rank."""
    explained = figure(rows, LINE, EXPLAINED)
    return [target("share of the variance that a line explains, by ranks", explained, ">=", 0.95)]
