"""Cross-validation: equal to folds made by hand, also when it was killed; leaks from fold to fold are refused."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sklearn.model_selection import GroupKFold, RepeatedKFold, ShuffleSplit, StratifiedKFold, TimeSeriesSplit
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_tricks as lt
from lightning_tricks.core.safe_load.own_folder import MARKER
from lightning_tricks.evaluation import CrossValidation
from tests.evaluation.recipes import (
    DATA,
    TARGETS,
    Fails,
    Scored,
    by_hand,
    failing,
    make_loader,
    make_module,
    make_trainer,
    run,
    same,
)
from tests.nets import trainer


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder)
    return folder


def test_folds_are_those_made_by_hand(tmp_path: Path) -> None:
    found = run(tmp_path / "cv", seed=5)
    metrics, predictions = by_hand(tmp_path / "hand", seed=5)
    assert found.metrics == metrics
    assert torch.equal(found.predictions, predictions)
    assert [path.name for path in found.checkpoints] == [
        path.name for k in range(3) for path in (tmp_path / "hand" / str(k)).glob("*.ckpt")
    ]
    for k, path in enumerate(found.checkpoints):
        assert path.is_relative_to(tmp_path / "cv" / f"fold{k}")
    assert sorted(sample for fold in found.folds for sample in fold.validation) == list(range(len(DATA)))


def test_random_numbers_and_seeds_of_the_caller_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "11")
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    torch.manual_seed(4)
    random.seed(4)
    expected = torch.rand(3), random.random()
    torch.manual_seed(4)
    random.seed(4)
    run(tmp_path, predict=False)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert os.environ["PL_GLOBAL_SEED"] == "11"
    assert "PL_SEED_WORKERS" not in os.environ


def never(*_: Any) -> Any:
    raise AssertionError("a finished fold is made again")


def test_a_fold_that_failed_is_trained_again_and_finished_ones_are_kept(tmp_path: Path, finished: Path) -> None:
    unbroken = run(finished)
    with pytest.raises(RuntimeError, match="died"):
        run(tmp_path / "cv", make_trainer=failing)
    assert {path.name for path in (tmp_path / "cv").iterdir()} == {".lock", "fold0", "fold0.pt", "fold1", "folds.json"}
    (tmp_path / "cv" / "fold1" / "left.txt").write_text("of the broken one")
    kept = (tmp_path / "cv" / "fold0.pt").stat().st_mtime_ns
    again = run(tmp_path / "cv")
    assert same(again, unbroken)
    assert (tmp_path / "cv" / "fold0.pt").stat().st_mtime_ns == kept
    assert not (tmp_path / "cv" / "fold1" / "left.txt").exists()
    assert same(run(tmp_path / "cv", make_module=never, make_trainer=never), unbroken)
    (tmp_path / "cv").rename(tmp_path / "moved")
    assert all(path.exists() for path in run(tmp_path / "moved", make_module=never).checkpoints)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"splitter": 4}, "folds was '3, checksum b80cf947f58be2c8', now '4, "),
        ({"splitter": StratifiedKFold(3), "targets": TARGETS}, "splitter was 'int', now 'StratifiedKFold'"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"dataset": DATA.tensors[0]}, "data set was 'TensorDataset', now 'Tensor'"),
        ({"dataset": torch.utils.data.Subset(DATA, range(40))}, "samples was 44, now 40"),
        ({"targets": TARGETS}, "targets was None"),
        ({"dataset": torch.utils.data.TensorDataset(-DATA.tensors[0], TARGETS)}, "checksum of the first batch was"),
        ({"predict": False}, "predict was True, now False"),
    ],
)
def test_other_folds_in_the_same_folder_are_refused_by_name(
    changes: dict[str, Any], named: str, finished: Path
) -> None:
    with pytest.raises(ValueError, match="has results of other settings") as refused:
        run(finished, **changes)
    assert named in str(refused.value)


@pytest.mark.parametrize("plan", ['{"seed": 0,', "[1, 2]", "3"])
def test_a_damaged_plan_is_refused(plan: str, tmp_path: Path) -> None:
    (tmp_path / "folds.json").write_text(plan)
    with pytest.raises(ValueError, match=r"folds\.json is damaged"):
        run(tmp_path)


# -- files of the user ------------------------------------------------------------------------------------------------


def test_folders_of_the_user_are_not_removed(tmp_path: Path) -> None:
    for name in ("fold0", "fold1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("a thesis")
    with pytest.raises(ValueError, match="has files of something else: choose another folder, or move fold0 away"):
        run(tmp_path, make_module=never)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["fold0", "fold1", "thesis.tex", "thesis.tex"]


def test_a_folder_that_the_user_makes_later_is_not_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="died"):
        run(tmp_path, make_trainer=failing)
    (tmp_path / "fold2").mkdir()
    (tmp_path / "fold2" / "thesis.tex").write_text("a thesis")
    with pytest.raises(
        FileExistsError, match=r"fold2 is in the way: a folder with 'thesis\.tex' that lightning_tricks"
    ):
        run(tmp_path, make_module=never)  # before the fold in which it was stopped
    assert (tmp_path / "fold2" / "thesis.tex").read_text() == "a thesis"


def test_the_folds_of_an_earlier_version_are_read(tmp_path: Path, finished: Path) -> None:
    """It has left no markers: what is finished is told by its plan."""
    shutil.copytree(finished, folder := tmp_path / "cv")
    for marker in folder.rglob(MARKER):
        marker.unlink()
    assert same(run(folder, make_module=never), run(finished))


def test_what_is_no_result_of_a_fold_is_named(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished, folder := tmp_path / "cv")
    torch.save({"w": torch.ones(2)}, folder / "fold1.pt")
    with pytest.raises(ValueError, match=r"fold1\.pt is no result of a fold\. Remove it, and fold 1 is trained again"):
        run(folder)


class Removes(Callback):
    """Removes a folder at the end of a fit; Lightning may then make it again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, *_: Any) -> None:
        shutil.rmtree(self.folder)


def test_a_folder_that_is_removed_amid_a_run_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cv"
    with pytest.raises(FileNotFoundError, match=r"cv, or the \.lock in it, was removed while it was in use"):
        run(folder, make_trainer=lambda fold, own: make_trainer(fold, own, callbacks=[Removes(folder)]))


# -- other splitters and predictions ----------------------------------------------------------------------------------


class Told(Scored):
    """Predicts what the sample is and which fold's module says so: the order is seen, and the mean."""

    def __init__(self, fold: int) -> None:
        super().__init__()
        self.fold = fold

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {"x": x, "both": (y, torch.full((len(x), 1, 2), float(self.fold)))}


def one_step(fold: int, folder: Path, **settings: Any) -> L.Trainer:
    return trainer(max_steps=1, default_root_dir=folder, **settings)


@pytest.mark.parametrize(
    ("splitter", "groups"),
    [(StratifiedKFold(3, shuffle=True), None), (GroupKFold(4), [i // 5 for i in range(44)])],
    ids=["stratified", "grouped"],
)
def test_predictions_are_in_the_order_of_the_data_set(splitter: Any, groups: Any, tmp_path: Path) -> None:
    found = run(tmp_path, splitter=splitter, targets=TARGETS, groups=groups, make_module=Told, make_trainer=one_step)
    assert torch.equal(found.predictions["x"], DATA.tensors[0])
    assert torch.equal(found.predictions["both"][0], TARGETS)
    folds = found.predictions["both"][1]
    assert folds.shape == (44, 1, 2)
    for k, fold in enumerate(found.folds):
        assert (folds[fold.validation] == k).all()
        if groups:
            assert not {groups[i] for i in fold.train} & {groups[i] for i in fold.validation}


class Number(Scored):
    """Predicts the number of its fold."""

    def __init__(self, fold: int, kind: torch.dtype = torch.float) -> None:
        super().__init__()
        self.fold, self.kind = fold, kind

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.full((len(batch[0]),), self.fold, dtype=self.kind)


def test_samples_that_are_predicted_several_times_get_the_mean(tmp_path: Path) -> None:
    splitter = RepeatedKFold(n_splits=2, n_repeats=2, random_state=1)
    found = run(tmp_path, splitter=splitter, make_module=Number, make_trainer=one_step)
    expected = [[k for k, fold in enumerate(found.folds) if sample in fold.validation] for sample in range(44)]
    assert [len(each) for each in expected] == [2] * 44
    assert found.predictions.tolist() == [sum(each) / 2 for each in expected]


def test_samples_that_are_never_predicted_are_nan(tmp_path: Path) -> None:
    splitter = TimeSeriesSplit(3)
    kind = partial(Number, kind=torch.long)
    found = run(tmp_path, splitter=splitter, make_module=kind, make_trainer=one_step)
    assert found.predictions.isnan().tolist() == [i < 11 for i in range(44)]
    assert found.predictions[11:].tolist() == [k for k in range(3) for _ in range(11)]


def test_the_mean_of_classes_is_refused(tmp_path: Path) -> None:
    splitter = ShuffleSplit(3, test_size=0.8, random_state=0)
    with pytest.raises(ValueError, match=r"of torch\.int64, and the splitter predicts a sample several times"):
        run(tmp_path, splitter=splitter, make_module=partial(Number, kind=torch.long), make_trainer=one_step)


# -- what is refused --------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(DATA.tensors[0])

    def __len__(self) -> int:
        return 44


ONCE = Scored()
NETWORK = nn.Linear(8, 2)
BATCHNORM = nn.BatchNorm1d(8, affine=False)
TRAINERS: dict[str, Any] = {}


class Wrapped(Scored):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(network)


def reused(fold: int, folder: Path) -> L.Trainer:
    return TRAINERS.setdefault(str(folder.parent), one_step(fold, folder))


def stopping() -> Any:
    stop = EarlyStopping("accuracy")
    return lambda fold, folder: trainer(max_epochs=1, callbacks=[stop])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"make_module": lambda fold: ONCE}, "got the module Scored of another fit again"),
        ({"make_module": lambda fold: Wrapped(NETWORK)}, r"got the parameter layers\.0\.weight of another fit again"),
        (
            {"make_module": lambda fold: Wrapped(nn.Sequential(BATCHNORM, nn.Linear(8, 2)))},
            "got the buffer layers.0.0.running_mean of another fit again",
        ),
        ({"make_trainer": reused}, "got one that was used before"),
        ({"make_trainer": stopping()}, "got the EarlyStopping of another fit again"),
        ({"make_trainer": partial(one_step, limit_val_batches=0)}, "limit_val_batches=0"),
        ({"make_trainer": partial(one_step, limit_predict_batches=2)}, "limit_predict_batches=2"),
        ({"make_module": lambda fold: L.LightningModule()}, "needs a module with validation_step"),
    ],
)
def test_what_would_leak_from_fold_to_fold_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        run(tmp_path, **{"make_trainer": one_step, **changes})
    assert not (tmp_path / "fold1.pt").exists()


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"loader": lambda s, train: DataLoader(s, 8, shuffle=True)}, ValueError, "once, in their order"),
        ({"loader": lambda s, train: DataLoader(s, 8, drop_last=True)}, ValueError, "15 samples of its subset once"),
        ({"loader": lambda s, train: DataLoader(DATA if train else s, 8)}, ValueError, "has 29 samples, got one of 44"),
        ({"loader": lambda s, train: DataLoader(s if train else DATA, 8)}, ValueError, "of 44"),
        ({"loader": lambda s, train: [1]}, ValueError, "got list"),
        ({"splitter": "kfold"}, TypeError, "splitter must be an int or have a method split, .* got 'kfold'"),
        ({"splitter": 1}, ValueError, "splitter must be at least 2, got 1"),
        ({"splitter": 45}, ValueError, "splitter=45 folds need as many samples, got 44"),
        ({"splitter": ShuffleSplit(1)}, ValueError, "at least 2 folds, got 1"),
        ({"groups": range(44)}, ValueError, "splitter=3 ignores groups"),
        ({"loader": 0}, TypeError, "loader must be None or a function that makes a DataLoader, got 0"),
        ({"targets": 0.5}, TypeError, "targets must have one entry per sample, got 0.5"),
        ({"targets": [0, 1]}, ValueError, "targets must have one entry per sample, got 2 for 44"),
        ({"dataset": Stream()}, TypeError, "needs __len__ and __getitem__, .* got Stream"),
        ({"make_module": lambda fold: nn.Linear(8, 2)}, TypeError, "make_module returns must be LightningModule"),
        ({"make_trainer": lambda fold, folder: None}, TypeError, "make_trainer returns must be Trainer"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 2**32}, ValueError, r"seed must be in \[0, 4294967295\], got 4294967296"),
        ({"predict": 1}, TypeError, "predict must be True or False"),
        ({"workers": 2}, TypeError, "workers=2 needs make_module, .* that pickle, got "),
    ],
)
def test_wrong_arguments_are_refused_before_the_first_step(
    changes: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    def refused(fold: int, folder: Path) -> L.Trainer:
        return make_trainer(fold, folder, callbacks=[Fails(1)])

    with pytest.raises(kind, match=message):
        run(tmp_path, **{"make_trainer": refused, **changes})
    assert not (tmp_path / "fold0.pt").exists()


@pytest.mark.parametrize(("folder", "kind"), [("a\0", ValueError), (1, TypeError)])
def test_what_is_no_folder_is_named(folder: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="folder must be "):
        run(folder)


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        (lambda x: x.sum(), ValueError, r"output must have one entry per sample, all of one shape, got \(\) for a"),
        (lambda x: {"a": x[:1]}, ValueError, r"output\['a'\] must have one entry per sample"),
        (lambda x: x[:, : len(x)], ValueError, r"got \(7, 7\) for a batch of 7, beside \(8, 8\) for one of 8"),
        (lambda x: (x, "name"), TypeError, r"output\[1\] must be a tensor, or .* got str"),
        (lambda x: x if len(x) == 8 else (x,), TypeError | ValueError, "output must"),
        (lambda x: None, TypeError, "got NoneType"),
    ],
)
@pytest.mark.filterwarnings("ignore:predict returned None")
def test_predictions_that_cannot_be_put_together_are_refused(
    output: Any, kind: Any, message: str, tmp_path: Path
) -> None:
    class Strange(Scored):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return output(batch[0])

    with pytest.raises(kind if isinstance(kind, type) else (TypeError, ValueError), match=message):
        run(tmp_path, make_module=lambda fold: Strange(), make_trainer=one_step)


def test_a_module_that_cannot_predict_is_refused_before_the_first_step(tmp_path: Path, finished: Path) -> None:
    class NoStep(Scored):
        predict_step = L.LightningModule.predict_step  # forward gets the pair

    def refused(fold: int, folder: Path) -> L.Trainer:
        return make_trainer(fold, folder, callbacks=[Fails(1)])

    with pytest.raises(MisconfigurationException, match=r"got the default, .* define predict_step"):
        run(tmp_path, make_module=lambda fold: NoStep(), make_trainer=refused)

    class TakesPair(NoStep):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(batch[0] if isinstance(batch, list) else batch)

    tried = run(tmp_path / "tried", make_module=lambda fold: TakesPair())
    assert same(tried, run(finished))  # the trial leaves no trace
    half = partial(one_step, precision="bf16-true")
    assert run(tmp_path / "half", make_module=lambda fold: TakesPair(), make_trainer=half).predictions.isfinite().all()


def test_a_batch_that_is_random_does_not_tell_data_sets_apart(tmp_path: Path) -> None:
    class Noisy(torch.utils.data.TensorDataset):
        numbers = random.SystemRandom()

        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + self.numbers.random(), y

    for _ in range(2):
        run(tmp_path, dataset=Noisy(*DATA.tensors), make_trainer=one_step, predict=False)


# -- the result -------------------------------------------------------------------------------------------------------


def test_the_result_as_text_picture_and_json(tmp_path: Path) -> None:
    rows = [{"loss": 0.5, "rare": 1.0}, {"loss": 0.7}, {"loss": 0.6, "rare": 2.0}]
    folds = [lt.evaluation.folds.Fold([0, 1], [2])] * 3
    result = CrossValidation(rows, None, [[tmp_path / "a.ckpt"]], folds)
    assert str(result).startswith("3 folds: loss 0.6 ± 0.1 (95%: ")
    half = result.intervals["loss"].high - 0.6
    assert half == pytest.approx(4.3027 * 0.1 * (1 / 3 + 1 / 2) ** 0.5, rel=1e-4)
    assert "0.7" in result.table()
    assert "nan" in result.table()
    result.to_json(tmp_path / "cv.json")
    plain = json.loads((tmp_path / "cv.json").read_text())
    assert plain["metrics"][1] == {"loss": 0.7}
    assert plain["intervals"]["loss"]["std"] == pytest.approx(0.1)
    assert plain["intervals"]["rare"]["mean"] is None
    figure, axes = result.plot("loss")
    assert axes.lines[0].get_ydata().tolist() == [0.5, 0.7, 0.6]
    assert result.plot(ax=axes)[0] is figure
    with pytest.raises(ValueError, match="metric must be one of loss, rare, got 'los'"):
        result.plot("los")


# -- with tricks ------------------------------------------------------------------------------------------------------


class Sharp(lt.SAMMixin, Scored):
    sam = lt.SAM(rho=0.05)


def tricked(*tricks: Callable[[], Callback], **settings: Any) -> Any:
    """A function that makes a Trainer with these callbacks."""
    return lambda fold, folder: make_trainer(fold, folder, callbacks=[make() for make in tricks], **settings)


EMA = partial(lt.EMA, decay=0.5)


@pytest.mark.parametrize(
    "trainers", [tricked(EMA), lambda fold, folder: trainer(callbacks=[EMA()])], ids=["best", "last"]
)
def test_with_ema_the_averages_are_validated_predicted_and_saved(trainers: Any, tmp_path: Path, finished: Path) -> None:
    found = run(tmp_path, make_trainer=trainers)
    assert found.predictions.shape == (44, 2)
    for k, fold in enumerate(found.folds):
        module = make_module(k)
        state = torch.load(found.checkpoints[k], weights_only=True)
        module.load_state_dict(state["state_dict"])
        with torch.no_grad():
            logits = module.eval()(DATA.tensors[0][fold.validation])
        torch.testing.assert_close(found.predictions[fold.validation], logits)
        accuracy = (logits.argmax(-1) == TARGETS[fold.validation]).float().mean().item()
        assert found.metrics[k]["accuracy"] == pytest.approx(accuracy)
    assert not same(found, run(finished))


def test_with_sam(tmp_path: Path, finished: Path) -> None:
    found = run(tmp_path / "sam", make_module=lambda fold: Sharp())
    assert not same(found, run(finished))
    L.seed_everything(0, workers=True, verbose=False)
    module, alone = Sharp(), make_trainer(0, tmp_path / "hand")
    train, validation = (torch.utils.data.Subset(DATA, part) for part in found.folds[0])
    alone.fit(module, make_loader(train, True), make_loader(validation, False))
    best = alone.checkpoint_callback.best_model_path
    (row,) = alone.validate(module, make_loader(validation, False), ckpt_path=best, verbose=False, weights_only=False)
    assert row == found.metrics[0]


@pytest.mark.slow  # peft's import
def test_with_lora(tmp_path: Path, finished: Path) -> None:
    found = run(tmp_path, make_trainer=tricked(partial(lt.LoRA, r"layers\.0", r=2, train=r"layers\.[14]")))
    assert found.predictions.shape == (44, 2)
    assert any("lora" in name for name in torch.load(found.checkpoints[0], weights_only=True)["state_dict"])
    assert not torch.equal(found.predictions, run(finished).predictions)


def test_with_a_preset(tmp_path: Path, finished: Path) -> None:
    found = run(tmp_path, make_trainer=tricked(strategy="single_bf16"))
    assert found.predictions.shape == (44, 2)
    assert found.metrics != run(finished).metrics


def test_workers_inside_of_torchrun_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(MisconfigurationException, match="workers=2 starts processes itself"):
        run(tmp_path, workers=2)
