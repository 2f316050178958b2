"""A fit that is resumed at the end of an epoch sees the samples that an unbroken one sees."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import lightning_tricks as lt
from tests.nets import PlainNet, assert_equal, build, fit, trainer, weights

EPOCHS = {"max_epochs": 4}
STEPS = {"max_epochs": -1, "max_steps": 12}


class Notes(L.LightningModule):
    """Notes the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(batch.flatten().int().tolist())
        return self.layer(batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(workers: int, validates: bool, ckpt_path: Path | None = None, **settings: Any) -> list[list[int]]:
    numbers, module = torch.arange(6.0)[:, None], Notes()
    order: Any = DistributedSampler(numbers, 1, 0, seed=0)  # type: ignore[arg-type]
    train: Any = DataLoader(numbers, 2, sampler=order, num_workers=workers)  # type: ignore[arg-type]
    val: Any = DataLoader(numbers, 3)  # type: ignore[arg-type]
    batches = {} if validates else {"limit_val_batches": 0}
    trainer(**batches, **settings).fit(module, train, val, ckpt_path=ckpt_path)
    return module.seen


def saving(folder: Path) -> dict[str, Any]:
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_train_epoch_end=True)
    return {"enable_checkpointing": True, "callbacks": [save]}


def presets(folder: Path) -> dict[str, dict[str, Any]]:
    return {"preset": {"strategy": "single_bf16"}, "Preemption": {"callbacks": [lt.Preemption(folder)]}}


@pytest.mark.few(2)
@pytest.mark.parametrize("by", ["preset", "Preemption"])
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(
    ("limit", "workers"),
    [
        (EPOCHS, 1),
        (STEPS, 0),
        *(pytest.param(each, n, marks=pytest.mark.slow) for each, n in ((EPOCHS, 0), (STEPS, 1))),
    ],
)
def test_the_next_epoch_is_that_of_an_unbroken_fit(
    limit: dict[str, int], workers: int, validates: bool, by: str, tmp_path: Path
) -> None:
    whole = seen(workers, validates, **limit, **saving(tmp_path))
    assert len(whole) == 12
    assert len({str(whole[3 * epoch : 3 * epoch + 3]) for epoch in range(4)}) == 4
    for step in (3, 6, 9):
        again = seen(workers, validates, tmp_path / f"step={step}.ckpt", **limit, **presets(tmp_path)[by])
        assert again == whole[step:]


@pytest.mark.parametrize("limit", [EPOCHS, STEPS], ids=str)
@pytest.mark.parametrize("by", ["preset", "Preemption"])
def test_a_checkpoint_of_an_epochs_beginning_is_one_of_the_end_before(
    by: str, limit: dict[str, int], tmp_path: Path
) -> None:
    save: Any = LambdaCallback(on_train_epoch_start=lambda run, _: run.save_checkpoint(tmp_path / f"{run.global_step}"))
    whole = seen(0, True, **limit, callbacks=[save])
    for step in (0, 3, 9):
        assert seen(0, True, tmp_path / str(step), **limit, **presets(tmp_path)[by]) == whole[step:]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("steps", [6, 7])
def test_more_steps_after_the_last_one(steps: int, tmp_path: Path) -> None:
    """At the end of an epoch those of a longer fit, and within one those that Lightning takes."""
    path = tmp_path / "last.ckpt"
    save: Any = LambdaCallback(on_fit_end=lambda trainer, _: trainer.save_checkpoint(path))
    seen(0, False, max_epochs=-1, max_steps=steps, callbacks=[save])
    rest = seen(0, False, path, **STEPS, strategy="single_bf16")
    assert rest == (seen(0, False, **STEPS)[6:] if steps == 6 else seen(0, False, path, **STEPS))


@pytest.mark.parametrize(("limit", "workers"), [(EPOCHS, 1), (STEPS, 0)])
def test_lightning_alone_does_otherwise(limit: dict[str, int], workers: int, tmp_path: Path) -> None:
    """Where this fails Lightning has been mended, and ``begin_epoch`` with its ``_Loop`` can go."""
    whole = seen(workers, False, **limit, **saving(tmp_path))
    assert seen(workers, False, tmp_path / "step=6.ckpt", **limit) != whole[6:]


def test_a_users_callback_may_restore_the_loop_amid_an_epoch() -> None:
    states: list[Any] = []

    def go_back(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4 and not states:
            states.append(copy.deepcopy(trainer.fit_loop.state_dict()))
        elif trainer.global_step == 5 and len(states) == 1:
            states.append(trainer.fit_loop.load_state_dict(states[0]))

    callbacks = [lt.EMA(0.9), LambdaCallback(on_train_batch_end=go_back)]
    run = trainer(callbacks=callbacks, max_epochs=3)
    numbers: Any = torch.arange(6.0)[:, None]
    run.fit(module := Notes(), DataLoader(numbers, 2), DataLoader(numbers, 3))
    assert (len(states), len(module.seen), run.current_epoch) == (2, 9, 3)


@pytest.mark.parametrize("trick", [partial(lt.EMA, at_end="raw"), lt.SkipNonFinite])
def test_a_module_that_counts_its_steps_goes_on_with_the_random_numbers_of_lightnings_own_resume(
    trick: Any, tmp_path: Path
) -> None:
    class Counts(PlainNet):
        """Has its loaders made before the checkpoint is restored, and draws random numbers in its steps."""

        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches > 0
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return F.cross_entropy(self(F.dropout(x)), y)

    fit(build(Counts), max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    ends = []
    for callbacks in ([], [trick()]):
        module = build(Counts)
        fit(module, callbacks=callbacks, max_epochs=3, ckpt_path=tmp_path / "x.ckpt")
        ends.append(weights(module))
    assert_equal(*ends)
