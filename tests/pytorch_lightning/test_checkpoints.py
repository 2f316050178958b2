"""A checkpoint of either namespace goes on in the other, to the same weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_tricks
import pytorch_lightning_tricks
from tests.nets import assert_equal, loader, quiet, weights

LIGHTNING = {lightning_tricks: "lightning.pytorch", pytorch_lightning_tricks: "pytorch_lightning"}


def trained(lt: ModuleType, folder: Path, ckpt_path: Path | None = None) -> dict[str, Tensor]:
    """The end weights of two epochs with tricks that keep a state; checkpoints of both go to the folder."""
    pl: Any = importlib.import_module(LIGHTNING[lt])

    class Net(lt.SAMMixin, pl.LightningModule):
        sam = lt.SAM(rho=0.1)

        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
            return lt.cosine(optimizer, self, warmup=2)

    pl.seed_everything(3, verbose=False)
    module, callbacks = Net(), [lt.EMA(0.9), lt.AutoClip(10), lt.GradualUnfreeze([3], parameters=[r"^layers\.0"])]
    callbacks.append(pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1))
    run = pl.Trainer(**{**quiet, "enable_checkpointing": True}, callbacks=callbacks)
    run.fit(module, loader(), ckpt_path=ckpt_path)
    return weights(module)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("lt", LIGHTNING, ids=lambda lt: lt.__name__)
def test_a_checkpoint_goes_on_in_the_other_namespace(lt: ModuleType, tmp_path: Path) -> None:
    (other,) = set(LIGHTNING) - {lt}
    whole = trained(lt, tmp_path)
    assert_equal(trained(other, tmp_path / "other"), whole)
    assert_equal(trained(other, tmp_path, tmp_path / "epoch=0.ckpt"), whole)
