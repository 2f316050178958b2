"""The compatibility matrix as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
JSON = ROOT / "lightning_tricks_cli" / "matrix.json"
XLA = ROOT / "benchmarks" / "results" / "xla.json"
PAGE = ROOT / "docs" / "compatibility.md"

HEADS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "accumulate": "accumulate",
    "clip": "clip",
    "manual": "manual",
    "DDP": "DDP",
    "FSDP2": "FSDP2",
    "DeepSpeed": "ZeRO-3",
    "compile": "compile",
    "resume": "resume",
    "exception": "retry",
    "second": "second",
    "again": "again",
    "yaml": "YAML",
    "several": "2 optimizers",
    "iterable": "stream",
    "compiled DDP": "compile, DDP",
    "ranks": "other ranks",
    "LoRA": "LoRA",
    "namespace": "pl",
}
SIGNS = {"right": "✓", "refused": "✗", "none": "-"}
LEGEND = (
    "✓: a test shows that it is right: equal to a naive reference, or to the run in one process, without interruption,"
    " uncompiled. ✗: refused, by an error with a name before the first optimizer step. -: not applicable."
)
TITLE = "# What works with what"
COLUMNS = """\
- **fp32**, **bf16** (`bf16-mixed`), **fp16** (`16-mixed` with a GradScaler), **accumulate** (3 batches, the last window
  shorter), **clip** (`gradient_clip_val`): equal to a plain loop without Lightning.
- **manual**: `automatic_optimization = False` trains what automatic optimization trains, bit for bit; curves are given
  their `total_steps`.
- **DDP**, **FSDP2**, **ZeRO-3**: two processes train what one process trains on their batches.
- **compile**: equal to the network run eagerly.
- **resume**: from a checkpoint in the middle of an epoch and at its end, bit-equal to the run without interruption. The
  loader has `state_dict` and `load_state_dict`; with any other one Lightning itself begins the epoch's batches again.
- **retry**: the same callbacks after a fit that raised, bit-equal to new ones. **second**: a second Trainer.
- **again**: a second fit of one Trainer, stopped before and with another number of epochs: schedules and fractions of
  training go on at their place in the plan; callbacks start anew, or go on with what the note says.
- **YAML**: a LightningCLI configuration file, bit-equal to the same in Python.
- **2 optimizers**, in manual optimization: equal to one optimizer of all weights; clipping by the norm and SAM, which
  treat each optimizer by itself, to a plain loop.
- **stream**: a loader without a length and `max_steps`, bit-equal to one with a length.
- **compile, DDP**: compiled networks in two processes equal one process that runs eagerly.
- **other ranks**: from a checkpoint of one process two go on as one would, and one from a checkpoint of two.
- **LoRA**: beside it equal to a plain loop with both; frozen weights stay as they are, and at its no-op limit a trick
  changes nothing.
- **pl**: with a `pytorch_lightning.Trainer` equal to the plain loop of fp32."""

WAITS = (
    "**waits**: how often a training step waits for a GPU, beyond one of plain Lightning (a simulated device counts); a"
    " step that logs at most once more. Those that wait decide by a number:"
)
ON_XLA = (
    "**XLA**: `accelerator='tpu'` on the device that torch_xla makes of the host's CPU, as `make test-xla` found with"
    " {}: fp32, accumulation, clipping, validation, and a fit that goes on from a checkpoint, equal to the CPU but for"
    " rounding. The running variance of BatchNorm is left out, which torch_xla computes by another formula. No TPU has"
    " run it. Presets are strategies, and Lightning has one of its own for XLA."
)
SHORT = "## The exceptions\n\nEverything works in every regime, but for what stands here:"


def cells() -> dict[str, dict[str, dict[str, str]]]:
    """Of each row, what was found in each regime."""
    found: dict[str, Any] = json.loads(JSON.read_text())["tricks"]
    return found


def waits() -> dict[str, dict[str, Any]]:
    """Of each trick, how often a step waits for the device."""
    found: dict[str, Any] = json.loads(JSON.read_text())["waits"]
    return found


def xla() -> dict[str, dict[str, Any]]:
    """Versions, and of each trick what was found on a device of torch_xla."""
    found: dict[str, dict[str, Any]] = json.loads(XLA.read_text())
    return found


def reasons() -> str:
    """Those that wait, and what for."""
    return "\n".join(f"- `{row}`: {of['step']}, {of['why']}." for row, of in waits().items() if of["step"])


def markdown() -> str:
    """The short table: where a row is not right; rows whose cells are equal share one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row, of in cells().items():
        refused, none = (
            "; ".join(head for regime, head in HEADS.items() if of[regime]["cell"] == cell)
            for cell in ("refused", "none")
        )
        groups.setdefault((refused, none), []).append(f"`{row}`")
    everywhere = ", ".join(row for (refused, _), rows in sorted(groups.items()) for row in rows if not refused)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0].count(";"), group[1]))
    lines = [f"|{', '.join(rows)}|{refused}|{none}|" for (refused, none), rows in ordered if refused]
    table = ["|tricks and presets|refused|not applicable|", "|---|---|---|", *lines]
    return "\n".join([*table, "", f"Refused nowhere: {everywhere}."])


def page() -> str:
    """docs/compatibility.md: the short table, a row each, and what a refusal says."""
    notes: list[str] = []
    on_xla, rows = xla(), []
    for row, of in cells().items():
        signs = [_sign(of[regime], notes) for regime in HEADS]
        signs.append(str(waits()[row]["step"]) if row in waits() else "")
        signs.append(_sign(on_xla["tricks"][row], notes) if row in on_xla["tricks"] else "")
        rows.append((f"`{row}`", signs))
    versions = _listed(json.loads(JSON.read_text())["versions"])
    numbered = "\n".join(f"{number}. {why}" for number, why in enumerate(notes, 1))
    head = (
        f"{TITLE}\n\nWritten by `make matrix`, from tests in `tests/conformance` and `tests/device` that passed with"
        f" {versions}."
    )
    devices = [WAITS, reasons(), ON_XLA.format(_listed(on_xla["versions"]))]
    parts = [head, SHORT, markdown(), "## Each by itself", LEGEND, _table(rows), "## The columns", COLUMNS, *devices]
    return "\n\n".join([*parts, "## Notes", numbered]) + "\n"


def _sign(cell: dict[str, str], notes: list[str]) -> str:
    """What was found, with the number of the note that says why."""
    why = cell.get("why")
    if why and why not in notes:
        notes.append(why)
    return SIGNS[cell["cell"]] + (f" [{notes.index(why) + 1}](#notes)" if why else "")


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _table(rows: list[tuple[str, list[str]]]) -> str:
    heads = ["", *HEADS.values(), "waits", "XLA"]
    lines = [heads, ["---"] * len(heads), *([name, *signs] for name, signs in rows)]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)
