"""``lightning-tricks plot-schedule``: every curve with every setting."""

from __future__ import annotations

import inspect
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_tricks import schedules
from lightning_tricks.schedules import factories
from lightning_tricks_cli.commands.plot_schedule import CURVES
from lightning_tricks_cli.main import main, parser
from lightning_tricks_cli.runs.picture import picture
from tests.cli.test_main import assert_one_line

SETTINGS = {
    "cosine": ["--warmup", "0.05", "--floor", "0.1"],
    "cosine_restarts": ["--cycles", "2", "--growth", "2"],
    "flat_cos": ["--flat", "70"],
    "one_cycle": ["--initial", "0.1", "--momentum", "0.85", "0.95"],
    "polynomial": ["--power", "2"],
    "step_decay": ["--milestones", "20", "0.5", "--gamma", "0.5"],
    "wsd": ["--cooldown", "0.3", "--shape", "linear"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_curves_and_their_settings_are_those_of_the_package() -> None:
    assert set(CURVES) == factories.CURVES.keys()
    known = vars(parser().parse_args(["plot-schedule", "cosine", "-o", "a.png"]))
    given = parser().parse_args(["plot-schedule", "cosine", "-o", "a.png", *chain(*SETTINGS.values())])
    names = {name for curve in CURVES for name in inspect.signature(getattr(schedules, curve)).parameters}
    assert vars(given).keys() - known.keys() == names - {"optimizer", "module", "total_steps"}


@pytest.mark.few(4)
@pytest.mark.parametrize("curve", CURVES)
def test_a_picture_is_written(curve: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot-schedule", curve, "--steps", "100", "-o", "lr.png", *SETTINGS.get(curve, [])]) == 0
    assert capsys.readouterr() == ("wrote lr.png\n", "")
    assert Path("lr.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn_is_the_curve() -> None:
    drawn = []

    class Kept:
        def __init__(self, path: Path) -> None:
            self.context = picture(path)

        def __enter__(self) -> object:
            drawn.append(self.context.__enter__())
            return drawn[0]

        def __exit__(self, *error: object) -> None:
            self.context.__exit__(*error)

    with patch("lightning_tricks_cli.runs.picture.picture", Kept):
        assert (
            main(["plot-schedule", "cosine", "--warmup", "10", "--floor", "0.5", "--steps", "100", "-o", "a.svg"]) == 0
        )
    rates = drawn[0].lines[0].get_ydata()
    assert len(rates) == 100
    assert (rates[0], rates[9]) == (0.1, 1.0)
    assert rates[-1] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cosine", "--flat", "3"], "curve 'cosine' has no option flat; it has floor, warmup."),
        (["cosine", "--warmup", "2.5"], "--warmup must be an int >= 0 (steps) or a float in [0, 1]"),
        (["wsd", "--shape", "round"], "--shape must be one of"),
        (["cosine", "-o", "lr.txt"], "the name of the plot must end in ."),
        (["cosine", "-o", "none/lr.png"], "There is no folder none for the plot."),
    ],
)
def test_an_error_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot-schedule", "-o", "lr.png", *arguments]) == 1
    assert_one_line(capsys, message)


def test_a_length_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plot-schedule", "cosine", "-o", "lr.png", "--warmup", "long"])
    assert "'long' is neither steps (5) nor a fraction of training (0.05)" in capsys.readouterr().err
