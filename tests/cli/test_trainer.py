"""fit, validate, test and predict: LightningCLI's own arguments, short names, overlays, two processes, errors."""

from __future__ import annotations

import json
import logging
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from lightning_tricks_cli.main import main
from lightning_tricks_cli.runs.near_names import arguments
from tests.few import few
from tests.ranks import run_alone

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "digits_schedule.yaml"
TRAINER = {
    **{"max_epochs": 1, "accelerator": "cpu", "devices": 1, "limit_train_batches": 2, "limit_val_batches": 1},
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
    "log_every_n_steps": 1,
}
HERE = """
import json, os
from pathlib import Path
from lightning_tricks.examples.digits import Digits, DigitsData

class Net(Digits):
    def on_train_end(self):
        told = {"world": self.trainer.world_size, "callbacks": [type(each).__name__ for each in self.trainer.callbacks]}
        told |= {"strategy": self.trainer.strategy.strategy_name, "epochs": self.trainer.current_epoch}
        told |= {"precision": self.trainer.precision, "process": os.getpid()}
        Path(f"told-{self.global_rank}.json").write_text(json.dumps(told))

    def test_step(self, batch, batch_idx):
        self.log("tested", 1.0)

    def predict_step(self, batch, batch_idx):
        Path("predicted").touch()
        return batch[1]

class Broken(Net):
    def on_train_start(self):
        raise ValueError("a bug of mine")

class Interrupted(Net):
    def on_train_start(self):
        os.kill(os.getpid(), 2)

class Data(DigitsData):
    def test_dataloader(self):
        return self.val_dataloader()

    predict_dataloader = test_dataloader
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder: a module, its configuration, two overlays that add callbacks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "here_net", raising=False)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C
    Path("here_net.py").write_text(HERE)
    schedule = [{"class_path": "LRSchedule", "init_args": {"curve": "cosine"}}]
    write(
        "base.yaml",
        seed_everything=0,
        trainer={**TRAINER, "callbacks": schedule},
        model="here_net.Net",
        data="here_net.Data",
    )
    write("ema.yaml", trainer={"callbacks+": [{"class_path": "EMA", "init_args": {"decay": 0.9}}]})
    write("guard.yaml", trainer={"callbacks+": ["SkipNonFinite"]})
    yield tmp_path
    signal.signal(signal.SIGINT, handler)


def write(name: str, **config: Any) -> str:
    Path(name).write_text(yaml.safe_dump(config))
    return name


def told(rank: int = 0) -> dict[str, Any]:
    return json.loads(Path(f"told-{rank}.json").read_text())


def test_arguments_win_over_the_files_and_short_names_work() -> None:
    assert main(["fit", "-c", "base.yaml", "--trainer.max_epochs=2", "--trainer.strategy", "single_bf16"]) == 0
    assert (told()["epochs"], told()["precision"]) == (2, "bf16-mixed")


def test_overlays_add_callbacks_to_those_before_them() -> None:
    overlays = ["-c", "ema.yaml", "-c", "guard.yaml"]
    assert main(["fit", "-c", "base.yaml", *overlays]) == 0
    assert {"LRSchedule", "EMA", "SkipNonFinite"} <= set(told()["callbacks"])


def test_an_overlay_is_enough_for_a_base_without_callbacks() -> None:
    plain = yaml.safe_load(Path("base.yaml").read_text())
    del plain["trainer"]["callbacks"]
    assert main(["fit", "-c", write("plain.yaml", **plain), "-c", "ema.yaml"]) == 0
    assert "EMA" in told()["callbacks"]


def test_the_configuration_is_printed_and_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "-c", "base.yaml", "-c", "ema.yaml", "--print_config"])
    Path("whole.yaml").write_text(capsys.readouterr().out)
    callbacks = yaml.safe_load(Path("whole.yaml").read_text())["trainer"]["callbacks"]
    assert [each["class_path"] for each in callbacks] == ["lightning_tricks.LRSchedule", "lightning_tricks.EMA"]
    assert main(["fit", "-c", "whole.yaml"]) == 0
    assert {"LRSchedule", "EMA"} <= set(told()["callbacks"])


@pytest.mark.parametrize("arguments", [["--trainer.callbacks.help", "EMA"], ["--help-all"]], ids=["class", "all"])
def test_lightnings_own_help_is_reached(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *arguments])
    assert ("--trainer.callbacks.decay" if "EMA" in arguments else "--trainer.max_epochs") in capsys.readouterr().out


def test_a_checkpoint_is_validated_tested_and_predicted_with(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text("mine")
    saves = write("saves.yaml", trainer={"enable_checkpointing": True, "default_root_dir": "run"})
    assert main(["fit", "-c", "base.yaml", "-c", saves]) == 0
    (checkpoint,) = map(str, Path().rglob("*.ckpt"))
    for command in ("validate", "test", "predict"):
        assert main([command, "-c", "base.yaml", "--ckpt_path", checkpoint]) == 0
    assert "tested" in capsys.readouterr().out
    assert Path("predicted").exists()
    assert Path("config.yaml").read_text() == "mine"


ASKING = """
from typing import Any
from here_net import Net

class Asking(Net):
    def __init__(self, width: int = 3, part: Any = None, other=None):
        super().__init__()
        self.save_hyperparameters()
        self.width = width

    def test_step(self, batch, batch_idx):
        self.log("width", float(self.width))
"""


@pytest.mark.parametrize("command", few(["fit", "validate", "test", "predict"], 1))
def test_a_checkpoint_makes_nothing_and_changes_no_argument(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightningCLI would put its hyperparameters over the configuration, and make the objects that they name."""
    monkeypatch.delitem(sys.modules, "asking_net", raising=False)
    Path("asking_net.py").write_text(ASKING)
    saves = write("saves.yaml", trainer={"enable_checkpointing": True, "default_root_dir": "run"})
    asked = ["-c", "base.yaml", "--model", "asking_net.Asking", "-c", saves]
    assert main(["fit", *asked]) == 0
    (path,) = Path().rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["hyper_parameters"]["_class_path"] == "asking_net.Asking"
    call = {"class_path": "logging.FileHandler", "init_args": {"filename": str(Path("mark").absolute())}}
    saved["hyper_parameters"] |= {"width": 9, "part": call, "other": [call]}
    torch.save(saved, "hostile.ckpt")
    resumed = [*asked, "--trainer.enable_checkpointing", "false", "--ckpt_path", "hostile.ckpt"]
    assert main([command, *resumed]) == 0
    assert not Path("mark").exists()
    if command == "test":
        assert "9.0" not in (shown := capsys.readouterr().out)
        assert "3.0" in shown


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-c", "none.yaml"], 1, "There is no file "),
        (["-c", "base.yaml", "--trainer.max_epoch", "3"], 2, "3. Did you mean '--trainer.max_epochs'?"),
        (["-c", "key.yaml"], 2, "option 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?"),
        (["-c", "base.yaml", "--trainer.max_epochs", "few"], 2, "Expected a <class 'int'>, got few"),
        (["-c", "warm.yaml"], 2, "got 2 epochs. Epochs are a fraction: 2 of max_epochs=10 are 2 / 10, in YAML 0.2."),
        (["-c", "base.yaml", "--trainer.callbacks+=EMAA"], 2, "EMAA. Did you mean 'EMA'?"),
        (["-c", "base.yaml", "--trainer.callbacks+=modelcheckpiont"], 2, "Did you mean 'ModelCheckpoint'?"),
        (["-c", "base.yaml", "--trainer.callbacks+=Zzz"], 2, "Expected a dot import path string: Zzz"),
        (["-c", "base.yaml", "--model", "here_net.Nett"], 2, "no attribute 'Nett'. Did you mean 'Net'?"),
        (["-c", "cut.yaml"], 2, "Problems parsing config"),
        (["-c", "empty.yaml"], 2, "lightning-tricks: a configuration is empty."),
        (
            ["-c", "base.yaml", "--trainer.callbacks+=EMA", "--trainer.callbacks.decy=2"],
            2,
            "accepted. Did you mean 'decay'?",
        ),
        ([], 2, "the following arguments are required: fit.model"),
        (["-c", "base.yaml", "--trainer.callbacks+=EMA", "--trainer.callbacks.decay=2"], 1, "decay must be in [0.0,"),
        (["-c", "base.yaml", "--trainer.strategy=ddp_bf61"], 1, ". Did you mean 'ddp_bf16'?"),
        (["-c", "base.yaml", "--trainer.callbacks+=Timer"], 1, "lightning-tricks: ('cannot represent an object'"),
        (["-c", "base.yaml", "--trainer.callbacks+=LRSchedule"], 1, "both would set the learning rate"),
        (["-c", "base.yaml", "--ckpt_path", "none.ckpt"], 1, "There is no checkpoint none.ckpt."),
        (["-c", "base.yaml", "--ckpt_path", "sharded"], 1, "There is no checkpoint sharded."),
    ],
)
def test_a_wrong_configuration_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.yaml").touch()
    write("key.yaml", trainer={"max_epoch": 2})
    warm = {"class_path": "LRSchedule", "init_args": {"curve": "cosine", "warmup": "2 epochs"}}
    write("warm.yaml", trainer={"callbacks": [warm]})
    Path("cut.yaml").write_text("trainer: {max_epochs: 2\nmodel: [\n")
    assert main(["fit", *arguments]) == code
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-tricks: ")]
    assert message in line
    assert not line.endswith(":")
    assert len(line) < 400


@pytest.mark.parametrize(
    ("class_path", "names"),
    [
        ("lightning_tricks.examples.digits.Digits", {"schedule", "lr", "optimizer"}),  # also those of its base
        ("lightning_tricks.examples.tasks.mislabel", {"labels", "noise", "classes"}),
        ("torch.optim.SGD", {"lr", "momentum"}),
    ],
)
def test_the_nearest_argument_is_one_of_the_class_its_bases_or_a_function(class_path: str, names: set[str]) -> None:
    assert names <= {*arguments(class_path)}


def told_next(shown: str) -> tuple[str, list[str]]:
    """The checkpoint and the words of the command, as printed at the end of a fit."""
    place, command = shown.splitlines()[-2:]
    path = place.removeprefix("checkpoint: ")
    assert Path(path).is_file()
    return path, shlex.split(command.removeprefix("next: lightning-tricks "))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # it goes on
def test_a_fit_says_where_its_checkpoint_is_and_what_to_type_next(capsys: pytest.CaptureFixture[str]) -> None:
    saves = write("it saves.yaml", trainer={"enable_checkpointing": True, "default_root_dir": "a run"})
    first = ["fit", "-c", "base.yaml", "-c", saves]
    assert main(first) == 0
    path, words = told_next(capsys.readouterr().out)
    assert words == ["test", *first[1:], "--ckpt_path", path]
    assert main(words) == 0
    settings = ["--trainer.max_epochs=2", "--trainer.default_root_dir=b"]
    assert main([*first, "--ckpt_path", path, *settings]) == 0
    second, words = told_next(capsys.readouterr().out)
    assert second != path
    assert words == ["test", *first[1:], *settings, "--ckpt_path", second]
    assert main(["fit", "-c", "base.yaml"]) == 0  # saves none
    assert "checkpoint: " not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Checkpoint directory", "ignore:.isinstance.treespec, LeafSpec")  # Lightning, torch
def test_a_fit_begins_and_goes_on_from_the_newest_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    preempts = ["--trainer.callbacks+=Preemption", "--trainer.callbacks.folder=run"]
    saves = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=run"]
    saves += ["--trainer.enable_checkpointing=true"]
    fit = ["fit", "-c", "base.yaml", *preempts, *saves, "--ckpt_path", "newest"]
    assert main(fit) == 0
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        assert main([*fit, "--trainer.max_epochs=2"]) == 0
    assert "The plan of training has changed from 2 to 4 optimizer steps" in caplog.text  # it is read


def test_the_users_own_error_keeps_its_traceback_and_debug_shows_the_others() -> None:
    with pytest.raises(ValueError, match="a bug of mine"):
        main(["fit", "-c", "base.yaml", "--model", "here_net.Broken"])
    with pytest.raises(FileNotFoundError):
        main(["fit", "-c", "base.yaml", "--ckpt_path", "none.ckpt", "--debug"])


def test_ctrl_c_in_training_exits_with_130() -> None:
    assert main(["fit", "-c", "base.yaml", "--model", "here_net.Interrupted"]) == 130


STARTS = pytest.mark.parametrize(
    "start",
    [pytest.param(["-m", "lightning_tricks_cli.main"], id="python -m"), pytest.param(["script.py"], id="script")],
)
SCRIPT = "import sys\nfrom lightning_tricks_cli.main import main\nsys.exit(main())\n"
TWO = ["fit", "-c", "base.yaml", "-c", "ema.yaml", "--trainer.strategy=ddp_bf16", "--trainer.devices=2"]


class Fork:
    """A ``subprocess.Popen`` whose process has the imports of this one."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: None) -> None:
        assert command[0] == sys.executable
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            os.environ.update(env)
            os._exit(started(command[1:]))

    def poll(self) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode


def started(command: list[str]) -> Any:
    """The exit status of ``python -m module arguments`` or ``python script arguments``."""
    try:
        if command[0] == "-m":
            sys.argv[1:] = command[2:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as stop:
        return stop.code
    return 1


def launched(command: list[str], folder: Path) -> tuple[Any, int | None]:
    """The exit status of the command and that of the process which Lightning's launcher has started by Popen."""
    os.chdir(folder)
    forks: list[Fork] = []

    def popen(*args: Any, **settings: Any) -> Fork:
        forks.append(Fork(*args, **settings))
        return forks[-1]

    with mock.patch("subprocess.Popen", popen):
        status = started(command)
    (fork,) = forks
    deadline = time.monotonic() + 60
    while fork.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return status, fork.poll()


@pytest.mark.slow
@STARTS
def test_lightnings_own_launcher_starts_the_second_process(start: list[str], folder: Path) -> None:
    """A fork in the place of the new interpreter that it is with ``-m slow``."""
    Path("script.py").write_text(SCRIPT)
    assert run_alone(launched, [*start, *TWO], folder) == (0, 0)
    assert_two_told()


@STARTS
@pytest.mark.slow
def test_two_processes_by_lightnings_own_launcher(start: list[str]) -> None:
    Path("script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *start, *TWO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_two_told()


def assert_two_told() -> None:
    ranks = [told(0), told(1)]
    assert len({rank.pop("process") for rank in ranks}) == 2
    assert ranks[0] == ranks[1]
    assert (ranks[0]["world"], ranks[0]["strategy"], ranks[0]["precision"]) == (2, "ddp_bf16", "bf16-mixed")
    assert {"LRSchedule", "EMA"} <= set(ranks[0]["callbacks"])
