"""``lightning-tricks tricks``: exactly the public names, what they cost, and where they work."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import lightning_tricks as lt
from lightning_tricks_cli.main import main
from lightning_tricks_cli.runs.tricks import catalogue, tricks, works_with
from tests.public import PUBLIC


def test_json_lists_exactly_the_public_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [*PUBLIC]
    assert all(row["what"] and row["kind"] for row in rows)
    (ema,) = (row for row in rows if row["name"] == "EMA")
    assert (ema["kind"], ema["cost"]) == ("callbacks", "an fp32 copy of the weights")


def test_the_catalogue_has_every_name_of_the_top_level_once() -> None:
    names = Counter(name for row in catalogue() for name in (*row.names, *row.beside))
    assert set(names.values()) == {1}
    assert {*lt.__all__} - {"functional"} <= names.keys() <= {*PUBLIC}


def test_a_name_without_a_row_gets_one_from_its_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_tricks_cli.runs.tricks.CATALOGUE", ())
    (row,) = (row for row in catalogue() if row.names == ("freeze",))
    assert row.what.startswith("Freeze parameters")


def test_a_word_filters_and_only_the_line_of_the_name_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.name: row for row in tricks("MIX")}
    assert rows.keys() >= {"Mixup", "CutMix", "HiddenMixup", "mixup"}
    assert "EMA" not in rows
    assert rows["Mixup"].line == "callbacks=[lt.Mixup(alpha=0.2,stop=0.9)]"
    assert rows["CutMix"].line == ""
    assert main(["tricks", "nothing of that name"]) == 1
    assert "no trick has 'nothing of that name'" in capsys.readouterr().err


def test_where_a_trick_works_comes_from_the_matrix(tmp_path: Path) -> None:
    cells = {
        "fp32": {"cell": "right", "test": "tests/a.py::b"},
        "ddp": {"cell": "right", "test": "tests/a.py::c"},
        "deepspeed": {"cell": "refused", "test": "tests/a.py::d", "why": "it owns the gradients"},
        "fp16": {"cell": "none", "why": "no GradScaler on a CPU"},
    }
    matrix = tmp_path / "matrix.json"
    matrix.write_text(json.dumps({"regimes": list(cells), "tricks": {"EMA": cells}}))
    assert works_with("EMA", matrix) == "fp32, ddp"
    assert works_with("CurveLR", matrix) == ""
    assert works_with("EMA", tmp_path / "none.json") == ""
    (row,) = (row for row in tricks("EMA", matrix) if row.name == "EMA")
    assert row.description().endswith("costs: an fp32 copy of the weights\nworks with: fp32, ddp")


@pytest.mark.parametrize("rich", [True, False])
def test_it_is_readable_at_80_columns(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["tricks"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(name in out for name in PUBLIC)
    assert "costs: an fp32 copy of the weights" in " ".join(out.replace("│", " ").split())


def test_a_line_of_code_is_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["tricks", "EMA"]) == 0
    assert "callbacks=[lt.EMA(decay=0.999)]" in re.sub(r"[│\s]", "", capsys.readouterr().out)
