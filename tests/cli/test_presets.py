"""``lightning-tricks presets``: the table, for people and programs."""

from __future__ import annotations

import json

import pytest

import lightning_tricks as lt
from lightning_tricks_cli.main import main


def test_json_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == lt.presets()


def test_it_is_readable_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["presets"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for row in lt.presets():
        assert f"{row['name']} {row['precision']} {row['strategy']} {row['when']}" in words
