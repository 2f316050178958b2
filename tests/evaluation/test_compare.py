"""compare: its runs are those made by hand, pairs share weights and order, and nothing is lost or passed over."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from scipy import stats

import lightning_tricks as lt
from lightning_tricks.core.safe_load.own_folder import MARKER
from lightning_tricks.evaluation import Comparison
from lightning_tricks.evaluation.compare import at_equal_time
from tests.evaluation.test_cross_validate import Removes
from tests.nets import Net, NormNet, PlainNet, loader, rank_loader, trainer
from tests.ranks import run_alone, run_ranks

Fit = tuple[Any, ...]


def fit(folder: Path, *tricks: Callback, kind: type[Net] = Net, **settings: Any) -> Fit:
    run = trainer(default_root_dir=folder, callbacks=[*tricks], **settings)
    return run, kind(), loader(shuffle=True), loader(24)


def ema(folder: Path) -> Fit:
    return fit(folder, lt.EMA(decay=0.5))


class SharpNet(lt.SAMMixin, NormNet):
    sam = lt.SAM(rho=0.1)


ARMS: dict[str, Callable[[Path], Fit]] = {"plain": fit, "EMA": ema}
ASKED: dict[str, Any] = {"metric": "val_loss", "mode": "min", "seeds": 2}


def by_hand(seed: int, tricks: Callable[[], list[Callback]], epochs: int = 2) -> float:
    """One run, written out."""

    def new_seed(run: L.Trainer, _: Any) -> None:
        L.seed_everything(Random(f"{seed} {run.current_epoch}").getrandbits(32), verbose=False)

    L.seed_everything(seed, verbose=False)
    module, seeds = Net(), LambdaCallback(on_train_epoch_start=new_seed)
    run = trainer(callbacks=[seeds, *tricks()], max_epochs=epochs)
    run.fit(module, loader(shuffle=True), loader(24))
    return run.validate(module, loader(24), verbose=False)[0]["val_loss"]


def test_the_runs_are_those_made_by_hand(tmp_path: Path) -> None:
    before = torch.get_rng_state(), os.environ.get("PL_GLOBAL_SEED")
    result = lt.compare(ARMS, folder=tmp_path, metric="val_loss", mode="min", seeds=[3, 1])
    assert torch.equal(torch.get_rng_state(), before[0])  # those of the caller stay
    assert os.environ.get("PL_GLOBAL_SEED") == before[1]
    plain = [by_hand(seed, list) for seed in (3, 1)]
    average = [by_hand(seed, lambda: [lt.EMA(decay=0.5)]) for seed in (3, 1)]
    assert (result.values("plain"), result.values("EMA")) == (plain, average)
    assert len({*plain, *average}) == 4
    low, high = stats.ttest_rel(average, plain).confidence_interval(0.95)
    found = result.difference("EMA")
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high))


class Seen(Callback):
    """Keeps the first weight and the batches, by the arm's folder; draws random numbers if asked to."""

    runs: dict[str, list[torch.Tensor]] = {}  # noqa: RUF012

    def __init__(self, folder: Path, draws: bool) -> None:
        self.key, self.draws = "/".join(folder.parts[-2:]), draws

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.runs[self.key] = [pl_module.layers[0].weight.detach().clone()]

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.runs[self.key].append(batch[0].clone())
        if self.draws:
            torch.rand(3)


def test_a_pair_has_the_same_weights_and_the_same_order_though_a_trick_draws_random_numbers(tmp_path: Path) -> None:
    arms = {
        "plain": lambda folder: fit(folder, Seen(folder, False)),
        "draws": lambda folder: fit(folder, Seen(folder, True), lt.EMA()),  # which validates twice
    }
    lt.compare(arms, folder=tmp_path, **ASKED)
    for seed in (0, 1):
        plain, draws = (Seen.runs[f"{arm}/seed{seed}"] for arm in arms)
        assert len(plain) == len(draws) == 1 + 2 * 6
        assert all(map(torch.equal, plain, draws))
        assert not torch.equal(plain[1], plain[7])  # every epoch has an order of its own
    assert not torch.equal(Seen.runs["plain/seed0"][0], Seen.runs["plain/seed1"][0])


class Dies(Callback):
    """Kills the process, or raises, in the second epoch of a run while a file says so."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and (self.folder.parents[1] / self.how / self.folder.name).exists():
            (self.folder / "half").touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no memory\nleft")


def compared(folder: Path) -> tuple[str, dict[str, Any]]:
    """The table without times, and the runs."""
    arms = {"plain": fit, "a/b": lambda own: fit(own, Dies(own, "kill"), lt.EMA(decay=0.5))}
    result = lt.compare(arms, folder=folder, **ASKED)
    return re.sub(r"\d\.\d\d(?=\n|$)", "", str(result)), result.runs


def test_a_run_that_was_killed_is_made_again_and_finished_ones_are_kept(tmp_path: Path) -> None:
    expected, _ = compared(tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    (folder / "kill").mkdir(parents=True)
    (folder / "kill" / "seed1").touch()
    with pytest.raises(AssertionError):
        run_alone(compared, folder)
    assert (folder / "a%2Fb" / "seed1" / "half").exists()
    finished = {path: path.stat().st_mtime_ns for path in folder.glob("*/seed*.json")}
    assert len(finished) == 3
    (folder / "kill" / "seed1").unlink()
    table, _ = compared(folder)
    assert table == expected
    assert not (folder / "a%2Fb" / "seed1" / "half").exists()
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_sigterm_amid_the_last_batch_of_a_loop_ends_the_comparison(stage: str, tmp_path: Path) -> None:
    class Ended(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            last = batch_idx == self.trainer.num_val_batches[0] - 1
            if last and self.trainer.state.fn == stage and self.trainer.current_epoch >= self.trainer.max_epochs - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    arms = {"one": lambda folder: fit(folder, kind=Ended), "two": fit}
    with pytest.raises(SIGTERMException):
        lt.compare(arms, folder=tmp_path, **ASKED)
    assert not [*tmp_path.glob("two/seed*")]


def test_finished_runs_are_read_for_any_metric_and_beside_new_arms(tmp_path: Path) -> None:
    class Scored(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.log("score", -1.0)

    arms = {name: lambda folder: fit(folder, kind=Scored) for name in ("one", "two")}
    with pytest.raises(ValueError, match=r"'one' logs no metric='acc' .* but \['score', 'val_loss'\]"):
        lt.compare(arms, folder=tmp_path, metric="acc", mode="max", seeds=2)
    result = lt.compare(arms, folder=tmp_path, metric="score", mode="max", seeds=2)
    assert result.values("two") == [-1.0, -1.0]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/seed*.json")}
    more = lt.compare({**arms, "three": lambda folder: fit(folder, kind=Scored)}, folder=tmp_path, **ASKED)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(before) == 4
    assert more.verdict("three") == "inconclusive"  # the same fits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 3}, r"plain has results of other settings: seeds was \[0, 1\], now \[0, 1, 2\]\. Choose another"),
        ({"seeds": [1, 0]}, r"seeds was"),
        ({"checkpoint": "best"}, r'checkpoint="best" needs a ModelCheckpoint with monitor, .* the arm \'plain\''),
        ({"EMA": lambda f: fit(f, lt.EMA(decay=0.6))}, r"EMA \d: decay was '0.5', now '0.6'"),
        ({"EMA": lambda f: fit(f, lt.SWA())}, r"EMA \d was .*, now None; SWA \d was None"),
        ({"plain": lambda f: fit(f, max_epochs=3)}, r"length: max_epochs was 2, now 3"),
        ({"plain": lambda f: fit(f, kind=PlainNet)}, r"initial weights was"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(
    change: dict[str, Any], message: str, finished: Path
) -> None:
    changed = {name: change.get(name, arm) for name, arm in ARMS.items()}
    others = {name: value for name, value in change.items() if name not in ARMS}
    with pytest.raises(ValueError, match=message):
        lt.compare(changed, folder=finished, **{**ASKED, **others})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    lt.compare(ARMS, folder=folder, **ASKED)
    return folder


def given_twice() -> dict[str, Callable[[Path], Fit]]:
    module, run, average, train, network = Net(), trainer(), lt.EMA(), loader(), Net()

    class Wraps(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network.layers

    return {
        "the module Net": lambda folder: (trainer(), module, loader(), loader()),
        "the Trainer": lambda folder: (run, Net(), loader(), loader()),
        "the EMA": lambda folder: (trainer(callbacks=[average]), Net(), loader(), loader()),
        "the DataLoader": lambda folder: (trainer(), Net(), train, loader()),
        r"the parameter layers\.0\.weight": lambda folder: (trainer(), Wraps(), loader(), loader()),
    }


@pytest.mark.parametrize("what", given_twice())
def test_what_an_arm_gives_twice_is_refused_before_a_step(what: str, tmp_path: Path) -> None:
    arms = {"plain": given_twice()[what], "EMA": ema}
    with pytest.raises(MisconfigurationException, match=f"the arm 'plain' must make .* got {what} of another fit"):
        lt.compare(arms, folder=tmp_path, **ASKED)
    shared = given_twice()[what]
    with pytest.raises(MisconfigurationException, match=f"the arm 'two' must make .* got {what} of another fit"):
        lt.compare({"one": shared, "two": shared}, folder=tmp_path / "arms", **ASKED)
    assert not list(tmp_path.rglob("seed*.json"))


def used(folder: Path) -> Fit:
    run = trainer(max_epochs=1)
    run.fit(Net(), loader(), loader())
    return run, Net(), loader(), loader()


@pytest.mark.parametrize(
    ("arms", "settings", "error", "message"),
    [
        ({"plain": fit}, {}, ValueError, r"arms must be at least two, the baseline first: .* got \['plain'\]"),
        ({**ARMS, "..": ema}, {}, ValueError, r"arms must have names .* got \['\.\.'\]"),
        ({**ARMS, ".lock": ema}, {}, ValueError, r"arms must have names .* no dot in front, got \['\.lock'\]"),
        ({**ARMS, "": ema}, {}, ValueError, r"arms must have names .* got \[''\]"),
        ({**ARMS, "a" * 256: ema}, {}, ValueError, r"names of at most 255 bytes as a folder, got 256 in 'aaa.*'\.\.\."),
        ({**ARMS, "ä" * 50: ema}, {}, ValueError, "names of at most 255 bytes as a folder, got 300 in 'äää"),
        ({"a" * 200: fit, "EMA": ema}, {"equal_time": True}, ValueError, "names of at most 195 bytes as a folder"),
        (ARMS, {"seeds": 1}, ValueError, "seeds must be at least 2, got 1"),
        (ARMS, {"seeds": [4]}, ValueError, r"seeds must be at least two different ones: .* got \[4\]"),
        (ARMS, {"seeds": [4, 4]}, ValueError, "seeds must be at least two different ones"),
        (ARMS, {"seeds": [0, -1]}, ValueError, r"seeds\[1\] must be at least 0, got -1"),
        (ARMS, {"seeds": [0, 2**32]}, ValueError, r"seeds\[1\] must be in \[0, 4294967295\]"),
        (ARMS, {"seeds": "34"}, TypeError, "seeds must be an integer, got '34'"),
        (ARMS, {"mode": "higher"}, ValueError, "mode must be"),
        (ARMS, {"checkpoint": "first"}, ValueError, "checkpoint must be"),
        (
            {"plain": fit, "EMA": lambda _: Net()},
            {},
            TypeError,
            r"'EMA' must give \(trainer, module, \.\.\.\), got Net",
        ),
        ({"plain": fit, "EMA": lambda _: (Net(), trainer())}, {}, TypeError, "must give .* got Net"),
        ({"plain": used, "EMA": ema}, {}, MisconfigurationException, "'plain' must make a new Trainer .* used before"),
    ],
)
def test_what_cannot_be_right_is_refused(
    arms: dict[str, Any], settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        lt.compare(arms, folder=tmp_path, **{**ASKED, **settings})
    assert not list(tmp_path.rglob("seed*.json"))


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="plain has files of something else: choose another folder"):
        lt.compare(ARMS, folder=tmp_path, **ASKED)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_in_place_of_an_arms_folder_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs").mkdir()
    if kind == "file":
        (tmp_path / "runs" / "EMA").touch()
    else:
        (tmp_path / "runs" / "EMA").symlink_to(tmp_path / "outside")
    with pytest.raises(
        FileExistsError, match=r"EMA is in the way: (no folder|a link)\. Move it away, or choose another"
    ):
        lt.compare(ARMS, folder=tmp_path / "runs", **ASKED)
    assert not any((tmp_path / "outside").iterdir())


def test_a_lock_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("12 on a machine")
    for place in (lambda: (tmp_path / ".lock").symlink_to("secret"), lambda: (tmp_path / ".lock").write_text("mine")):
        place()
        with pytest.raises(FileExistsError, match=r"\.lock is in the way: .* Move it away, or choose another folder"):
            lt.compare(ARMS, folder=tmp_path, **ASKED)
        assert sorted(os.listdir(tmp_path)) == [".lock", "secret"]
        (tmp_path / ".lock").unlink()
    assert (tmp_path / "secret").read_text() == "12 on a machine"
    (tmp_path / ".lock").write_text("12 on a machine")  # one of an earlier run
    lt.compare(ARMS, folder=tmp_path, **ASKED)
    assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} on ")


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    for folder in (tmp_path / "runs", tmp_path / "runs" / "a"):
        with pytest.raises(NotADirectoryError, match=r"folder must be a folder, got '.*runs.*', and .*runs is none"):
            lt.compare(ARMS, folder=folder, **ASKED)


@pytest.mark.parametrize("removed", [".", "EMA", "plain"])
def test_a_folder_that_is_removed_amid_a_run_is_named(removed: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    arms = {"plain": fit, "EMA": lambda own: fit(own, Removes(folder / removed))}
    with pytest.raises(OSError, match=r"runs.*was (removed while it was in use|not written)") as caught:
        lt.compare(arms, folder=folder, **ASKED)
    assert str(folder) in str(caught.value)


def test_the_runs_of_an_earlier_version_are_read_and_a_part_of_one_is_named(tmp_path: Path) -> None:
    """It has left no markers: what is finished is told by its plan, and of the rest it is not known whose it is."""
    whole = lt.compare(ARMS, folder=tmp_path, **ASKED).runs
    for marker in tmp_path.rglob(MARKER):
        marker.unlink()
    assert lt.compare(ARMS, folder=tmp_path, **ASKED).runs == whole
    (tmp_path / "EMA" / "seed1.json").unlink()
    (tmp_path / "EMA" / "seed1" / "log.txt").touch()
    with pytest.raises(FileExistsError, match=r"seed1 is in the way: a folder with 'log\.txt' that lightning_tricks"):
        lt.compare(ARMS, folder=tmp_path, **ASKED)
    shutil.rmtree(tmp_path / "EMA" / "seed1")
    again = lt.compare(ARMS, folder=tmp_path, **ASKED).runs
    assert [run["metrics"] for run in again["EMA"]] == [run["metrics"] for run in whole["EMA"]]


def test_a_checkpoint_beside_the_marker_is_no_reason_to_warn(tmp_path: Path) -> None:
    def saves(folder: Path, *tricks: Callback) -> Fit:
        return fit(folder, ModelCheckpoint(folder), *tricks, enable_checkpointing=True)

    lt.compare({"plain": saves, "EMA": lambda folder: saves(folder, lt.EMA(0.5))}, folder=tmp_path, **ASKED)
    assert len([*tmp_path.rglob("*.ckpt")]) == 4


def test_a_run_that_diverges_or_fails_is_reported_and_gives_no_interval(tmp_path: Path) -> None:
    (tmp_path / "raise").mkdir()
    (tmp_path / "raise" / "seed1").touch()
    arms = {
        "plain": fit,
        "diverges": lambda folder: (trainer(), Net(lr=float("nan")), loader(), loader()),
        "fails": lambda folder: fit(folder, Dies(folder, "raise")),
    }
    result = lt.compare(arms, folder=tmp_path, **ASKED)
    assert result.difference("diverges") is result.difference("fails") is None
    assert result.verdict("diverges") == "diverged in 2 of 2 runs"
    assert result.verdict("fails") == "failed in 1 of 2 runs: MemoryError: no memory left"
    assert "no memory left" in str(result)
    assert "no memory" in (tmp_path / "fails" / "seed1" / "error.txt").read_text()
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert told["runs"]["diverges"][0]["metrics"] == {"val_loss": None}
    result.plot()
    turned = Comparison("val_loss", "min", [0, 1], dict(reversed(result.runs.items())))
    assert turned.verdict("plain") == "fails failed in 1 of 2 runs: MemoryError: no memory left"
    (tmp_path / "raise" / "seed1").unlink()  # the cause is removed: the run is made again, one that diverged is not
    diverged = (tmp_path / "diverges" / "seed0.json").stat().st_mtime_ns
    again = lt.compare(arms, folder=tmp_path, **ASKED)
    assert again.verdict("fails") == "inconclusive"
    assert (tmp_path / "diverges" / "seed0.json").stat().st_mtime_ns == diverged


def test_an_error_of_the_baseline_is_raised(tmp_path: Path) -> None:
    (tmp_path / "raise").mkdir()
    (tmp_path / "raise" / "seed0").touch()
    with pytest.raises(MemoryError, match="no memory"):
        lt.compare({"plain": lambda folder: fit(folder, Dies(folder, "raise")), "EMA": ema}, folder=tmp_path, **ASKED)


def runs(**arms: list[float]) -> dict[str, list[dict[str, Any]]]:
    return {name: [{"metrics": {"m": x}, "seconds": 2.0} for x in values] for name, values in arms.items()}


@pytest.mark.parametrize(
    ("values", "mode", "verdict"),
    [
        ([2.0, 3.1, 4.0], "max", "better"),
        ([2.0, 3.1, 4.0], "min", "worse"),
        ([0.0, 1.1, 2.0], "max", "worse"),
        ([0.0, 1.1, 2.0], "min", "better"),
        ([0.0, 2.9, 3.0], "max", "inconclusive"),
        ([1.0, 2.0, 3.0], "max", "inconclusive"),
    ],
)
def test_the_verdict_is_that_of_the_interval_and_the_mode(values: list[float], mode: Any, verdict: str) -> None:
    result = Comparison("m", mode, [0, 1, 2], runs(plain=[1.0, 2.0, 3.0], trick=values))
    assert result.verdict("trick") == verdict
    assert verdict in str(result)
    assert result.to_dict()["rows"][1]["verdict"] == verdict
    _, axes = result.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["trick"]


def test_the_time_is_the_median_of_the_ratios_of_pairs() -> None:
    made = runs(plain=[0.0] * 3, trick=[0.0] * 3)
    for run, seconds in zip(made["trick"], (2.0, 4.0, 100.0), strict=True):
        run["seconds"] = seconds
    assert Comparison("m", "max", [0, 1, 2], made).time("trick") == 2.0


class Sleeps(Callback):
    """Makes each epoch longer than anything else in it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        time.sleep(self.seconds)


@pytest.mark.slow
def test_at_equal_time_the_baseline_is_trained_for_as_long(tmp_path: Path) -> None:
    arms = {"plain": lambda folder: fit(folder, Sleeps(0.02)), "slow": lambda folder: fit(folder, Sleeps(0.1))}
    result = lt.compare(arms, folder=tmp_path, equal_time=True, **ASKED)
    (longer,) = result.equal.values()
    epochs = round(2 * result.time("slow"))
    assert epochs > 2
    assert longer == f"plain, {epochs} epochs"
    assert result.values(longer) == [by_hand(seed, list, epochs) for seed in (0, 1)]
    assert result.runs[longer][0]["epochs"] == epochs
    assert f"{longer}: " in str(result)
    assert result.to_dict()["rows"][1]["equal_time"]["over"] == longer
    assert [label.get_text() for label in result.plot()[1].get_yticklabels()] == ["slow", longer, f"slow over {longer}"]
    assert str(lt.compare(arms, folder=tmp_path, equal_time=True, **ASKED)) == str(result)


@pytest.mark.parametrize(
    ("seconds", "limits", "equal", "longer"),
    [
        (2.1, {"max_epochs": 10}, "plain, 21 epochs", 21),
        (2.1, {"max_steps": 100}, "plain, 210 steps", 210),
        (0.1, {"max_epochs": 2}, "plain, 1 epochs", 1),
        (1.2, {"max_epochs": 2}, "plain", None),  # 2 epochs once more: the runs that there are
        (1.04, {"max_epochs": 100}, None, None),
    ],
)
def test_the_length_is_that_of_the_ratio_of_times(
    seconds: float, limits: dict[str, Any], equal: str | None, longer: int | None, tmp_path: Path
) -> None:
    made = runs(plain=[0.0, 0.0], trick=[0.0, 0.0])
    for run in made["trick"]:
        run["seconds"] = 2 * seconds
    found, arms = at_equal_time(Comparison("m", "max", [0, 1], made), fit, limits)
    assert found == ({"trick": equal} if equal else {})
    assert list(arms) == ([equal] if longer else [])
    for arm in arms.values():
        run, *_ = arm(tmp_path)
        assert longer in (run.max_epochs, run.max_steps)


def test_equal_time_needs_a_length(tmp_path: Path) -> None:
    arms = {name: lambda folder: fit(folder, max_epochs=-1, max_time={"seconds": 0}) for name in "ab"}
    with pytest.raises(ValueError, match="equal_time=True needs max_epochs or max_steps in 'a'"):
        lt.compare(arms, folder=tmp_path, equal_time=True, **ASKED)
    assert not list(tmp_path.rglob("seed*.json"))


def test_the_best_checkpoint_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    def saving(folder: Path, *tricks: Callback) -> Fit:
        best = ModelCheckpoint(folder, monitor="val_loss", mode="max")  # not the last one
        return fit(folder, *tricks, best, enable_checkpointing=True, max_epochs=3)

    arms = {"plain": saving, "EMA": lambda folder: saving(folder, lt.EMA(decay=0.5))}
    result = lt.compare(arms, folder=tmp_path / "runs", checkpoint="best", **ASKED)
    assert "Measured with the weights that ModelCheckpoint calls best." in str(result)
    (tmp_path / "runs").rename(moved := tmp_path / "moved")
    assert lt.compare(arms, folder=moved, checkpoint="best", **ASKED).runs == result.runs
    for name in arms:
        for seed, value in enumerate(result.values(name)):
            (file,) = (moved / name / f"seed{seed}").glob("*.ckpt")
            module = Net.load_from_checkpoint(file)
            assert value == trainer().validate(module, loader(24), verbose=False)[0]["val_loss"]


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(24)

    def test_dataloader(self) -> Any:
        return loader(32)


class OwnData(NormNet):
    train_dataloader, val_dataloader, test_dataloader = Data.train_dataloader, Data.val_dataloader, Data.test_dataloader


def test_a_data_module_and_loaders_of_the_module_are_validated_and_tested(tmp_path: Path) -> None:
    arms = {"plain": lambda folder: (trainer(), NormNet(), Data()), "own": lambda folder: (trainer(), OwnData())}
    result = lt.compare(arms, folder=tmp_path, **{**ASKED, "metric": "test_loss"})
    assert result.values("plain") == result.values("own")
    assert result.runs["own"][0]["metrics"].keys() == {"val_loss", "test_loss"}
    module = NormNet()
    assert trainer().test(module, loader(32), verbose=False)[0]["test_loss"] not in result.values("own")


class Several(NormNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["x"], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def test_what_fit_takes_may_be_several_loaders_or_none(tmp_path: Path) -> None:
    def several(folder: Path) -> Fit:
        return trainer(), Several(), {"x": loader(shuffle=True)}, [loader(24), loader(16)]

    asked = {**ASKED, "metric": "val_loss/dataloader_idx_1"}
    assert lt.compare({"a": several, "b": several}, folder=tmp_path / "several", **asked).verdict("b")
    none = {name: lambda folder: (trainer(), OwnData(), None, None) for name in "ab"}
    assert lt.compare(none, folder=tmp_path / "none", **ASKED).verdict("b") == "inconclusive"
    shared = [loader(24), loader(16)]
    arms = {name: lambda folder: (trainer(), Several(), {"x": loader()}, shared) for name in "ab"}
    with pytest.raises(MisconfigurationException, match="got the DataLoader of another fit again"):
        lt.compare(arms, folder=tmp_path / "shared", **asked)


TRICKS: dict[str, Callable[[Path], Fit]] = {
    "EMA": ema,
    "SAM": lambda folder: fit(folder, kind=SharpNet),
    "LoRA": lambda folder: fit(folder, lt.LoRA(r"layers\.0", r=2, train=r"layers\.4")),
    "schedule": lambda folder: fit(folder, lt.LRSchedule("flat_cos")),
    "single_bf16": lambda folder: fit(folder, strategy="single_bf16"),
}


def test_tricks_of_every_kind_are_arms(tmp_path: Path) -> None:
    result = lt.compare({"plain": fit, **TRICKS}, folder=tmp_path, **ASKED)
    for name in TRICKS:
        assert not result.verdict(name).startswith(("failed", "diverged")), result.verdict(name)
        assert result.values(name) != result.values("plain")
    assert "weights" in result.notes[0]
    assert "SAM" in result.notes[0]
    assert "LoRA" not in result.notes[0]  # adapters come with the fit
    assert len(result.notes) == 1
    assert "5 arms: an interval is that of one comparison" in str(result)


def on_ranks(folder: Path) -> tuple[dict[str, Any], list[str]]:
    def ddp(own: Path, *tricks: Callback) -> Fit:
        run = trainer(strategy="ddp", devices=2, use_distributed_sampler=False, callbacks=[*tricks])
        return run, PlainNet(), rank_loader(), loader(24)

    arms = {"plain": ddp, "EMA": lambda own: ddp(own, lt.EMA(decay=0.5))}
    result = lt.compare(arms, folder=folder, **ASKED)
    again = lt.compare(arms, folder=folder, **ASKED)
    assert again.runs == result.runs
    return result.runs, sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json"))


def test_two_ranks_make_one_table(tmp_path: Path) -> None:
    (runs, files), (others, _) = run_ranks(on_ranks, tmp_path)
    assert runs == others
    assert len(files) == 6
    one = {"plain": lambda f: (trainer(), PlainNet(), loader(48, 16), loader(24)), "EMA": ema}
    alone = lt.compare(one, folder=tmp_path / "alone", **ASKED)
    assert [run["metrics"]["val_loss"] for run in runs["plain"]] == pytest.approx(alone.values("plain"))
