"""What ``import lightning_tricks`` costs on top of ``import lightning.pytorch``, and ``--help``, in fresh processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rows import Row, figure, rows_of, target
from settings import Settings
from timing import Measured

from lightning_tricks_cli.main import parser

NAME = "import_time"
PEERS = ("timm", "ema-pytorch")
ROOT = Path(__file__).parent.parent.parent
FLOOR, OURS = "lightning.pytorch", "lightning_tricks"
# each behind lightning.pytorch, which all of them are used with
MODULES = (OURS, "timm.utils", "ema_pytorch")
PROGRAM = (
    "import time; a = time.perf_counter(); import lightning.pytorch; b = time.perf_counter();"
    " import {}; c = time.perf_counter(); print(b - a, c - b)"
)


def seconds(module: str) -> tuple[float, float]:
    """Seconds of the import of Lightning and of a module behind it, in an interpreter of its own."""
    program = PROGRAM.format(module)
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = run.stdout.split()[-2:]
    return float(first), float(second)


def run(settings: Settings) -> list[Row]:
    """Interleaved repeats, after one that warms the disk cache if there are several."""
    modules = settings.pick("modules", MODULES, MODULES[:1], MODULES[:1])
    measured = Measured({FLOOR: [], **{module: [] for module in modules}}, {})
    repeats = settings.pick("repeats", 3, 1, 1)
    for repeat in range(repeats + (repeats > 1)):
        for module in modules:
            first, second = seconds(module)
            if repeat or repeats == 1:
                measured.times[module].append(second * 1e6)
                if module == OURS:
                    measured.times[FLOOR].append(first * 1e6)
    return rows_of("import", measured, FLOOR, "s") + rows_of("help", Measured(helps(repeats), {}), unit="s")


def helps(repeats: int) -> dict[str, list[float]]:
    """Microseconds from start to end of the ``--help`` of each command."""
    names = re.findall(r"^    ([a-z-]+)(?: |$)", parser().format_help(), re.MULTILINE)
    return {name: [asked(name) for _ in range(repeats)] for name in names}


def asked(command: str) -> float:
    """Microseconds of one ``--help``."""
    begin = time.perf_counter()
    program = [sys.executable, "-m", "lightning_tricks_cli.main", command, "--help"]
    subprocess.run(program, cwd=ROOT, capture_output=True, check=True)
    return (time.perf_counter() - begin) * 1e6


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What users wait for."""
    slowest = max(row.median for row in rows if row.case == "help" and row.median is not None)
    return [
        target("s added by lightning_tricks", figure(rows, "import", OURS), "<=", 0.3),
        target("s of the slowest --help", slowest, "<=", 1),
    ]
