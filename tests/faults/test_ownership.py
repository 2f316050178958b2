"""What the package has not made it neither changes nor removes, and what is in the way is named.

Each writer first runs in an empty folder, which shows the names that it uses. Then the user has one of these names.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightning_tricks as lt
from lightning_tricks.checkpoints import average_checkpoints, consolidate, export_weights, greedy_soup
from lightning_tricks.core.safe_load.atomic_folder import hidden, put_in_place
from lightning_tricks.core.safe_load.own_folder import is_ours
from lightning_tricks.evaluation import CrossValidation
from lightning_tricks.evaluation.folds import Fold
from lightning_tricks.strategies.atomic_folder import _make_folder
from lightning_tricks_cli.runs.demo import demo
from tests.evaluation import recipes
from tests.evaluation.test_compare import ARMS, ASKED
from tests.faults import hostile, test_corpus
from tests.faults.test_corpus import command, save_adapters, snapshot
from tests.nets import Net, loader, trainer

ROOT = Path(lt.__file__).parent

# -- writers into a folder --------------------------------------------------------------------------------------------


class Infinite(Net):
    """Its loss is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * float("nan")


class Preempted(L.Callback):
    """The machine is taken away in the first step."""

    def on_before_backward(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def look(folder: Path) -> None:
    callback = lt.InspectTraining(folder, every_n_steps=100, steps=2)
    trainer(max_steps=3, callbacks=[callback]).fit(Net(), loader(), loader(24))


def snapshots(folder: Path) -> None:
    trainer(callbacks=[lt.PostHocEMA(folder, every_n_steps=6)]).fit(Net(), loader(), loader(24))


def labels(folder: Path) -> None:
    trainer(callbacks=[lt.LabelErrors(folder)]).fit(Net(), loader(), loader(24))


def stop(folder: Path) -> None:
    with pytest.raises(FloatingPointError):
        trainer(callbacks=[lt.TerminateOnNonFinite(str(folder))]).fit(Infinite(), loader(), loader(24))


def preempt(folder: Path) -> None:
    with pytest.raises(SIGTERMException):
        trainer(callbacks=[lt.Preemption(folder), Preempted()]).fit(Net(), loader(), loader(24))


def export_adapters(folder: Path) -> None:
    save_adapters(source := folder.parent)
    lt.export_adapters(source / "adapters.ckpt", folder)


def save_shards(folder: Path) -> None:
    """As a strategy does whose checkpoints are folders."""
    final = folder / "last.ckpt"
    _make_folder(new := hidden(final, "01234567", "saving"), final)
    (new / "meta.pt").touch()
    put_in_place(new, final)


DIGITS = ("lightning_tricks.examples.digits.Digits", "lightning_tricks.examples.digits.DigitsData")
PREDICTS = ("tests.evaluation.recipes.Scored", "tests.cli.test_cross_validate.HalfData")


def config(folder: Path, classes: tuple[str, str] = DIGITS) -> Path:
    model, data = ({"class_path": name} for name in classes)
    quiet = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "logger": False, "accelerator": "cpu"}
    settings = {"seed_everything": 0, "trainer": {**quiet, "enable_progress_bar": False}, "model": model, "data": data}
    (file := folder.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    return file


def cross_validate_command(folder: Path) -> None:
    command("cross-validate", "-c", config(folder), "--folds", 2, "-o", folder)


def compare_command(folder: Path) -> None:
    command(
        *("compare", "-c", config(folder), "--with", "EMA", "--metric", "val_accuracy", "--mode", "max"),
        *("--seeds", 2, "--output", folder),
    )


INTO: dict[str, Callable[[Path], Any]] = {
    "cross_validate(folder)": lambda folder: recipes.run(folder, splitter=2),
    "compare(folder)": lambda folder: lt.compare(ARMS, folder=folder, **ASKED),
    "InspectTraining(folder)": look,
    "LabelErrors(folder)": labels,
    "TerminateOnNonFinite(dirpath)": stop,
    "Preemption(folder)": preempt,
    "PostHocEMA(folder)": snapshots,
    "export_adapters(output)": export_adapters,
    "cross-validate output": cross_validate_command,
    "compare output": compare_command,
    "demo output": lambda folder: demo(folder, seeds=1, epochs=1),
    "a checkpoint of shards": save_shards,
}
REPLACED = {
    "a checkpoint of shards": ("file", "link_to_file", "link_to_folder", "link_to_nothing")
}  # as by a stock Trainer
# These take another name where one is taken.
FREE = ("InspectTraining", "LabelErrors", "TerminateOnNonFinite", "Preemption", "PostHocEMA")

# -- something of the user --------------------------------------------------------------------------------------------


def file(path: Path, outside: Path) -> None:
    path.write_text("a thesis")


def folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("a thesis")


def link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "thesis.tex")


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "none")


KINDS = (file, folder, link_to_file, link_to_folder, link_to_nothing)


def own_names(folder: Path) -> list[Path]:
    """The names in a folder, without those inside of folders that are ours."""
    found = []
    for path in sorted(folder.iterdir()):
        found.append(path)
        if path.is_dir() and not (is_ours(path, "fit") or is_ours(path, "checkpoint")):
            found += own_names(path)
    return found


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """The names that a writer uses, relative to its folder."""
    known: dict[str, list[Path]] = {}

    def of(writer: str) -> list[Path]:
        if writer not in known:
            folder = tmp_path_factory.mktemp("empty") / "results"
            folder.mkdir()
            INTO[writer](folder)
            known[writer] = [path.relative_to(folder) for path in own_names(folder)]
            assert known[writer]
        return known[writer]

    return of


SLOW = ("demo output", "compare output", "cross-validate output")


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "writer", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in INTO]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_users_stays(
    kind: Callable[[Path, Path], None], writer: str, names: Callable[[str], list[Path]], tmp_path: Path, capsys: Any
) -> None:
    (outside := tmp_path / "outside").mkdir()
    (outside / "thesis.tex").write_text("a thesis")
    replaced = kind.__name__ in REPLACED.get(writer, ())
    for number, name in enumerate(names(writer)):
        results = tmp_path / str(number) / "results"
        (taken := results / name).parent.mkdir(parents=True)
        kind(taken, outside)
        before = snapshot(tmp_path)
        said = ""
        try:
            INTO[writer](results)
        except (OSError, ValueError) as error:
            said = str(error) + capsys.readouterr().err
        after = snapshot(tmp_path)
        changed = [path for path, what in before.items() if after.get(path) != what]
        assert changed == ([str(taken)] if replaced else []), (name, said)
        assert said or replaced or writer.startswith(FREE), name
        assert not said or name.name in said or taken.parent.name in said, (name, said)


def test_all_writers_into_folders_are_here() -> None:
    paths = {*outputs(), "ZeROPreset(nvme_path)", "CrossValidation(members)", "a checkpoint of shards"}
    assert test_corpus.ONLY_WRITTEN | {"cross_validate(folder)", "compare(folder)", "Preemption(folder)"} == (
        ({*INTO} | paths) - {"a checkpoint of shards"}
    )


# -- writers to a path that the user names ----------------------------------------------------------------------------


def checkpoint(folder: Path) -> Path:
    torch.save(hostile.STATE, file := folder / "in.pt")
    return file


def averages(folder: Path, out: Path, **settings: bool) -> None:
    average_checkpoints([checkpoint(folder)], out, **settings)


def souped(folder: Path, out: Path, **settings: bool) -> None:
    greedy_soup([checkpoint(folder)], lambda _: 1.0, out, **settings)


def exported(folder: Path, out: Path, **settings: bool) -> None:
    export_weights(checkpoint(folder), out, **settings)


def consolidated(folder: Path, out: Path, **settings: bool) -> None:
    if not (folder / "shards.ckpt").exists():
        hostile.fsdp2(folder / "shards")
    consolidate(folder / "shards.ckpt", out, **settings)


def by_command(*words: object) -> Callable[..., None]:
    def run(folder: Path, out: Path, *, force: bool = False) -> None:
        given = [
            checkpoint(folder) if word == "in" else folder / "shards.ckpt" if word == "in/" else word for word in words
        ]
        if "in/" in words and not (folder / "shards.ckpt").exists():
            hostile.fsdp2(folder / "shards")
        command(*given, "-o", out, *(["--force"] if force else []))

    return run


def written_as_json(folder: Path, out: Path) -> None:
    CrossValidation([{"loss": 1.0}] * 2, None, [], [Fold([0], [1])] * 2).to_json(out)


def reported_as_json(folder: Path, out: Path) -> None:
    lt.label_report(torch.eye(2), torch.tensor([0, 1])).to_json(out)


def drawn(folder: Path, out: Path) -> None:
    command("plot-schedule", "cosine", "--steps", 5, "-o", out)


def found_rate(folder: Path, out: Path) -> None:
    command("find-lr", "-c", config(folder / "x"), "--steps", 20, "--plot", out)


def predicted(folder: Path, out: Path) -> None:
    shutil.rmtree(folder / "cv", ignore_errors=True)
    command(
        "cross-validate", "-c", config(folder / "x", PREDICTS), "--folds", 2, "-o", folder / "cv", "--predictions", out
    )


def compared(folder: Path, out: Path) -> None:
    shutil.rmtree(folder / "c", ignore_errors=True)
    command(
        *("compare", "-c", config(folder / "x"), "--with", "EMA", "--metric", "val_accuracy", "--mode", "max"),
        *("--seeds", 2, "--output", folder / "c", "--plot", out),
    )


WITH_FORCE: dict[str, tuple[str, Callable[..., None]]] = {
    "average_checkpoints(output)": ("out.pt", averages),
    "greedy_soup(output)": ("out.pt", souped),
    "export_weights(output)": ("out.safetensors", exported),
    "consolidate(output)": ("out.pt", consolidated),
    "average output": ("out.pt", by_command("average", "in", "in")),
    "export output": ("out.pt", by_command("export", "in")),
    "consolidate output": ("out.pt", by_command("consolidate", "in/")),
}
REPLACING: dict[str, tuple[str, Callable[..., None]]] = {  # what the user names is written, as by `>` in a shell
    "CrossValidation.to_json(path)": ("out.json", written_as_json),
    "LabelReport.to_json(path)": ("out.json", reported_as_json),
    "plot-schedule output": ("out.png", drawn),
    "find-lr plot": ("out.png", found_rate),
    "cross-validate predictions": ("out.pt", predicted),
    "compare plot": ("out.png", compared),
}


def outputs() -> set[str]:
    return {*WITH_FORCE, *REPLACING}


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("writer", WITH_FORCE)
def test_an_output_is_replaced_by_force_alone_and_never_what_is_no_file(writer: str, tmp_path: Path) -> None:
    suffix, write = WITH_FORCE[writer]
    (outside := tmp_path / "outside").mkdir()
    (outside / "thesis.tex").write_text("a thesis")
    (work := tmp_path / "work").mkdir()
    for number, kind in enumerate((*KINDS, pipe)):
        (tmp_path / str(number)).mkdir()
        kind(out := tmp_path / str(number) / suffix, outside)
        before, targets = snapshot(tmp_path / str(number)), snapshot(outside)
        with pytest.raises((OSError, ValueError)):
            write(work, out)
        assert snapshot(tmp_path / str(number)) == before, kind
        if kind in (file, link_to_file, link_to_nothing):
            write(work, out, force=True)
            assert out.is_file()
            assert not out.is_symlink()
        else:
            with pytest.raises((OSError, ValueError)):
                write(work, out, force=True)
            assert snapshot(tmp_path / str(number)) == before, kind
        assert snapshot(outside) == targets, kind


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "writer",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith(("compare", "cross")) else [])
        for name in REPLACING
    ],
)
def test_an_output_that_is_no_file_is_refused_and_a_link_is_not_followed(writer: str, tmp_path: Path) -> None:
    suffix, write = REPLACING[writer]
    (outside := tmp_path / "outside").mkdir()
    (outside / "thesis.tex").write_text("a thesis")
    (work := tmp_path / "work").mkdir()
    for number, kind in enumerate((*KINDS, pipe)):
        (tmp_path / str(number)).mkdir()
        kind(out := tmp_path / str(number) / suffix, outside)
        before, targets = snapshot(tmp_path / str(number)), snapshot(outside)
        if kind in (file, link_to_file, link_to_nothing):
            write(work, out)
            assert out.is_file()
            assert not out.is_symlink()
        else:
            with pytest.raises((OSError, ValueError)):
                write(work, out)
            assert snapshot(tmp_path / str(number)) == before, kind
            assert not {*os.listdir(work)} & {"cv", "c"}, "the error comes before the training"
        assert snapshot(outside) == targets, kind


# -- the source -------------------------------------------------------------------------------------------------------

MECHANISM = {f"core/safe_load/{name}.py" for name in ("atomic_file", "atomic_folder", "own_folder")}
REMOVING = {"unlink", "rmdir", "rmtree", "removedirs", "rename", "renames", "replace", "move", "copyfile", "copytree"}
OTHERS = {"symlink_to", "hardlink_to", "symlink", "link"}
# Files that are written as they are: locks, of which nothing may be replaced.
LOCKS = {("evaluation/plan.py", "_open_lock"), ("core/lightning/compiler.py", "_one_process_at_a_time")}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for root in (ROOT, ROOT.parent / "lightning_tricks_cli"):
        for path in sorted(root.rglob("*.py")):
            yield path.relative_to(root).as_posix(), ast.parse(path.read_text())


def on_files(call: ast.Call) -> bool:
    """Whether a call removes, renames or links a file: ``os.*``, ``shutil.*`` or a method of a path."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    if owner in ("os", "shutil"):
        return name in {*REMOVING, *OTHERS, "remove"}
    of_text = name == "replace" and len(call.args) != 1  # a path's has one argument, that of a text two
    return name in {*REMOVING, *OTHERS} and not of_text


def test_every_file_is_removed_and_replaced_by_one_mechanism() -> None:
    for file, tree in sources():
        found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and on_files(node)]
        assert not found or file in MECHANISM, f"{file}: {found}: own_folder, atomic_folder and atomic_write do that"


def writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    words = [
        each.value for each in (*call.args, *(each.value for each in call.keywords)) if isinstance(each, ast.Constant)
    ]
    opens = name == "open" and any(isinstance(word, str) and {*word} & {*"wax+"} and len(word) < 4 for word in words)
    makes = ast.unparse(call.func) == "os.open" and "O_CREAT" in ast.unparse(call)
    return name in ("write_text", "write_bytes", "savefig") or opens or makes


def test_every_file_is_written_atomically() -> None:
    """In a block of ``atomic_write``, which leaves the old file or the new one, and follows no link."""
    for file, tree in sources():
        if file not in MECHANISM:
            for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
                inside = {
                    id(each)
                    for block in ast.walk(function)
                    if isinstance(block, ast.With) and "atomic_write(" in ast.unparse(block)
                    for each in ast.walk(block)
                }
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and writes(node)]
                found = [ast.unparse(call) for call in calls if id(call) not in inside]
                assert not found or (file, function.name) in LOCKS, f"{file}: {found}"
