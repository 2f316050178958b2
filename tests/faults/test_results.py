"""Results of folds, of comparisons and of adapters: a flipped bit is refused by name, a full disk leaves what was."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file

import lightning_tricks as lt
from lightning_tricks.core.safe_load.own_folder import is_ours
from tests.evaluation import recipes
from tests.evaluation.test_compare import ARMS, ASKED
from tests.faults.runs import Resumable, differences
from tests.faults.test_disk_full import full_disk
from tests.faults.test_flips import flipped
from tests.nets import PlainNet, build, fit, weights
from tests.ranks import run_ranks


def lora(r: int = 2) -> lt.LoRA:
    return lt.LoRA("layers.0", r=r, train=r"layers\.2")


def save_adapters(folder: Path, r: int = 2) -> None:
    module = build(PlainNet)
    torch.save(module.state_dict(), folder / "base.pt")
    fit(module, train=Resumable(), callbacks=[lora(r)], max_epochs=1).save_checkpoint(folder / "a.ckpt")


def make_folds(folder: Path) -> None:
    recipes.run(folder)
    for own in folder.glob("fold*[0-9]"):
        shutil.rmtree(own)  # the checkpoints, which are not read again


def make_runs(folder: Path) -> None:
    lt.compare(ARMS, folder=folder, **ASKED)


# -- flipped bits -----------------------------------------------------------------------------------------------------


def merged(folder: Path, out: Path) -> Any:
    lt.export_weights(folder / "a.ckpt", out / "w.pt", merge=True, base=folder / "base.pt", force=True)
    return torch.load(out / "w.pt")


def of_peft(folder: Path, out: Path) -> Any:
    lt.export_adapters(folder / "a.ckpt", out, force=True)
    return load_file(out / "adapter_model.safetensors"), json.loads((out / "adapter_config.json").read_text())


def trained(folder: Path, out: Path) -> Any:
    module = build(PlainNet)
    fit(module, train=Resumable(), callbacks=[lora()], max_epochs=2, ckpt_path=folder / "a.ckpt")
    return weights(module)


def folds(folder: Path, out: Path) -> Any:
    result = recipes.run(folder, make_module=never)
    return result.metrics, result.predictions, [str(path) for path in result.checkpoints]


def runs(folder: Path, out: Path) -> Any:
    return lt.compare(ARMS, folder=folder, **ASKED).runs


def never(*_: Any) -> Any:
    raise AssertionError("a finished fold is made again")


READERS: dict[str, tuple[Callable[[Path], None], Callable[[Path, Path], Any]]] = {
    "merged adapters": (save_adapters, merged),
    "adapters for peft": (save_adapters, of_peft),
    "resumed adapters": (save_adapters, trained),
    "folds of cross_validate": (make_folds, folds),
    "runs of compare": (make_runs, runs),
}


@pytest.mark.parametrize(
    ("reader", "flips"),
    [("folds of cross_validate", 10), *(pytest.param(name, 300, marks=pytest.mark.slow) for name in READERS)],
)
def test_a_flipped_bit_gives_no_other_result(reader: str, flips: int, tmp_path: Path) -> None:
    make, read = READERS[reader]
    folder, out, rng = tmp_path / "made", tmp_path / "out", random.Random(flips)
    folder.mkdir()
    out.mkdir()
    make(folder)
    right, refused, wrong = read(folder, out), 0, []
    for where, _ in zip(flipped(folder, rng), range(flips), strict=False):
        try:
            found = read(folder, out)
        except Exception as error:
            refused += 1
            named = isinstance(error, ValueError | MisconfigurationException) and str(folder) in str(error)
            if not named and reader != "resumed adapters":  # there, torch or Lightning may be first to tell
                wrong.append(f"{where}: {type(error).__name__}: {error}")
        else:
            if differences(found, right):
                wrong.append(where)
    assert not wrong, f"{len(wrong)} of {flips}: {wrong[:5]}"
    assert refused


def test_a_flipped_bit_of_an_adapter_is_named_by_a_trainer(tmp_path: Path) -> None:
    save_adapters(tmp_path)
    path = tmp_path / "a.ckpt"
    content, state = bytearray(path.read_bytes()), torch.load(path, weights_only=True)["state_dict"]
    adapter = next(value for name, value in state.items() if "lora_B" in name)
    content[content.index(adapter.numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(MisconfigurationException, match=r"a\.ckpt is damaged: the checksum of .*data/\d+ is wrong"):
        trained(tmp_path, tmp_path)


@pytest.mark.slow
def test_a_changed_digit_of_a_run_is_refused_before_any_other_run(tmp_path: Path) -> None:
    make_runs(tmp_path)
    path = tmp_path / "EMA" / "seed1.json"
    path.write_text(re.sub(r'("val_loss": 0\.\d)\d', r"\g<1>0", path.read_text()))
    (tmp_path / "plain" / "seed0.json").unlink()
    with pytest.raises(ValueError, match=r"seed1\.json is damaged: remove it, and what it tells of is done again"):
        make_runs(tmp_path)
    assert not (tmp_path / "plain" / "seed0.json").exists()
    path.unlink()
    make_runs(tmp_path)


def test_what_a_killed_write_has_left_does_not_make_a_folder_one_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / ".0123456789abcdef.json").write_text("{")
    with pytest.raises(AssertionError, match="a finished fold is made again"):  # by the second arm: the first is taken
        lt.compare({"plain": ARMS["plain"], "EMA": never}, folder=tmp_path, **ASKED)
    assert (tmp_path / "plain" / "plan.json").exists()


# -- full disks -------------------------------------------------------------------------------------------------------


class FullDisk(Callback):
    """The disk is full once a stage is over: what the Trainer has written is there, and nothing more fits."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == self.stage:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))


def full_in_fold_1(fold: int, folder: Path) -> L.Trainer:
    return recipes.make_trainer(fold, folder, callbacks=[FullDisk("predict")] if fold == 1 else [])


def full_in_a_run(folder: Path) -> Any:
    run, *rest = ARMS["EMA"](folder)
    run.callbacks.append(FullDisk("validate"))
    return run, *rest


def refused(write: Callable[[], Any], message: str) -> None:
    with pytest.raises(OSError, match=message):
        write()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full_for_adapters(root: Path) -> None:
    for r in (2, 4):
        (root / f"r{r}").mkdir()
        save_adapters(root / f"r{r}", r)

    def write(r: int) -> None:
        lt.export_adapters(root / f"r{r}" / "a.ckpt", root / "out", force=True)

    write(2)
    before, sizes = files(root / "out"), [path.stat().st_size for path in (root / "out").iterdir()]
    for limit in (0, min(sizes) + 1, max(sizes) - 1):
        with full_disk(limit):
            refused(partial(write, 4), "was not written")
        assert files(root / "out") == before, limit
    write(4)
    assert all(files(root / "out")[name] != value for name, value in before.items())


def full_for_folds(root: Path) -> None:
    expected = recipes.run(root / "whole")
    refused(lambda: recipes.run(root / "cv", make_trainer=full_in_fold_1), r"fold1\.pt was not written")
    names = sorted(path.name for path in (root / "cv").iterdir())
    assert names == [".lock", "fold0", "fold0.pt", "fold1", "folds.json"]
    assert is_ours(root / "cv" / "fold1", "fit")
    assert recipes.same(recipes.run(root / "cv"), expected)


def full_for_runs(root: Path) -> None:
    arms = {"plain": ARMS["plain"], "EMA": full_in_a_run}
    refused(lambda: lt.compare(arms, folder=root / "compare", **ASKED), r"seed0\.json was not written")
    assert sorted(path.name for path in (root / "compare" / "EMA").iterdir()) == ["plan.json", "seed0"]
    metrics = lt.compare(ARMS, folder=root / "undisturbed", **ASKED).runs
    shutil.rmtree(root / "compare" / "EMA")  # of an arm with another callback
    found = lt.compare(ARMS, folder=root / "compare", **ASKED).runs
    for name in ARMS:
        assert [each["metrics"] for each in found[name]] == [each["metrics"] for each in metrics[name]]


def full_for_pictures(root: Path) -> None:
    from matplotlib import pyplot

    look, folder = lambda: [lt.InspectTraining(root / "pictures", every_n_steps=100, steps=2)], root / "pictures"
    fit(build(PlainNet), callbacks=look(), max_epochs=1)
    before, module = files(folder), build(PlainNet)
    with full_disk():
        refused(lambda: fit(module, callbacks=look(), max_epochs=1), r"step=0-v1\.png was not written")
    assert files(folder) == before != {}
    assert not pyplot.get_fignums()
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


FULL = {"adapters": full_for_adapters, "folds": full_for_folds, "runs": full_for_runs, "pictures": full_for_pictures}


def on_a_full_disk(name: str, root: str) -> None:
    FULL[name](Path(root))


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FULL if name != "adapters"]


@pytest.mark.parametrize("name", ["adapters", *SLOW])
def test_a_full_disk_leaves_the_results_that_were_there(name: str, tmp_path: Path) -> None:
    run_ranks(on_a_full_disk, name, str(tmp_path), nprocs=1)
