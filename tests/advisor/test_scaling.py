"""docs/scaling.md: its figures are those of estimate_memory and of the committed measurements."""

from __future__ import annotations

import json
import re
from typing import Any

import lightning_tricks as lt
from tests.test_docs import DOCS, ROOT

PAGE = (DOCS / "scaling.md").read_text()


def test_the_bytes_of_seven_billion_weights_are_estimated() -> None:
    rows = re.findall(r"^\| `(\w+)`.*? \| ([\d.]+) \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 9
    for name, device, host in rows:
        found = lt.estimate_memory(7_000_000_000, strategy=name, devices=8)
        assert (device, host) == (f"{found.total / 1e9:.1f}", f"{found.host / 1e9:.1f}"), name


def test_what_the_copies_of_fsdp2_and_an_offloaded_optimizer_take() -> None:
    page, seven = " ".join(PAGE.split()), 7_000_000_000
    plain = lt.estimate_memory(seven, strategy="fsdp2_bf16", devices=8)
    assert f"{plain.casts / 1e9:.0f} of the {plain.total / 1e9:.1f} GB are 16-bit copies" in page
    recomputed = lt.suggest_strategy(seven, hardware=lt.Hardware(24e9, devices=8)).estimate
    assert recomputed.recomputes
    assert f"frees them with the activations: {recomputed.total / 1e9:.1f} GB for 7B" in page
    offloaded = lt.estimate_memory(seven, strategy="zero2_offload_bf16")
    guide = " ".join((DOCS / "choose.md").read_text().split())
    assert f"a model of 7B needs {offloaded.host / 1e9:.0f} GB of host memory" in guide


def measured(file: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]


def test_what_was_measured_is_in_the_committed_results() -> None:
    page = " ".join(PAGE.split())
    speed = {(row["case"], row["what"]): row for row in measured("speed")}
    kept, step = (f"checkpointing, {what}, vit_tiny_patch16_224" for what in ("kept for backward", "step"))
    after, before = (speed[kept, what]["median"] for what in ("full", "plain"))
    longer = speed[step, "full"]["median"] / speed[step, "plain"]["median"]
    assert f"keeps {after:.1f} instead of {before:.1f} MiB and takes {longer:.2f} times as long" in page
    lean = {row["what"]: row["median"] for row in measured("lean_loss") if row["case"] == "peak memory, head and loss"}
    assert f"take {lean['lightning_tricks']:.0f} instead of {lean['with logits']:.0f} MiB" in page
    worst = {}
    for part in ("total", "activations"):
        errors = [abs(row["over_floor"] - 1) for row in measured("memory") if row["case"].startswith(part)]
        assert len(errors) > 10
        worst[part] = max(errors)
    assert f"within {worst['total']:.1%} of what was allocated" in page
    assert f"its activations within {worst['activations']:.1%}" in page
