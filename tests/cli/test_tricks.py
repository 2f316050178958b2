"""``lightning-tricks tricks``: a line for each trick, the card of one, JSON of all public names; without an import."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_tricks_cli.cards import card, cards, every_name, matrix
from lightning_tricks_cli.commands.tricks import in_text, tricks, works_with
from lightning_tricks_cli.main import main
from tests.public import PUBLIC

ROOT = Path(__file__).parents[2]


def test_json_lists_exactly_the_public_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [*PUBLIC]
    assert all(row["what"] and row["kind"] for row in rows)
    (ema,) = (row for row in rows if row["name"] == "EMA")
    assert (ema["kind"], ema["cost"]) == ("callbacks", "an fp32 copy of the weights")


def test_a_line_for_each_card_fits_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == cards()
    assert max(map(len, lines)) <= 100


UNSEEN = ("![", "<details>", "<summary>", "</details>")  # in a terminal


@pytest.mark.parametrize("name", ["EMA", "SAM", "CutMix", "scale_ema_decay"])
def test_a_name_prints_its_card(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", name]) == 0
    text = [line for line in in_text(card(name)).splitlines() if line]
    assert [line for line in capsys.readouterr().out.splitlines() if line] == text


def test_a_card_in_a_terminal_has_no_picture_and_no_link_that_leads_nowhere() -> None:
    for name in cards():
        text = in_text(card(name))
        assert not re.search(r"\]\((?!https?:)", text)
        named = re.findall(r"\(((?:docs|benchmarks|configs|notebooks|lightning_tricks)/[\w./-]+|[A-Z]+\.md)", text)
        assert all((ROOT / path).exists() for path in named)
        others = set(re.findall(r"\(lightning-tricks tricks (\w+)\)", text))
        assert others <= {*cards()}
    assert "- Images: Mixup mixes what the network sees." in in_text(card("HiddenMixup"))
    assert "[How it was measured]" not in text
    assert "The whole matrix (docs/compatibility.md), with" in in_text(card("EMA"))


def in_a_terminal(*arguments: str, width: int = 60) -> str:
    """What a command prints on a terminal, without colours."""
    main_end, command_end = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_tricks_cli.main", *arguments]
    shown = b""
    with subprocess.Popen(command, stdout=command_end, stderr=command_end, env=environment) as running:
        os.close(command_end)
        with suppress(OSError):  # Linux says by an error that the other end is closed
            while part := os.read(main_end, 65536):
                shown += part
    os.close(main_end)
    assert running.returncode == 0
    return re.sub(r"\x1b(\[[\d;]*m|\]8;.*?\x1b\\)", "", shown.decode()).replace("\r", "")


@pytest.mark.parametrize("name", ["HiddenMixup", "EMA"])
def test_a_terminal_gets_a_page_that_fits_and_whole_words(name: str) -> None:
    shown = in_a_terminal("tricks", name)
    assert not re.search(r"^#|```|\]\(", shown, re.MULTILINE)  # nothing of Markdown's own is left
    assert max(map(len, shown.splitlines())) <= 60
    told = re.findall(r"[A-Za-z]{3,}", shown)
    assert not {*told} - {*re.findall(r"[A-Za-z]{3,}", in_text(card(name)))}  # no part of a word stands alone
    assert "Fine-tuning a text classifier on little data." in shown or name != "HiddenMixup"


def test_another_word_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "MEMORY"]) == 0
    out = capsys.readouterr().out
    assert "ActivationCheckpointing" in out
    assert "  EMA " not in out
    assert main(["tricks", "CutMixx"]) == 1
    assert "no trick 'CutMixx'. Did you mean 'CutMix'? See" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["learning", "curves"], "one_cycle"),  # in the description, one word after the other or not
        (["early", "stopping"], "flat_cos"),  # in the text of the card alone
        (["early stopping"], "flat_cos"),
    ],
)
def test_several_words_need_no_quotes(words: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", *words]) == 0
    out = capsys.readouterr().out
    assert f"  {found} " in out
    assert "  EMA " not in out


def test_a_misspelt_name_has_one_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "mixp"]) == 1
    assert "no trick 'mixp'. Did you mean 'Mixup'? See lightning-tricks tricks." in capsys.readouterr().err


def test_a_name_in_other_letters_prints_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "skipnonfinite"]) == 0
    assert capsys.readouterr().out == in_text(card("SkipNonFinite"))


def test_only_the_name_in_a_line_of_code_has_it() -> None:
    rows = {row.name: row for row in tricks("MIX")}
    assert rows.keys() >= {"Mixup", "CutMix", "HiddenMixup", "mixup"}
    assert "EMA" not in rows
    assert rows["Mixup"].line == "callbacks=[lt.Mixup(alpha=0.2, stop=0.9)]"
    assert rows["CutMix"].line == ""


def test_where_a_trick_works_comes_from_the_matrix() -> None:
    refused = [regime for regime, cell in matrix()["StepInBackward"].items() if cell["cell"] != "right"]
    assert "DDP" in refused
    assert works_with("StepInBackward").split(", ") == [each for each in matrix()["EMA"] if each not in refused]
    assert works_with("CurveLR") == ""


def test_it_imports_neither_torch_nor_the_package() -> None:
    code = (
        "import sys; from lightning_tricks_cli.main import main; main(['tricks']); main(['tricks', 'EMA']);"
        " assert not {'torch', 'lightning', 'lightning_tricks', 'rich'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


def test_no_two_cards_have_a_name() -> None:
    assert len(every_name()) == len({*every_name()})
