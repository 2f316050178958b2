"""A run that goes on from a checkpoint ends as the run that was not interrupted, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from tests.conformance.runs import run
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.trick import Enrolment
from tests.few import slow
from tests.nets import assert_equal, data

EPOCHS = 3
MIDDLE, END = 9, 12  # optimizer steps, of which an epoch has six


class Resumable(DataLoader[tuple[Tensor, ...]]):
    """Goes on where it was, by the interface that Lightning asks for; any other one begins its epoch again.

    It counts what it has handed out, of which Lightning has fetched one batch ahead at most.
    """

    def __init__(self, samples: Dataset[tuple[Tensor, ...]], batch_size: int = 8) -> None:
        super().__init__(samples, batch_size)
        self.given = self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.begin = self.begin, 0
        self.given = begin
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.given = number + 1
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given % len(self)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.begin = state_dict["given"]


def resumable(trick: Enrolment, samples: Dataset[tuple[Tensor, ...]], batch_size: int = 8) -> DataLoader[Any]:
    """A loader with which a fit with the trick goes on amid an epoch."""
    return (DataLoader if trick.by_numbers else Resumable)(samples, batch_size)


def resumed(trick: Enrolment, folder: Any) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The end weights of a run without a checkpoint, after one that must equal it, and of runs from its checkpoints."""

    def checkpoints(every: int) -> ModelCheckpoint:
        where = {"dirpath": folder, "filename": f"{every}-{{step}}", "enable_version_counter": False}
        return ModelCheckpoint(**where, every_n_train_steps=every, save_top_k=-1)

    def end(**settings: Any) -> dict[str, Tensor]:
        return run(trick, train=resumable(trick, data()), max_epochs=EPOCHS, **settings)

    whole = end()
    assert_equal(end(callbacks=[checkpoints(MIDDLE), checkpoints(END)], enable_checkpointing=True), whole)
    return whole, [end(ckpt_path=folder / f"{step}-step={step}.ckpt") for step in (MIDDLE, END)]


NAMES = [slow(case) if case.values[0] == "Compile" else case for case in every_third(0)]


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [case for case in NAMES if case.values[0] != "reduce_on_plateau"])
def test_a_resumed_run_is_bit_equal(name: str, tmp_path: Any, cell: Callable[..., None]) -> None:
    whole, ends = resumed(SETTINGS[name], tmp_path)
    for end in ends:
        assert_equal(end, whole)
    cell(name, "resume")


def test_a_plateau_is_resumed_as_lightning_resumes_that_of_torch(tmp_path: Any, cell: Callable[..., None]) -> None:
    """Lightning keeps the metric of the epoch that a run is resumed in from every such scheduler."""
    settings = {"factor": 0.5, "patience": 0, "threshold": 0.9}

    def stock(optimizer: Any, module: Any) -> Any:
        scheduler = ReduceLROnPlateau(optimizer, **settings)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    ours, theirs = (
        resumed(Enrolment(schedule={"on": factory}), tmp_path / name)
        for name, factory in {"ours": partial(lt.reduce_on_plateau, **settings), "theirs": stock}.items()
    )
    assert_equal(ours[0], theirs[0])
    for our, their in zip(ours[1], theirs[1], strict=True):
        assert_equal(our, their)
    why = "as torch's scheduler: Lightning leaves out the metric of the epoch that a run is resumed in"
    cell("reduce_on_plateau", "resume", "right", why)
