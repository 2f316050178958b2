"""Nothing in a corpus of hostile files runs, whichever function or command of the package is given it."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import pickle
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.checkpoint.api import CheckpointException

import lightning_tricks as lt
from lightning_tricks.checkpoints import average_checkpoints, consolidate, export_weights, greedy_soup
from lightning_tricks.evaluation import CrossValidation, Ensemble, soup_and_ensemble
from lightning_tricks.evaluation.folds import Fold
from lightning_tricks_cli.commands.trainer import METHODS
from lightning_tricks_cli.main import main, parser
from tests.evaluation import recipes
from tests.evaluation.test_compare import ARMS, ASKED
from tests.faults import hostile
from tests.few import few
from tests.nets import Net, data, loader, quiet, trainer
from tests.public import PUBLIC
from tests.ranks import run_ranks

Read = Callable[[Path, Path], Any]  # a hostile file or folder, and a folder to write to


class Open(Net):
    """Takes anything as its arguments."""

    def __init__(self, net: Any = None, any: Any = None, path: Any = None, x=None) -> None:
        super().__init__()


# -- the readers ------------------------------------------------------------------------------------------------------


def command(*words: object) -> None:
    """The command, whose errors are raised here; those of the user's own code are, anyway."""
    with suppress(SystemExit):
        if code := main([str(word) for word in words]):
            raise ValueError(f"exit code {code}")


def good(out: Path) -> Path:
    """A checkpoint that is as it should be."""
    if not (file := out / "good.ckpt").exists():
        run = trainer()
        run.strategy.connect(Open())
        run.save_checkpoint(file, weights_only=True)
    return file


def config(out: Path) -> Path:
    file = out / "config.yaml"
    settings = {key: value for key, value in quiet.items() if key != "callbacks"}
    model = {"class_path": f"{__name__}.Open"}
    data = {"class_path": "lightning_tricks.examples.digits.DigitsData"}
    file.write_text(yaml.safe_dump({"trainer": {**settings, "max_epochs": 1}, "model": model, "data": data}))
    return file


def of_ensemble(path: Path, out: Path) -> Any:
    return Ensemble.from_checkpoints([good(out), path], Open)


def of_soup(path: Path, out: Path) -> Any:
    half = list(range(22)), list(range(22, 44))
    result = CrossValidation([{}, {}], None, [[good(out), path], [path, good(out)]], [Fold(*half), Fold(*half[::-1])])
    return soup_and_ensemble(result, Open, data(), lambda fold, folder: trainer())


def placed(path: Path, place: Path) -> None:
    """Put a copy of a file, a folder or a link there; of a pipe nothing."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    if path.is_dir():
        shutil.copytree(path, place)
    elif not path.is_fifo():
        shutil.copy(path, place, follow_symlinks=False)


def of_fold(path: Path, out: Path) -> Any:
    if not (folder := out / "cv").exists():
        recipes.run(folder)
    placed(path, folder / "fold0.pt")
    with no_training():
        return recipes.run(folder)


def of_comparison(name: str, path: Path, out: Path) -> Any:
    if not (folder := out / "compare").exists():
        lt.compare(ARMS, folder=folder, **ASKED)
    shutil.copytree(folder, out / "copy")
    try:
        placed(path, out / "copy" / "plain" / name)
        with no_training():
            return lt.compare(ARMS, folder=out / "copy", **ASKED)
    finally:
        shutil.rmtree(out / "copy")


@contextmanager
def no_training() -> Iterator[None]:
    """Let every fit raise: a result that was refused would be made again."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("a result is made again")

    with mock.patch.object(L.Trainer, "fit", refuse):
        yield


def of_stopped(name: str, path: Path, out: Path) -> Any:
    folder = out / "non_finite-step=0"
    folder.mkdir(exist_ok=True)
    (folder / "batch-rank=0.pt").unlink(missing_ok=True)
    torch.save((torch.ones(8, 8), torch.zeros(8).long()), folder / "batch-rank=0.pt")
    run = trainer()
    run.strategy.connect(Open())
    run.save_checkpoint(folder / "last_good.ckpt")
    placed(path, folder / name)
    return lt.find_non_finite(trainer(), Open(), folder)


def of_fit(path: Path, out: Path) -> Any:
    trainer(max_epochs=2, callbacks=[lt.EMA(0.5), lt.Preemption(out)]).fit(Open(), loader(), ckpt_path=str(path))


def of_newest(path: Path, out: Path) -> Any:
    return lt.newest_checkpoint(path.parent)


def snapshot_of(path: Path, out: Path) -> Path:
    """A folder in which the file is a snapshot of PostHocEMA."""
    (folder := out / "snapshots").mkdir(exist_ok=True)
    placed(path, folder / "step=4-sigma_rel=0.05.pt")
    return folder


def of_snapshot(path: Path, out: Path) -> Any:
    return lt.post_hoc_average(snapshot_of(path, out), sigma_rel=0.05)


PYTHON: dict[str, Read] = {
    "average_checkpoints(paths)": lambda path, out: average_checkpoints([path, path], out / "a.ckpt", force=True),
    "greedy_soup(paths)": lambda path, out: greedy_soup([path], lambda _: 1.0, out / "a.pt", force=True),
    "export_weights(checkpoint)": lambda path, out: export_weights(path, out / "a.pt", force=True),
    "export_weights(base)": lambda path, out: export_weights(
        out / "adapters.ckpt", out / "a.pt", merge=True, base=path, force=True
    ),
    "export_adapters(checkpoint)": lambda path, out: lt.export_adapters(path, out / "peft", force=True),
    "export_adapters(base)": lambda path, out: lt.export_adapters(
        out / "adapters.ckpt", out / "peft", base=path, force=True
    ),
    "consolidate(checkpoint)": lambda path, out: consolidate(path, out / "a.safetensors", force=True),
    "newest_checkpoint(folder)": of_newest,
    "post_hoc_average(folder)": of_snapshot,
    "post_hoc_sweep(folder)": lambda path, out: lt.post_hoc_sweep(
        snapshot_of(path, out), lambda _: 1.0, sigma_rels=[0.05]
    ),
    "Ensemble.from_checkpoints(paths)": of_ensemble,
    "soup_and_ensemble(result)": of_soup,
    "find_non_finite(folder)": partial(of_stopped, "last_good.ckpt"),
    "find_non_finite(folder), the batch": partial(of_stopped, "batch-rank=0.pt"),
    "cross_validate(folder)": of_fold,
    "compare(folder)": partial(of_comparison, "seed0.json"),
    "compare(folder), the plan": partial(of_comparison, "plan.json"),
    "Preemption(folder)": of_fit,
}
COMMANDS: dict[str, Read] = {
    "average checkpoints": lambda path, out: command("average", path, path, "-o", out / "a.pt", "--force"),
    "average posthoc": lambda path, out: command(
        *("average", "--posthoc", snapshot_of(path, out), "--sigma-rel", "0.05", "-o", out / "a.pt", "--force")
    ),
    "export checkpoint": lambda path, out: command("export", path, "-o", out / "a.pt", "--force"),
    "export base": lambda path, out: command(
        *("export", out / "adapters.ckpt", "--merge", "--base", path, "-o", out / "a.pt", "--force")
    ),
    "consolidate checkpoint": lambda path, out: command("consolidate", path, "-o", out / "a.pt", "--force"),
    "memory target": lambda path, out: command("memory", path, "--json"),
    "suggest target": lambda path, out: command("suggest", path),
    "find-lr config": lambda path, out: command("find-lr", "-c", path),
    "find-workers config": lambda path, out: command("find-workers", "-c", path),
    "doctor config": lambda path, out: command("doctor", "-c", path),
    "cross-validate config": lambda path, out: command("cross-validate", "-c", path, "-o", out / "cross"),
    "compare config": lambda path, out: command(
        *("compare", "-c", path, "--with", "EMA", "--metric", "x", "--mode", "max", "--output", out / "c")
    ),
    **{
        f"{name} --config": lambda path, out, name=name: command(name, "--config", path)  # type: ignore[misc]
        for name in METHODS
    },
    **{
        f"{name} --ckpt_path": lambda path, out, name=name: command(  # type: ignore[misc]
            name, "-c", config(out), "--ckpt_path", path
        )
        for name in METHODS
    },
}
READERS = {**PYTHON, **{f"lightning-tricks {name}": read for name, read in COMMANDS.items()}}

# What takes a path and reads nothing that others may have written; ``test_ownership.py`` looks at what is written.
ONLY_WRITTEN = {
    *("average_checkpoints(output)", "greedy_soup(output)", "export_weights(output)", "export_adapters(output)"),
    *(
        "consolidate(output)",
        "CrossValidation(members)",
        "InspectTraining(folder)",
        "LabelErrors(folder)",
        "PostHocEMA(folder)",
        "TerminateOnNonFinite(dirpath)",
        "CrossValidation.to_json(path)",
        "LabelReport.to_json(path)",
    ),
    "ZeROPreset(nvme_path)",  # DeepSpeed's own files, made anew by every run
    *("average output", "export output", "consolidate output", "plot-schedule output", "find-lr plot", "demo output"),
    *("cross-validate output", "cross-validate predictions", "compare output", "compare plot"),
}


def taking_paths() -> Iterator[str]:
    """The arguments of the public names and of the commands that are files or folders."""
    for name, thing in PUBLIC.items():
        yield from _of(name, thing)
        for method, member in vars(thing).items() if inspect.isclass(thing) else ():
            if not method.startswith("_") and callable(getattr(thing, method)):
                yield from _of(f"{name}.{method}", member)
    (commands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, each in commands.choices.items():
        yield from (
            f"{name} {action.dest}" for action in each._actions if action.type is Path or action.dest == "target"
        )
        yield from (f"{name} {flag}" for flag in ("--config", "--ckpt_path") if name in METHODS)


def _of(name: str, thing: Any) -> Iterator[str]:
    function = thing.__init__ if inspect.isclass(thing) else getattr(thing, "__func__", thing)
    if not inspect.isfunction(function):
        return
    for parameter in inspect.signature(function).parameters.values():
        said = str(parameter.annotation)
        is_path = "Path" in said and not said.startswith("Callable")
        if is_path or parameter.name in ("folder", "dirpath", "nvme_path", "result"):
            yield f"{name}({parameter.name})"


def test_every_argument_that_is_a_path_is_enrolled() -> None:
    """A new one needs an entry in ``READERS``, which is then given the corpus, or in ``ONLY_WRITTEN``."""
    enrolled = {*PYTHON, *COMMANDS, *ONLY_WRITTEN}
    assert {name.partition(", ")[0] for name in enrolled} == {*taking_paths()}


# -- the corpus -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("hostile")
    return root, hostile.make(root)


def snapshot(root: Path) -> dict[str, str]:
    """What is in a folder, by name: kinds, contents, and targets of links."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {os.readlink(path)}"
        else:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    return found


# What is told to the user: a file that is refused, never a bare consequence of what is in it.
NAMED = (
    *(ValueError, OSError, TypeError, MisconfigurationException, CheckpointException, pickle.UnpicklingError),
    RuntimeError,  # of torch, and of a module that other weights do not fit
)
# Lightning itself reads these, tells of them in its own words, and takes pipes.
STOCK = ("Preemption", *(f"lightning-tricks {name} --" for name in METHODS))
LONG = ("soup_and_ensemble(result)", "find_non_finite", "cross_validate(folder)", "compare(folder)", "Preemption")
LONG_COMMANDS = ("--ckpt_path", "--config", " config", " target")
QUICK = 10  # of the corpus, every n-th is given to readers that take long
ALWAYS = ("a program", "os.system in a zip", "hyperparameters: as LightningCLI saves them")
SECONDS = 30


def cases() -> Iterator[Any]:
    for name in READERS:
        takes_long = name.startswith(LONG) or name.endswith(LONG_COMMANDS)
        reads_as_fit = bool({*name.split()} & {*METHODS} - {"fit"})
        starts_lightning = name.split()[-1] in ("--config", "--ckpt_path")
        every = QUICK * (8 if reads_as_fit else 2 if starts_lightning else 1) if takes_long else 1
        yield pytest.param(name, every, id=name)
        if takes_long and not reads_as_fit:
            yield pytest.param(name, 1, id=f"{name}, all", marks=pytest.mark.slow)


class Late(BaseException):
    """A reader waits, or does, for ever."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Late(f"no end after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.few(1)
@pytest.mark.parametrize(("reader", "every"), few([*cases()], 6))
def test_nothing_of_it_runs(
    reader: str, every: int, corpus: tuple[Path, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, made = corpus
    before, wrong = snapshot(root), []
    monkeypatch.chdir(tmp_path)
    (out := tmp_path / "out").mkdir()
    save_adapters(out)
    for number, (name, path) in enumerate(made.items()):
        left_out = name not in ALWAYS and (number + len(reader)) % every
        if left_out or (name == "a pipe" and reader.startswith(STOCK)):
            continue
        try:
            with warnings.catch_warnings(), at_most(SECONDS):
                warnings.simplefilter("ignore")
                READERS[reader](path, out)
        except BaseException as error:
            named = Exception if reader.startswith(STOCK) else NAMED
            if not isinstance(error, named):
                wrong.append(f"{name}: {type(error).__name__}: {error}")
        if any((root / "marks").iterdir()):
            wrong.append(f"{name} runs")
            shutil.rmtree(root / "marks")
            (root / "marks").mkdir()
    assert not wrong, "\n".join(wrong)
    assert snapshot(root) == before, "something was written outside of the folder"
    assert torch.get_default_dtype() == torch.float32


def save_adapters(out: Path) -> None:
    """A checkpoint with adapters, for readers of a base."""
    record = lt.core.adapters.record.Record(2, 4.0, "lora", 2.0, ["w"], [], [], "keep", "0" * 8)  # type: ignore[attr-defined]
    state = {"w.lora_A.default.weight": torch.ones(2, 2), "w.lora_B.default.weight": torch.ones(2, 2)}
    torch.save(hostile.checkpoint(state_dict=state, callbacks={"LoRA": record.state()}), out / "adapters.ckpt")


# -- that the corpus is hostile ---------------------------------------------------------------------------------------


def naively(name: str, path: Path) -> None:
    """What a reader does that trusts a file."""
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name.startswith("hyperparameters"):
            Open.load_from_checkpoint(path, weights_only=True, strict=False)
        else:
            torch.load(path, weights_only=False)
    with suppress(Exception):
        pickle.loads(path.read_bytes())


def marked(root: str) -> list[str]:
    made = hostile.make(Path(root))
    run = []
    for number, (name, path) in enumerate(made.items()):
        if path.is_file():
            naively(name, path)
        if os.path.lexists(Path(root) / "marks" / f"mark{number}"):
            run.append(name)
    return run


@pytest.mark.slow
def test_a_reader_that_trusts_files_runs_them(tmp_path: Path) -> None:
    """Most of them: others want more than this one reader, such as other formats, versions or much memory."""
    (run,) = run_ranks(marked, str(tmp_path / "hostile"), nprocs=1)
    assert len(hostile.CORPUS) > 140
    assert len(run) > 60
    assert {"a program", "os.system in a zip", "INST in data.pkl", "hyperparameters: a class path"} <= {*run}
