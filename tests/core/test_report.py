"""Tables in text, with rich and without."""

from __future__ import annotations

import sys

import pytest

from lightning_tricks.core.report import plain_table, table

ROWS = [["EMA", "decay 0.999, start 9 of 12"], ["SAM", "rho 0.3 [bold]"]]


def test_rich_draws_it_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    text = table(("trick", "settings"), ROWS)
    assert "\x1b[3" not in text
    assert "[bold]" in text  # no markup
    assert all(len(line) <= 30 for line in text.splitlines())


def test_figures_are_not_cut_where_the_terminal_is_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    text = table(("strategy", "tokens/s", "each device", "speed"), [("fsdp2_bf16", "222,716", "67.4 GB", "1.00")])
    assert all(cell in text for cell in ("fsdp2_bf16", "222,716", "67.4 GB", "1.00", "each device"))


def test_without_rich_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    monkeypatch.setenv("COLUMNS", "40")
    assert table(("trick", "settings"), ROWS) == plain_table(("trick", "settings"), ROWS, 40)
