"""docs/scaling.md: its figures are those of estimate_memory and of the committed measurements."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

import lightning_tricks as lt
from tests.advisor.simulate.published import L8, L70, ROWS, SOURCES
from tests.advisor.simulate.test_step import BEYOND, LIMIT
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


def planned(name: str, shape: lt.TransformerShape, devices: int) -> str:
    """The row of a model on so many H100, with four million tokens a step or a sample for each device."""
    hardware = lt.Hardware.of("h100", devices=8, nodes=devices // 8)
    plan = lt.suggest_plan(shape, hardware=hardware, batch_size=max(512, devices))
    first, *others = plan.candidates
    batch = f"{first.micro_batch} x {first.accumulate}{', checkpointing' if first.estimate.recomputes else ''}"
    slower = [
        f"`{each.preset}`, {1 - each.step.tokens_per_second / first.step.tokens_per_second:.0%} slower"
        for each in others
    ]
    speed = f"{plan.tokens_per_second:,.0f} | {plan.share_of_peak:.0%}"
    second = slower[0] if slower else "no other fits"
    return f"| {name} | {devices:,} | `{first.preset}` | {batch} | {speed} | {second} |"


def test_plans_for_many_devices_are_simulated() -> None:
    rows = [planned("8B", L8, devices) for devices in (8, 64, 512, 4096)]
    rows += [planned("70B", L70, devices) for devices in (64, 512, 4096)]
    missing = [row for row in rows if row not in PAGE]
    assert not missing, "\n".join(missing)


def checked(source: str) -> str:
    """The row of a source."""
    errors = [abs(row.error()) for row in ROWS if row.source == source]
    within, half = sum(error <= LIMIT for error in errors), median(errors)
    return f"| [{source}]({SOURCES[source]}) | {len(errors)} | {within} | {half:.1%} | {max(errors):.0%} |"


def test_the_check_of_the_simulator_is_that_of_its_tests() -> None:
    page = " ".join(PAGE.split())
    rows = [checked(source) for source in SOURCES]
    rows += [
        f"| {row.source}: {row.what} | {row.value:,g} | {row.simulated():,.4g} | {row.error():+.0%} |"
        for row in ROWS
        if f"{row.source}: {row.what}" in BEYOND
    ]
    missing = [row for row in rows if row not in PAGE]
    assert not missing, "\n".join(missing)
    others = [abs(row.error()) for row in ROWS[1::2]]
    within = sum(error <= LIMIT for error in others)
    assert f"{within} of the {len(others)} others are within 15%, half of them within {median(others):.0%}" in page


def test_what_a_rank_among_many_costs_is_in_the_committed_results() -> None:
    page = " ".join(PAGE.split())
    found = {(row["case"], row["what"]): row["median"] for row in measured("many_ranks")}
    step = "a rank's step, "
    few, many = ([found[step + what, f"{n} ranks"] for what in ("plain", "EMA and SkipNonFinite")] for n in (4, 64))
    memory = found["memory of a rank's own", "64 ranks"]
    assert f"has {memory:.0f} MB of its own" in page
    assert f"takes {many[0]:.1f} ms of the processor, and {many[1]:.1f} ms with" in page
    assert f"of 4 ranks it takes {few[0]:.1f} and {few[1]:.1f} ms" in page
