"""The command's exit codes and errors."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import lightning_tricks as lt
from lightning_tricks.data import find_num_workers
from lightning_tricks.examples import digits
from lightning_tricks_cli.commands import presets
from lightning_tricks_cli.main import main, parser
from tests.ranks import run_alone


def assert_one_line(capsys: pytest.CaptureFixture[str], message: str) -> str:
    """Nothing was printed but an error of one line, which begins so; gives the line."""
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"lightning-tricks: {message}")
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "lightning-tricks: --seeds must be at least 1, got 0."),
        (["--epochs", "-1"], "lightning-tricks: --epochs must be at least 1, got -1."),
        (["--noise", "1.5"], "lightning-tricks: --noise must be in [0.0, 1.0], got 1.5."),
    ],
)
def test_a_wrong_value_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--output", str(tmp_path), *arguments]) == 1
    assert capsys.readouterr().err == message + "\n"


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds"):
        main(["--debug", "demo", "--seeds", "0", "--output", str(tmp_path)])
    with pytest.raises(ValueError, match="seeds"):
        main(["demo", "--seeds", "0", "--debug", "--output", str(tmp_path)])


@pytest.mark.parametrize("module", ["rich.console", "matplotlib", "sklearn.datasets"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits.read_digits.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--output", str(tmp_path)]) == 1
    assert "pip install 'lightning-tricks[demo]" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with two checkpoints of one model, both with averages, and one of another."""
    for name, value in {"a": 1.0, "b": 5.0}.items():
        state = {"steps": 2, "updates": 2, "raw": {"net.w": torch.tensor([-value])}, "averaged": {}}
        weights = {"net.w": torch.tensor([value]), "n": torch.tensor(3)}
        torch.save({"state_dict": weights, "epoch": 4, "callbacks": {"EMA": state}}, tmp_path / f"{name}.ckpt")
    torch.save({"state_dict": {"w": torch.ones(1)}}, tmp_path / "other.ckpt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_average(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["average", "a.ckpt", "b.ckpt", "-o", "mean.ckpt"]) == 0
    assert capsys.readouterr() == ("wrote mean.ckpt\n", "")
    assert torch.load("mean.ckpt") == {"state_dict": {"net.w": torch.tensor([3.0]), "n": torch.tensor(3)}, "epoch": 4}
    assert main(["average", "a.ckpt", "b.ckpt", "--weights", "3", "1", "--output", "mean.ckpt", "--force"]) == 0
    assert torch.load("mean.ckpt")["state_dict"]["net.w"].item() == 2


def test_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "b.ckpt", "-o", "w.safetensors", "--strip-prefix", "net."]) == 0
    assert capsys.readouterr() == ("wrote w.safetensors\n", "")
    assert load_file("w.safetensors") == {"w": torch.tensor([5.0])}
    arguments = ["export", "b.ckpt", "--which", "raw", "--callback", "EMA", "-o", "raw.pt"]
    assert main(arguments) == 0
    assert torch.load("raw.pt") == {"net.w": torch.tensor([-5.0]), "n": torch.tensor(3)}
    assert main(arguments) == 1
    assert main([*arguments, "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["average", "a.ckpt", "-o", "b.ckpt"], "b.ckpt exists: choose another name, or overwrite it with --force"),
        (["average", "none.ckpt", "-o", "c.ckpt"], "There is no file none.ckpt."),
        (["average", "a.ckpt", "other.ckpt", "-o", "c.ckpt"], "a.ckpt and other.ckpt are not of the same model"),
        (["average", "a.ckpt", "-o", "c.ckpt", "--weights", "1", "2"], "--weights must have one value per file"),
        (["average", "a.ckpt", "-o", "c.ckpt", "--weights", "-1"], "--weights must have a sum above 0, got -1.0."),
        (["average", "cut.ckpt", "-o", "c.ckpt"], "cut.ckpt is damaged or not a checkpoint."),
        (["average", "hostile.ckpt", "-o", "c.ckpt"], "hostile.ckpt was not read: it holds posix.system"),
        (["average", ".", "-o", "c.ckpt"], ". is a folder: write its weights to one file first"),
        (["export", "a.ckpt", "-o", "c.json"], "the name of the output must end in .ckpt, .pt"),
        (["export", "a.ckpt", "-o", "none/c.pt"], "There is no folder none"),
        (["export", "other.ckpt", "-o", "c.pt", "--which", "raw"], "other.ckpt: without the state of an optimizer"),
        (
            ["export", "a.ckpt", "-o", "c.pt", "--strip-prefix", "model."],
            "strip_prefix: no weight is in 'model.'; there are: net..",
        ),
        (["export", "a.ckpt", "-o", "c.pt", "--callback", "SWA"], "a.ckpt: no averages of the callback 'SWA'"),
        (["export", ".", "-o", "c.pt"], ". is a folder, but not a checkpoint"),
    ],
)
def test_an_error_of_a_file_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hostile:
        def __reduce__(self) -> object:
            return os.system, ("touch was-here",)

    torch.save({"state_dict": Hostile()}, "hostile.ckpt")
    Path("cut.ckpt").write_bytes(Path("a.ckpt").read_bytes()[:1000])
    before = sorted(os.listdir())
    assert main(arguments) == 1
    assert_one_line(capsys, message)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "invalid choice: 'dmeo'"),
        (["dmeo"], "Did you mean 'demo'?"),
        (["plot-schedule", "cosin", "-o", "a.png"], "Did you mean 'cosine'?"),
        (
            ["find-lr", "-c", "a.yaml", "--step", "3"],
            "find-lr has no argument --step 3: see lightning-tricks find-lr -h.",
        ),
        (["find-lr", "-c", "a.yaml", "--step=3"], "Did you mean '--steps'?"),
        (["--versoin"], "the following arguments are required: COMMAND"),
        (["average", "a.ckpt"], "the following arguments are required: -o/--output"),
        (["average", "-o", "c.ckpt"], "the following arguments are required: CKPT"),
        (["average", "a.ckpt", "-o", "c.ckpt", "--weights", "half"], "invalid float value: 'half'"),
        (["export", "a.ckpt", "b.ckpt", "-o", "c.pt"], "export has no argument b.ckpt"),
        (["export", "a.ckpt", "-o", "c.pt", "--which", "ema"], "invalid choice: 'ema'"),
        (["compare", "-c", "a.yaml", "--mode", "max"], "the following arguments are required: --metric"),
        (["compare", "-c", "a.yaml", "--metric", "acc", "--mode", "up"], "invalid choice: 'up'"),
        (["find-lr"], "the following arguments are required: -c/--config"),
        (["find-lr", "-c", "a.yaml", "--method", "peak"], "invalid choice: 'peak'"),
        (["find-lr", "-c", "a.yaml", "--steps", "few"], "invalid int value: 'few'"),
        (["find-lr", "-c", "a.yaml", "--method", "steepest", "--json"], "not allowed with argument --method"),
    ],
)
def test_usage_errors_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


COMMANDS = (
    *("fit", "validate", "test", "predict", "find-lr", "find-workers", "cross-validate", "compare", "demo"),
    *("recommend", "tricks", "presets", "optimizers", "plot-schedule", "memory", "suggest", "doctor"),
    *("average", "export", "consolidate", "completion"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_helps_with_an_example_on_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    assert re.search(rf"^(examples?: |  )lightning-tricks {command}", shown, re.MULTILINE)
    assert "--debug" in shown


@pytest.mark.parametrize(
    ("words", "function", "names"),
    [
        (["find-lr"], lt.find_lr, ("min_lr", "max_lr", "steps")),
        (["find-workers"], find_num_workers, ("step_seconds", "most", "seconds", "rounds")),
        (["compare", "--metric", "m", "--mode", "max"], lt.compare, ("seeds", "checkpoint", "equal_time")),
        (["cross-validate"], lt.cross_validate, ("splitter", "seed", "workers")),
    ],
)
def test_defaults_are_those_of_the_function(words: list[str], function: Callable[..., Any], names: list[str]) -> None:
    options = vars(parser().parse_args([*words, "-c", "config.yaml"]))
    parameters = inspect.signature(function).parameters
    given = [options["folds" if name == "splitter" else name] for name in names]
    assert given == [parameters[name].default for name in names]


def test_the_help_has_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    words = re.findall(r"^ {3,4}(\S+)", capsys.readouterr().out.partition("commands:")[2], re.MULTILINE)
    assert words == ["training", *COMMANDS[:9], "looking", *COMMANDS[9:17], "files", *COMMANDS[17:]]


STATIC = """
import json, sys
from lightning_tricks_cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        assert main(arguments) == 0
    except SystemExit as stop:
        assert stop.code == 0
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_help_and_static_text_import_neither_torch_nor_lightning() -> None:
    """With torch they would take seconds; so they take a tenth."""
    texts = [[], ["--version"], ["presets"], ["presets", "--json"], ["optimizers"], ["completion", "bash"]]
    texts += [["recommend", "--task", "llm"]]
    arguments = json.dumps([*([command, "--help"] for command in COMMANDS), *texts])
    command = [sys.executable, "-c", STATIC, arguments]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    loaded = set(json.loads(shown.stdout.splitlines()[-1]))
    assert not {"torch", "lightning", "lightning_tricks", "rich", "yaml", "jsonargparse"} & loaded


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning-tricks {lt.__version__}\n"


def test_without_arguments_it_helps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-tricks"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert capsys.readouterr().out.startswith("usage: lightning-tricks [-h] [--version]")


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "arguments",
    [
        *([command, "-c", "none.yaml"] for command in COMMANDS[:7]),
        *([command, "-c", "{digits}", "--ckpt_path", "none.ckpt"] for command in ("fit", "test")),
        ["compare", "-c", "none.yaml", "--with", "EMA", "--metric", "val_accuracy", "--mode", "max"],
        ["compare", "-c", "{digits}", "--with", "none.yaml", "--metric", "val_accuracy", "--mode", "max"],
        ["demo", "--seeds", "1", "--epochs", "1", "--output", "file/demo"],
        *(["memory", "none.yaml"], ["memory", "none.json"], ["doctor", "-c", "none.yaml"]),
        ["suggest", "none.yaml", "--device-memory", "9GB"],
        ["plot-schedule", "cosine", "-o", "none/a.png"],
        *(["average", "none.ckpt", "-o", "a.ckpt"], ["export", "none.ckpt", "-o", "a.pt"]),
        ["consolidate", "none.ckpt", "-o", "a.pt"],
    ],
    ids=" ".join,
)
def test_a_missing_file_is_one_line_and_exit_code_1(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every command that reads a file, or writes one to a folder."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    digits = Path(__file__).parents[2] / "configs" / "digits.yaml"
    assert main([argument.format(digits=digits) for argument in arguments]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-tricks: ")]
    assert len(lines) == 1
    assert "none" in lines[0] or "file/demo" in lines[0]


def test_ctrl_c_exits_with_130_and_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: argparse.Namespace) -> None:
        raise error

    monkeypatch.setattr(presets, "run", fails)
    error: BaseException = KeyboardInterrupt()
    assert main(["presets"]) == 130
    error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main(["presets"])


def write_to_no_reader() -> tuple[int, bytes]:
    """The exit status, and what is written to stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    with TemporaryFile() as stderr:
        os.dup2(stderr.fileno(), 2)
        status = main(["tricks", "--json"])
        sys.stdout.flush()  # as at the end of the interpreter
        stderr.seek(0)
        return status, stderr.read()


def test_a_reader_that_is_gone_is_no_error() -> None:
    assert run_alone(write_to_no_reader) == (1, b"")


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_error() -> None:
    command = f"{sys.executable} -m lightning_tricks_cli.main tricks --json | head -1"
    shown = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert (shown.stdout, shown.stderr) == ("[\n", "")


def test_the_command_is_installed_and_helps() -> None:
    command = Path(sys.executable).with_name("lightning-tricks")
    shown = subprocess.run([command, "demo", "--help"], capture_output=True, text=True, check=True)
    assert "example: lightning-tricks demo" in shown.stdout
