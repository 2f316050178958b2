"""``lightning-tricks optimizers``: the table, for people and programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import lightning_tricks as lt
from lightning_tricks_cli.main import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_json_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == lt.optimizers()


def test_it_is_readable_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["optimizers"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert all(row["name"] in out for row in lt.optimizers())
    assert re.search(r"^adafactor +torch +~0\.059 ", out, re.MULTILINE)


def test_bytes_that_depend_on_shapes_are_those_that_were_measured() -> None:
    figures = json.loads((BENCHMARKS / "results" / "optimizers.json").read_text())["rows"]
    measured = {row["what"]: float(f"{row['median']:.2g}") for row in figures if row["unit"] == "bytes"}
    shaped = {row["name"]: row["bytes"] for row in lt.optimizers() if row["by_shape"]}
    assert shaped == {name: measured[name] for name in shaped}
    assert len(shaped) == 4


def test_the_page_has_the_table(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import optimizer_table

    assert optimizer_table.PAGE.read_text() == optimizer_table.page(), "`make tables` writes it"
