"""Tricks that leave training alone until something happens, and what is done with a whole fit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import Subset

from tests.clients.base import QUIET, Base, Fit, State, Weights, assert_equal, trick
from tests.clients.recast import poisoned
from tests.reference.averages import NaiveEMA

# How each is made, what is given to the Trainer with it, and what it has to show for it.
NEUTRAL: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Callable[[Fit], bool]]] = {
    "Doctor": (lambda lt: lt.Doctor(), {}, lambda run: True),
    "DataWait": (lambda lt: lt.DataWait(), {}, lambda run: 0 < run.trainer.callback_metrics["tricks/data_wait"] < 1),
    "InspectTraining": (
        lambda lt: lt.InspectTraining("pictures", every_n_steps=100, steps=2),
        {},
        lambda run: any(Path("pictures").iterdir()),
    ),
    "Throughput": (
        lambda lt: lt.Throughput(),
        {"log_every_n_steps": 1},
        lambda run: run.trainer.callback_metrics["tricks/samples_per_second"] > 0,
    ),
}


class OfFits(Base):
    def test_the_project_alone_does_the_same_twice(self) -> None:
        """Without which no oracle says anything."""
        self.assert_plain(self.fit())

    @pytest.mark.parametrize("name", [pytest.param(name, marks=trick(name)) for name in NEUTRAL])
    def test_what_only_looks_on_changes_nothing(self, name: str) -> None:
        make, settings, shows = NEUTRAL[name]
        self.refuses(make(self.lt))
        run = self.fit(make(self.lt), **settings)
        self.assert_plain(run)
        assert shows(run)

    @trick("SkipNonFinite")
    def test_skip_non_finite(self) -> None:
        self.refuses(self.lt.SkipNonFinite())
        self.assert_plain(self.fit(self.lt.SkipNonFinite()))
        run = self.fit(self.lt.SkipNonFinite(), kind=poisoned(2))
        assert_equal(run.watch.weights[2], run.watch.weights[1])
        self._goes_on(run, 3)

    @trick("RewindOnSpike")
    def test_rewind_on_spike(self) -> None:
        """The fourth batch is bad: everything is that of the last step whose number two divides."""
        self.refuses(self.lt.RewindOnSpike(every_n_steps=2))
        self.assert_plain(self.fit(self.lt.RewindOnSpike(every_n_steps=2)))
        rewind = self.lt.RewindOnSpike(every_n_steps=2)
        run = self.fit(rewind, kind=poisoned(3))
        assert rewind.rewinds == 1
        assert_equal(run.watch.weights[3], run.watch.weights[1])
        self._goes_on(run, 4)

    def _goes_on(self, run: Fit, batch: int) -> None:
        before, after = run.watch.weights[batch - 1 : batch + 1]
        assert any((after[name] != weight).any() for name, weight in before.items())
        assert all(weight.isfinite().all() for weight in run.watch.weights[-1].values())

    @trick("TerminateOnNonFinite")
    def test_terminate_on_non_finite(self) -> None:
        """The third batch is bad: the state before it is saved, and nothing of it reaches the weights."""
        self.refuses(self.lt.TerminateOnNonFinite())
        self.assert_plain(self.fit(self.lt.TerminateOnNonFinite()))
        watch, told = Weights(), f"TerminateOnNonFinite has stopped training after step {2 * self.steps},"
        with pytest.raises(FloatingPointError, match=told):
            self.fit(self.lt.TerminateOnNonFinite("kept"), kind=poisoned(2), watch=watch)
        assert_equal(watch.at_error, self.plain().watch.weights[1])
        (folder,) = Path("kept").iterdir()
        states = States()
        self.fit(states)
        before = states.all[1]
        saved = torch.load(folder / "last_good.ckpt", weights_only=False)["state_dict"]
        assert_equal({name: saved[name] for name in before}, before)
        assert (folder / "batch-rank=0.pt").exists()

    @trick("Preemption")
    def test_preemption(self) -> None:
        """A signal in the third batch ends the fit behind it, and a fit goes on as one that nothing disturbs."""
        self.refuses(self.lt.Preemption("saved"))
        self.assert_plain(self.fit(self.lt.Preemption("saved")))

        class Signals(Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if trainer.fit_loop.total_batch_idx == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

        watch = Weights()
        with pytest.raises(SystemExit) as ended:
            self.fit(self.lt.Preemption("saved"), Signals(), watch=watch)
        assert ended.value.code == 128 + signal.SIGTERM
        assert len(watch.weights) == 3
        assert_equal(watch.weights[2], self.plain().watch.weights[2])
        (path,) = Path("saved").iterdir()
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert_equal({name: saved[name] for name in watch.weights[2]}, watch.weights[2])
        if "resume" not in self.none:
            resumed = self.fit(self.lt.Preemption("saved"), ckpt_path="newest")
            assert_equal(resumed.watch.weights[-1], self.plain().watch.weights[-1])

    @trick("single_bf16")
    def test_a_preset_is_its_precision(self) -> None:
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")
        preset, plain = self.fit(strategy="single_bf16", **self.preset), self.fit(precision="bf16-mixed")
        assert_equal(preset.end(), plain.end())

    @trick("find_lr")
    def test_find_lr_leaves_everything_as_it_was(self) -> None:
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")

        def sweep(module: Any) -> None:
            trainer, (train, _) = self.pl.Trainer(**QUIET), self.loaders()
            found = self.lt.find_lr(trainer, module, train, steps=10)
            assert len(found.losses) >= 2

        self.assert_plain(self.fit(change=sweep))

    @trick("cross_validate")
    def test_cross_validate(self, tmp_path: Path) -> None:
        """Each fold is a fit of a new module with the fold's own seed."""
        if not self.folds:
            pytest.skip("none: its loaders need more than a part of a data set")
        loader = self.loaders()[0]

        def make_loader(part: Any, train: bool) -> Any:
            return type(loader)(part, batch_size=loader.batch_size)

        def make_trainer(fold: int, folder: Path) -> Any:
            return self.pl.Trainer(**QUIET, default_root_dir=folder)

        found = self.lt.cross_validate(
            lambda fold: self.module(),
            loader.dataset,
            make_trainer,
            splitter=2,
            loader=make_loader,
            folder=tmp_path,
            predict=False,
        )
        taken = sorted(place for fold in found.folds for place in fold.validation)
        assert taken == list(range(len(loader.dataset)))
        for number, (metrics, fold) in enumerate(zip(found.metrics, found.folds, strict=True)):
            assert sorted([*fold.train, *fold.validation]) == taken
            self.pl.seed_everything(number, verbose=False)
            module, trainer = self.module(), make_trainer(number, tmp_path)
            train, validation = (
                make_loader(Subset(loader.dataset, part), True) for part in (fold.train, fold.validation)
            )
            trainer.fit(module, train, validation)
            assert trainer.validate(module, validation, verbose=False)[0][self.monitor] == metrics[self.monitor]

    @trick("callbacks")
    def test_callbacks_of_the_project_stay_alive(self, tmp_path: Path) -> None:
        """Early stopping ends the fit, and the checkpoint has the averaged weights that were validated."""
        callbacks = self.pl.callbacks
        stop = callbacks.EarlyStopping(self.monitor, patience=1, min_delta=1e9)
        save = callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last", save_top_k=-1)
        naive = NaiveEMA(0.9)
        ours = [self.lt.EMA(0.9, warmup=False), self.lt.SkipNonFinite(), self.lt.Doctor()]
        run = self.fit(*ours, naive, stop, save, max_epochs=6, enable_checkpointing=True)
        assert run.trainer.current_epoch == 2
        assert {stop, save} <= set(run.trainer.callbacks)
        (path, *_) = sorted(tmp_path.glob("*.ckpt"), key=lambda each: each.stat().st_mtime, reverse=True)
        naive.assert_equals(torch.load(path, weights_only=False)["state_dict"])

    @trick("resume")
    def test_a_resumed_fit_is_the_projects_own_resume(self, tmp_path: Path) -> None:
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")
        ends = []
        for number, own in enumerate(([], [self.lt.EMA(0.9, warmup=False), self.lt.SkipNonFinite()])):
            folder = tmp_path / str(number)
            naive = Resumed(0.9)
            save = self.pl.callbacks.ModelCheckpoint(dirpath=folder, filename="half", save_weights_only=False)
            self.fit(naive, *own, save, max_epochs=1, enable_checkpointing=True)
            (path,) = folder.glob("*.ckpt")
            again = [type(each)(0.9, warmup=False) if isinstance(each, self.lt.EMA) else type(each)() for each in own]
            naive = Resumed(0.9)
            ends.append((self.fit(naive, *again, ckpt_path=path), naive))
        (plain, reference), (tricked, _) = ends
        assert_equal(plain.watch.weights[-1], tricked.watch.weights[-1])
        reference.assert_equals(tricked.module.state_dict())


class States(Callback):
    """Weights and buffers behind each batch."""

    def __init__(self) -> None:
        self.all: list[State] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        tensors = {name: value for name, value in pl_module.state_dict().items() if isinstance(value, torch.Tensor)}
        self.all.append({name: tensor.detach().clone() for name, tensor in tensors.items()})


class Resumed(NaiveEMA):
    """The independent average, which goes on after a resume."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "updates": self.updates, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        vars(self).update(getattr(self, "kept", {}))
