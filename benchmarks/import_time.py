"""What ``import lightning_tricks`` costs on top of ``import lightning.pytorch``, and ``--help``, in fresh interpreters.

Run ``python benchmarks/import_time.py``; it prints the figures and writes ``benchmarks/results/import_time.json``.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from machine import machine

from lightning_tricks_cli.main import parser

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "import_time.json"
TARGET_S = 0.3

# both start with lightning.pytorch, so the second import is timed apart from it as well
ALONE = "import time; a = time.perf_counter(); import lightning.pytorch; b = time.perf_counter(); print(b - a, 0.0)"
WITH_TRICKS = (
    "import time; a = time.perf_counter(); import lightning.pytorch; b = time.perf_counter();"
    " import lightning_tricks; c = time.perf_counter(); print(b - a, c - b)"
)


def seconds(program: str) -> tuple[float, float]:
    """Seconds of the first and of the second import of a program in an interpreter of its own."""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = run.stdout.split()[-2:]
    return float(first), float(second)


def measure(repeats: int) -> dict[str, object]:
    """Medians over interleaved repeats, after one pair that warms the disk cache."""
    alone, with_tricks, added = [], [], []
    for repeat in range(repeats + 1):
        base, _ = seconds(ALONE)
        first, second = seconds(WITH_TRICKS)
        if repeat:
            alone.append(base)
            with_tricks.append(first + second)
            added.append(second)
    return {
        "repeats": repeats,
        "lightning_pytorch_s": round(median(alone), 3),
        "with_lightning_tricks_s": round(median(with_tricks), 3),
        "ratio": round(median(with_tricks) / median(alone), 3),
        "added_s": round(median(added), 4),
        "added_s_max": round(max(added), 4),
        "target_s": TARGET_S,
    }


def measure_help(repeats: int) -> dict[str, float]:
    """Seconds from start to end of the slowest ``--help`` of each command."""
    command = [sys.executable, "-m", "lightning_tricks_cli.main"]
    slowest = {}
    for name in re.findall(r"^    ([a-z-]+)(?: |$)", parser().format_help(), re.MULTILINE):
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run([*command, name, "--help"], cwd=ROOT, capture_output=True, check=True)
            seconds.append(time.perf_counter() - start)
        slowest[name] = round(max(seconds), 3)
    return slowest


def main() -> None:
    """Measure, print, write."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repeats", type=int, default=7)
    repeats = arguments.parse_args().repeats
    result = {"machine": machine(), "result": measure(repeats), "slowest_help_s": measure_help(repeats)}
    text = json.dumps(result, indent=2)
    print(text)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text + "\n")


if __name__ == "__main__":
    main()
