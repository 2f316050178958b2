"""``lightning-tricks tricks``: a line for each trick, the card of one, JSON of all public names; without an import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_tricks_cli.cards import card, cards, every_name, matrix
from lightning_tricks_cli.main import main
from lightning_tricks_cli.runs.tricks import tricks, works_with
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
    text = [line for line in card(name).splitlines() if line and not line.startswith(UNSEEN)]
    assert [line for line in capsys.readouterr().out.splitlines() if line] == text


def test_another_word_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "MEMORY"]) == 0
    out = capsys.readouterr().out
    assert "ActivationCheckpointing" in out
    assert "  EMA " not in out
    assert main(["tricks", "CutMixx"]) == 1
    assert "no trick 'CutMixx'. Did you mean 'CutMix'?" in capsys.readouterr().err


def test_a_name_in_other_letters_prints_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tricks", "skipnonfinite"]) == 0
    assert capsys.readouterr().out == card("SkipNonFinite")


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
