"""The committed matrix: whole, found by tests that exist, and shown in the documentation as it is."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from benchmarks.matrix import HEADS, JSON, PAGE, cells, markdown, page, waits
from tests.conformance.matrix import REGIMES, ROWS, as_json, empty
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import public_name
from tests.device.waits import WAITS, waits_of
from tests.ranks import run_alone

ROOT = Path(__file__).parent.parent.parent


def test_every_row_is_there_and_no_cell_is_empty() -> None:
    matrix = json.loads(JSON.read_text())
    assert list(matrix["tricks"]) == sorted(ROWS), "run make matrix"
    assert matrix["regimes"] == list(REGIMES) == list(HEADS)
    assert empty(matrix) == []


@pytest.mark.parametrize("row", SETTINGS)
def test_what_is_refused_is_what_the_settings_say(row: str) -> None:
    of, refused = cells()[row], REGIMES.keys() & set(SETTINGS[row].refused)  # fp64 has no column
    refused |= {"several"} if "manual" in refused else set()
    refused |= {"compiled DDP", "ranks"} if "DDP" in refused else set()
    assert {regime for regime in of if of[regime]["cell"] == "refused"} == refused
    right = REGIMES.keys() - refused - {"yaml", *(["LoRA"] if public_name(row) == "LoRA" else [])}
    assert all(of[regime]["cell"] == "right" for regime in right)


@pytest.mark.slow
def test_every_named_test_is_collected() -> None:
    collected = run_alone(collect)
    named = {cell["test"] for of in cells().values() for cell in of.values()} | {of["test"] for of in waits().values()}
    assert named <= collected, sorted(named - collected)[:5]


def collect() -> set[str]:
    """The names of all tests that find something, whatever the options of this run are."""
    found: set[str] = set()

    class Names:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            found.update(item.nodeid for item in session.items)

    os.chdir(ROOT)
    options = ["--collect-only", "-qq", "-m", "", "-o", "addopts=", "--assert=plain", "-p", "no:cacheprovider"]
    with redirect_stdout(StringIO()) as printed:
        folders = [str(ROOT / "tests" / folder) for folder in ("conformance", "device")]
        assert pytest.main([*options, *folders], plugins=[Names()]) == 0, printed.getvalue()
    return found


@pytest.mark.parametrize("row", SETTINGS)
def test_a_step_waits_as_often_as_the_table_says(row: str) -> None:
    found, (step, why) = waits()[row], waits_of(row)
    assert (found["step"], found.get("why", "")) == (step, why)
    assert step <= found["logged"] <= step + 1
    assert set(WAITS) <= set(SETTINGS)


def test_the_page_is_what_the_matrix_gives() -> None:
    assert PAGE.read_text() == page(), "run make matrix"


def test_the_short_table_has_every_row_once() -> None:
    table = markdown()
    assert all(table.count(f"`{row}`") == 1 for row in ROWS)


def test_what_no_test_has_found_is_named() -> None:
    some = as_json([(("EMA", "fp32", "right", ""), "test"), (("EMA", "DDP", "refused", "because"), "test")])
    assert some["tricks"]["EMA"]["DDP"] == {"cell": "refused", "test": "test", "why": "because"}
    missing = empty(some)
    assert len(missing) == len(ROWS) * len(REGIMES) - 2 + 2 * len(SETTINGS)  # waits, memory
    assert "EMA x bf16" in missing


@pytest.mark.parametrize(
    "cell", [("EMA", "fp32", "perhaps", ""), ("EMA", "fp64", "right", ""), ("EMA", "DDP", "refused", "")]
)
def test_there_is_no_third_state(cell: tuple[str, str, str, str]) -> None:
    with pytest.raises(ValueError, match="no such cell"):
        as_json([(cell, "test")])


def test_a_cell_is_found_by_one_test() -> None:
    with pytest.raises(ValueError, match="one and two"):
        as_json([(("EMA", "fp32", "right", ""), name) for name in ("one", "two")])
