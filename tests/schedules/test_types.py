"""What a type checker knows of the factories in a module of the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_tricks

USER = """
import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler

import lightning_tricks as lt


class Cosine(L.LightningModule):
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return lt.cosine(torch.optim.AdamW(self.parameters(), 1e-3), self, warmup=0.1)


class Tail(L.LightningModule):
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return lt.swa_tail(lt.wsd(torch.optim.AdamW(self.parameters(), 1e-3), self), swa_lr=1e-4)


class Plateau(L.LightningModule):
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return lt.reduce_on_plateau(torch.optim.AdamW(self.parameters(), 1e-3), self, monitor="val_loss")
"""


@pytest.mark.slow
def test_what_a_factory_returns_is_what_configure_optimizers_returns(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent", "user.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(Path(lightning_tricks.__file__).parents[1])},
    )
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr
