"""The compatibility matrix: its rows, its columns, and the file that holds what the tests found."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.conformance.settings import SETTINGS

REGIMES = {
    "fp32": "fp32",
    "bf16": "bf16-mixed",
    "fp16": "fp16 GradScaler",
    "accumulate": "accumulate 3, ragged",
    "clip": "clip norm",
    "manual": "manual optimization",
    "DDP": "DDP x2",
    "FSDP2": "FSDP2 x2",
    "DeepSpeed": "ZeRO-3 x2",
    "compile": "torch.compile",
    "resume": "resume mid-epoch",
    "exception": "exception + retry",
    "second": "second Trainer",
    "yaml": "LightningCLI YAML",
    "several": "two optimizers",
    "iterable": "loader without a length",
    "compiled DDP": "torch.compile, DDP x2",
    "ranks": "checkpoint of one process in two",
    "LoRA": "beside LoRA",
    "namespace": "pytorch_lightning",
}
PRESETS = ("single_*", "ddp_*", "fsdp2_*", "hsdp_*", "tp_*", "zero*")  # families: rows of their own
ROWS = (*SETTINGS, *PRESETS)
FOUND = ("right", "refused", "none")

Cell = tuple[str, str, str, str]  # row, regime, what was found, why


def as_json(cells: Iterable[tuple[Cell, str]]) -> dict[str, Any]:
    """The contents of the file, of the cells and the tests that found them, in the order of rows and columns.

    Raises:
        ValueError: If a cell was found twice, or is neither "right" nor "refused" or "none" with a reason.
    """
    tricks: dict[str, dict[str, dict[str, str]]] = {row: {} for row in sorted(ROWS)}
    for (row, regime, found, why), test in cells:
        if regime in tricks[row]:
            raise ValueError(f"{row} x {regime} is found by two tests, {tricks[row][regime]['test']} and {test}.")
        if found not in FOUND or regime not in REGIMES or (found != "right" and not why):
            raise ValueError(f"{row} x {regime}: no such cell, {found!r} because {why!r} ({test}).")
        tricks[row][regime] = {"cell": found, "test": test, **({"why": readable(why)} if why else {})}
    ordered = {row: {regime: of[regime] for regime in REGIMES if regime in of} for row, of in tricks.items()}
    return {
        "versions": {name: version(name).split("+")[0] for name in ("torch", "lightning", "deepspeed")},
        "regimes": list(REGIMES),
        "tricks": ordered,
    }


def readable(why: str) -> str:
    """A message without what only the tests have: their folder, and their kind of DeepSpeed."""
    return re.sub(r"'/[^']*/([^'/]+)'", r"'\1'", why).replace("CPUDeepSpeedStrategy", "DeepSpeedStrategy")


def empty(matrix: dict[str, Any]) -> list[str]:
    """The cells that no test has found."""
    return [f"{row} x {regime}" for row in ROWS for regime in REGIMES if regime not in matrix["tricks"].get(row, {})]


def write(matrix: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(matrix, indent=1, ensure_ascii=False) + "\n")
