"""find-lr: what it prints, writes and leaves alone, and that what is wrong is said on one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, get_args

import pytest

import lightning_tricks.schedules as package
from lightning_tricks.core.install import pip_install
from lightning_tricks.schedules import LRFinderResult
from lightning_tricks.schedules.lr_finder import Method
from lightning_tricks_cli.commands.find_lr import METHODS
from lightning_tricks_cli.main import main
from tests.cli.test_main import assert_one_line
from tests.ranks import run_alone

DIGITS = Path(__file__).parent.parent.parent / "configs" / "digits_schedule.yaml"
QUIET = {
    "max_epochs": 1,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
MODEL = {"class_path": "lightning_tricks.examples.digits.Digits"}
DATA = {"class_path": "lightning_tricks.examples.digits.DigitsData"}
NET = """
from tests.nets import NormNet, loader

class HereNet(NormNet):
    def train_dataloader(self):
        print("here")
        return loader()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a configuration that quietens the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    write("quiet.yaml", trainer=QUIET)
    return tmp_path


def write(name: str, **config: Any) -> str:
    Path(name).write_text(json.dumps(config))
    return name


def run(*arguments: str | Path) -> int:
    return main(["find-lr", *map(str, arguments)])


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [(), ("--method", "steepest"), ("--method", "minimum/10")])
def test_it_prints_one_learning_rate_and_writes_nothing(
    method: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-c", DIGITS, "-c", "quiet.yaml", "--min-lr", "1e-5", "--max-lr", "10", *method) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert 1e-5 < float(out) < 10
    assert os.listdir(folder) == ["quiet.yaml"]


def test_json_and_plot(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--min-lr", "1e-4", "--max-lr", "1", "--steps", "30", "--json", "--plot", "lr.png"]
    assert run("-c", DIGITS, "-c", "quiet.yaml", *arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"lrs", "losses", "smoothed"}
    assert len(result["lrs"]) == len(result["losses"]) == 30
    assert result["lrs"][0] == pytest.approx(1e-4)
    assert result["lrs"][-1] == pytest.approx(1)
    assert Path("lr.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_without_a_suggestion_is_drawn_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--min-lr", "1e-12", "--max-lr", "1e-11", "--steps", "10", "--plot", "lr.svg"]
    assert run("-c", DIGITS, "-c", "quiet.yaml", *arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("lightning-tricks: The loss must fall for a suggestion")
    assert Path("lr.svg").exists()


def test_of_several_configurations_the_later_ones_win(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def sweep(trainer: Any, *_: Any, **__: Any) -> LRFinderResult:
        seen.append(trainer)
        return LRFinderResult((), ())

    monkeypatch.setattr(package, "find_lr", sweep)
    assert run("-c", DIGITS, "-c", "quiet.yaml", "-c", write("last.yaml", trainer={"max_epochs": 7}), "--json") == 0
    (trainer,) = seen
    assert trainer.max_epochs == 7
    assert {"LRSchedule", "EMA"} <= {type(callback).__name__ for callback in trainer.callbacks}


def test_what_a_fit_has_saved_is_read_but_a_checkpoint_is_not_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    saved = {"trainer": QUIET, "model": MODEL, "data": DATA, "optimizer": None, "weights_only": None}
    arguments = ["--min-lr", "1e-4", "--steps", "20", "--json"]
    assert run("-c", write("saved.yaml", **saved, ckpt_path=None), *arguments) == 0
    assert run("-c", write("saved.yaml", **saved, ckpt_path="last.ckpt"), *arguments) == 1
    assert "got ckpt_path=last.ckpt: leave it out." in capsys.readouterr().err


def test_an_optimizer_in_the_configuration_is_swept(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.1}}
    config = write("adam.yaml", trainer=QUIET, model=MODEL, data=DATA, optimizer=optimizer, seed_everything=1)
    arguments = ["--min-lr", "1e-5", "--max-lr", "10"]
    with pytest.warns(UserWarning, match="will be overridden by"):
        assert run("-c", config, *arguments) == 0
    assert 1e-5 < float(capsys.readouterr().out) < 0.05  # SGD's is higher


def find(folder: Path, arguments: list[str]) -> tuple[int, bytes]:
    """The exit status, and all that the process writes to stdout, where nothing is imported from the folder so far."""
    os.chdir(folder)
    sys.path[:] = [path for path in sys.path if path not in ("", str(folder))]
    with TemporaryFile() as stdout:
        os.dup2(stdout.fileno(), 1)
        status = main(arguments)
        sys.stdout.flush()
        stdout.seek(0)
        return status, stdout.read()


def test_a_model_of_the_current_folder_is_found_and_nothing_else_is_printed(folder: Path) -> None:
    Path("here.py").write_text(NET)
    config = write("config.yaml", trainer=QUIET, model={"class_path": "here.HereNet"}, seed_everything=1)
    status, shown = run_alone(find, folder, ["find-lr", "-c", config, "--steps", "10", "--json"])
    first, second = shown.decode().splitlines()
    assert (status, first) == (0, "here")
    assert len(json.loads(second)["lrs"]) == 10


@pytest.mark.slow
def test_the_current_folder_is_imported_from_and_nothing_else_is_printed(folder: Path) -> None:
    Path("here.py").write_text(NET)
    config = write("config.yaml", trainer=QUIET, model={"class_path": "here.HereNet"}, seed_everything=1)
    root = str(DIGITS.parent.parent)
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "lightning_tricks_cli.main", "find-lr", "-c", config, "--steps", "10", "--json"]
        if sys.version_info >= (3, 11)
        else [Path(sys.executable).with_name("lightning-tricks"), "find-lr", "-c", config, "--steps", "10", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    first, second = shown.stdout.splitlines()
    assert first == "here"
    assert len(json.loads(second)["lrs"]) == 10


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("changes", "message", "names"),
    [
        ({"model": {"class_path": "Digitz"}}, 'config.yaml: Parser key "model": ', "Digitz"),
        ({"model": {"class_path": "lightning_tricks.Digitz"}}, 'config.yaml: Parser key "model": ', "Digitz"),
        ({"model": {"lr": 3}}, 'config.yaml: Parser key "model": Problem with given class_path', "'lr'"),
        ({"model": {**MODEL, "init_args": {"foo": 3}}}, 'config.yaml: Parser key "model": ', "'foo'"),
        ({"model": None}, "config.yaml: ", "required: model"),
        ({"trainer": {**QUIET, "callbacks": ["EMAA"]}}, 'config.yaml: Parser key "trainer.callbacks": ', "EMAA"),
        ({"trainer": "{"}, "config.yaml: ", "trainer"),
        ({"trainer": {**QUIET, "epochs": 3}}, "config.yaml: ", "epochs"),
        ({"trainer": {**QUIET, "devices": 2, "strategy": "ddp_spawn"}}, "find_lr needs a Trainer", "spawn"),
    ],
)
def test_a_wrong_configuration_is_one_line_on_stderr_and_exit_code_2(
    changes: dict[str, Any], message: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write("config.yaml", **{"trainer": QUIET, "model": MODEL, "data": DATA, "seed_everything": 1, **changes})
    assert run("-c", config) == (1 if "devices" in changes.get("trainer", {}) else 2)
    err = assert_one_line(capsys, message)
    assert names in err
    assert len(err) < 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "none.yaml"], "There is no file none.yaml."),
        (["-c", DIGITS, "--plot", "lr.txt"], "the name of the plot must end in ."),
        (["-c", DIGITS, "--plot", "none/lr.png"], "There is no folder none for the plot."),
        (["-c", DIGITS, "-c", "quiet.yaml", "--steps", "3"], "--steps must be at least 10, got 3"),
        (["-c", DIGITS, "-c", "quiet.yaml", "--max-lr", "0"], "--min-lr must be above 0 and below max_lr"),
    ],
)
def test_a_wrong_argument_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 1
    assert_one_line(capsys, message)


@pytest.mark.parametrize(
    ("module", "extra"), [("jsonargparse", "cli"), ("matplotlib.backend_bases", "plot")], ids=["cli", "plot"]
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run("-c", DIGITS, "--plot", "lr.png") == 1
    assert pip_install(extra) in capsys.readouterr().err


def test_the_methods_are_those_of_the_package() -> None:
    assert get_args(Method) == METHODS
