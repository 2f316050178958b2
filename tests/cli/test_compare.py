"""compare: the runs are those that fit makes of the same configurations; what it prints, keeps and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_tricks as lt
from lightning_tricks.examples.digits import Digits, DigitsData, SharpDigits
from lightning_tricks.examples.tasks import QUIET as ARGUMENTS
from lightning_tricks.examples.tasks import SharpClassifier
from lightning_tricks_cli.main import main
from tests.cli.test_main import assert_one_line

CONFIGS = Path(__file__).parent.parent.parent / "configs"
QUIET = {
    "max_epochs": 1,
    "limit_train_batches": 3,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}
MODEL = {"class_path": "lightning_tricks.examples.digits.Digits"}
DATA = {"class_path": "lightning_tricks.examples.digits.DigitsData", "init_args": {"noise": 0.4}}
ASKED = ("--metric", "val_accuracy", "--mode", "max", "--seeds", "2")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a configuration, and one with tricks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    write("plain.yaml", trainer=QUIET, model=MODEL, data=DATA)
    average = {"class_path": "EMA", "init_args": {"decay": 0.5}}
    write("tricks.yaml", trainer={**QUIET, "callbacks": [average, "SkipNonFinite"]}, model=MODEL, data=DATA)
    return tmp_path


def write(name: str, **config: Any) -> None:
    Path(name).write_text(json.dumps(config))


def run(*arguments: str | Path) -> int:
    return main(["compare", *map(str, arguments), *ASKED])


def in_python(folder: Path, *tricks: Any, module: type[Any] = Digits) -> Any:
    import lightning as L

    settings = {**ARGUMENTS, **QUIET, "enable_progress_bar": False}
    return L.Trainer(callbacks=[*tricks], **settings), module(), DigitsData(noise=0.4)


CHANGES = {
    "with AutoClip": ("--with", "AutoClip"),
    "with sharp": ("--with", "sharp.yaml"),
    "without EMA": ("--without", "EMA"),
}


@pytest.mark.parametrize(
    "changes", [["with sharp", "without EMA"], pytest.param(list(CHANGES), marks=pytest.mark.slow)], ids=len
)
def test_it_makes_the_runs_of_the_same_comparison_in_python_and_a_second_call_only_reads(
    changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write("sharp.yaml", model={"class_path": "lightning_tricks.examples.digits.SharpDigits"})
    command = ("-c", "tricks.yaml", *(part for change in changes for part in CHANGES[change]))
    assert run(*command, "--json", "--plot", "out.png") == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in told["rows"]] == ["base", *changes]

    def tricks(*more: Any, average: bool = True) -> list[Any]:
        return [*([lt.EMA(decay=0.5)] if average else []), lt.SkipNonFinite(), *more]

    arms = {
        "base": lambda folder: in_python(folder, *tricks()),
        "with AutoClip": lambda folder: in_python(folder, *tricks(lt.AutoClip())),
        "with sharp": lambda folder: in_python(folder, *tricks(), module=SharpDigits),
        "without EMA": lambda folder: in_python(folder, *tricks(average=False)),
    }
    arms = {name: arms[name] for name in ("base", *changes)}
    expected = lt.compare(arms, metric="val_accuracy", mode="max", seeds=2, folder="python")
    for name in arms:
        assert [run["metrics"] for run in told["runs"][name]] == [run["metrics"] for run in expected.runs[name]]
    assert len({run["metrics"]["val_accuracy"] for runs in told["runs"].values() for run in runs}) > len(arms)
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    files = {path: path.stat().st_mtime_ns for path in Path("compare").rglob("seed*.json")}
    assert len(files) == 2 * len(arms)
    assert run(*command) == 0
    table = capsys.readouterr().out
    assert [line.split("  ")[0] for line in table.splitlines()[1 : len(arms) + 1]] == [*arms]
    assert "over base (95% interval)" in table
    assert {path: path.stat().st_mtime_ns for path in files} == files


@pytest.mark.slow
def test_other_metrics_configurations_and_seeds_in_the_same_folder(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", "-c", "plain.yaml", "--with", "EMA", "--mode", "max", "--metric"]
    assert main([*command, "acc", "--seeds", "2"]) == 1
    err = capsys.readouterr().err
    assert "logs no --metric acc in validation or test, but ['test_accuracy', 'val_accuracy']" in err
    assert len(list(Path().rglob("seed*.json"))) == 1  # the first run tells
    assert main([*command, "test_accuracy", "--seeds", "3"]) == 1
    assert "seeds was [0, 1], now [0, 1, 2]" in capsys.readouterr().err
    assert main([*command, "test_accuracy", "--seeds", "2"]) == 0
    write("plain.yaml", trainer=QUIET, model=MODEL, data={**DATA, "init_args": {"noise": 0.2}})
    assert main([*command, "test_accuracy", "--seeds", "2"]) == 1
    err = capsys.readouterr().err
    assert "compare/base has results of other settings: configuration: data.init_args.noise was '0.4', now '0.2'" in err


@pytest.mark.slow
def test_a_run_that_fails_is_in_the_table_and_in_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-c", "plain.yaml", "--with", "lightning_tricks.LeanLoss") == 1
    out, err = capsys.readouterr()
    assert "failed in 2 of 2 runs: " in out
    assert "runs failed: with LeanLoss. compare has an error.txt for each" in err
    assert Path("compare", "with LeanLoss", "seed1", "error.txt").exists()


@pytest.mark.slow
def test_the_configurations_of_the_repository_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    write("quiet.yaml", trainer=QUIET)
    command = ("-c", CONFIGS / "digits.yaml", "-c", "quiet.yaml")
    assert run(*command, "--with", CONFIGS / "tricks" / "ema_sam.yaml", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"][1]["arm"] == "with ema_sam"
    assert told["rows"][1]["time"] > 0
    assert issubclass(SharpClassifier, lt.SAMMixin)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-c", "plain.yaml"], 2, "nothing to compare: name a trick, --with EMA"),
        (["-c", "none.yaml", "--with", "EMA"], 1, "There is no file none.yaml."),
        (["-c", "plain.yaml", "--with", "none.yaml"], 1, "There is no file none.yaml."),
        (["-c", "plain.yaml", "--with", "EMAA"], 2, 'plain.yaml: Parser key "trainer.callbacks": '),
        (["-c", "plain.yaml", "--without", "EMA"], 1, "--without EMA: the configuration has no such callback, but ["),
        (["-c", "plain.yaml", "--with", "EMA", "--with", "EMA"], 2, "two changes have the same name"),
        (["-c", "plain.yaml", "--with", "EMA", "--plot", "a.txt"], 1, "the name of the plot must end in ."),
        (["-c", "plain.yaml", "--with", "EMA", "--checkpoint", "best"], 1, "--checkpoint best needs a ModelCheckpoint"),
    ],
)
def test_what_is_wrong_is_one_line_on_stderr(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    assert_one_line(capsys, message)
    assert not list(Path().rglob("seed*.json"))
