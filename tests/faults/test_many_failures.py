"""One run that fails over and over, anywhere, and goes on from its newest checkpoint ends as one that never failed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from lightning_tricks.checkpoints.newest import newest_checkpoint
from tests.faults.runs import Scheduled, differences, load, state
from tests.nets import build, data, fit, weights

HOOKS = (
    *("setup", "on_fit_start", "on_sanity_check_end", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end", "on_save_checkpoint", "on_load_checkpoint"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end"),
)


pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about what is in the folder


class Planned(Exception):
    """A failure."""


class Failures:
    """Lets one call in so many fail, at a place that is drawn."""

    def __init__(self, seed: int) -> None:
        self.rng, self.places = random.Random(seed), Counter[str]()
        self.left, self.active = 0, True

    def begin(self) -> None:
        self.left = int(self.rng.expovariate(1 / 60)) + 1

    def at(self, place: str) -> None:
        self.left -= self.active
        if not self.left and self.active:
            self.places[place] += 1
            raise Planned(place)


class Noisy(Dataset[Any]):
    """Samples with noise, which random numbers of the process make."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        self.fail("a sample")
        x, y = data()[index]
        return x + 0.1 * torch.randn(8), y


class Fragile(Scheduled):
    """Its network has dropout; its step, its optimizer and its checkpoints may fail in their midst."""

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self.layers.append(nn.Dropout(0.2))
        self.failures = failures

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.failures.at("a training step")
        return F.cross_entropy(z, batch[1])

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        optimizer = found["optimizer"] if isinstance(found, dict) else found[0][0]
        optimizer.register_step_post_hook(lambda *_: self.failures.at("behind a step of the optimizer"))
        return found


class Hooks(Callback):
    """May fail in any hook."""

    def __init__(self, failures: Failures) -> None:
        for hook in HOOKS:
            setattr(self, hook, lambda *_, name=hook, **__: failures.at(name))


class Torn(ModelCheckpoint):
    """A machine may go amid the writing of a file: half of it is there."""

    def __init__(self, failures: Failures, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures = failures

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        try:
            self.failures.at("the writing of a file")
        except Planned:
            whole = Path(filepath).read_bytes()
            Path(filepath).write_bytes(whole[: len(whole) // 2])
            raise


def life(folder: Path, failures: Failures, epochs: int) -> Any:
    callbacks = [
        lt.ExactResume(),
        lt.EMA(0.9, every_n_steps=2),
        lt.Mixup(0.4, prob=0.5),
        lt.AutoClip(history=16),
        Hooks(failures),
        Torn(failures, folder, "{step}", monitor="step", mode="max", save_top_k=3, every_n_train_steps=1),
    ]
    module = build(Fragile, failures=failures)
    # Behind a function: ExactResume would restore the generator of an object that the data set holds.
    train = DataLoader(Noisy(lambda place: failures.at(place)), 8, shuffle=True)
    settings = {"max_epochs": epochs, "callbacks": callbacks, "enable_checkpointing": True, "num_sanity_val_steps": 1}
    run = fit(module, train=train, ckpt_path=newest_checkpoint(folder), **settings)
    failures.active = False
    run.save_checkpoint(folder / "final.ckpt")
    return weights(module), state(load(folder / "final.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "epochs"), [(20, 10), pytest.param(2000, 1000, marks=pytest.mark.slow)])
def test_a_run_that_fails_over_and_over_ends_as_one_that_does_not(count: int, epochs: int, tmp_path: Path) -> None:
    never = Failures(0)
    never.active = False
    whole = life(tmp_path / "whole", never, epochs)
    failures = Failures(1)
    while True:
        failures.begin()
        try:
            ended = life(tmp_path / "failed", failures, epochs)
        except Planned:
            continue
        break
    assert failures.places.total() >= count
    assert count < 1000 or failures.places.keys() >= {*HOOKS} - {"on_sanity_check_end"}  # a new run has one
    assert differences(ended, whole) == []
