"""A checkpoint of FSDP2 makes torch step an optimizer without states, with zero gradients; no trick may count it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_tricks as lt
from tests.nets import PlainNet, SteppedByHand, assert_equal, build, fit, rank_loader, weights
from tests.ranks import run_cases


class Plain(PlainNet):
    """SGD without momentum keeps no states."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Scheduled(PlainNet):
    """The learning rate follows the steps of the optimizer."""

    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.SGD(self.parameters(), lr=self.lr), self, warmup=2)


class Flat(lt.SAMMixin, Plain):
    """SAM checks who steps."""

    sam = lt.SAM(rho=0.1)


class Manual(SteppedByHand, Plain):
    """Steps by itself."""


TRICKS: dict[str, Any] = {
    "EMA": (Plain, partial(lt.EMA, decay=0.8)),
    "SWA": (Plain, partial(lt.SWA, start=0.3)),
    "SkipNonFinite": (Plain, lt.SkipNonFinite),
    "TerminateOnNonFinite": (Plain, lt.TerminateOnNonFinite),
    "RewindOnSpike": (Plain, lt.RewindOnSpike),
    "AutoClip": (Plain, lt.AutoClip),
    "LRSchedule": (Plain, partial(lt.LRSchedule, "cosine")),
    "InspectTraining": (Plain, partial(lt.InspectTraining, "pictures", every_n_steps=1, steps=1)),
    "cosine": (Scheduled, None),
    "SAMMixin": (Flat, None),
    "EMA, manual": (Manual, partial(lt.EMA, decay=0.8)),
    "SAMCallback": (Plain, partial(lt.SAMCallback, rho=0.1)),
    "plain": (Plain, None),
}


def fits(name: str, folder: Path) -> None:
    """With a checkpoint after each validation, before which Lightning clears the gradients, and with none."""
    kind, trick = TRICKS[name]
    found = []
    for save in (False, True):
        saves = ModelCheckpoint(folder / name, save_top_k=-1, save_on_train_epoch_end=False)
        callbacks = [*([trick()] if trick else []), *([saves] if save else [])]
        module = build(kind)
        settings = {
            "max_epochs": 2,
            "accumulate_grad_batches": 1 if kind is Manual else 2,
            "val_check_interval": 1,
            "enable_checkpointing": save,
        }
        fit(module, train=rank_loader(), strategy=lt.FSDP2Preset(), devices=2, callbacks=callbacks, **settings)
        found.append(weights(module))
        assert not save or [*(folder / name).iterdir()]
    assert_equal(*found)


QUICK = ("EMA", "SkipNonFinite")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in TRICKS if name not in QUICK)]
)
def test_saving_changes_no_weight(name: str, runs: Any) -> None:
    runs[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, selected: Any) -> Any:
    return run_cases(fits, selected("name"), tmp_path_factory.mktemp("saved"))
