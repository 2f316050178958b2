"""What a type checker knows of ``pytorch_lightning_tricks``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytorch_lightning_tricks.loader import SOURCE

USER = """
import pytorch_lightning as pl
import pytorch_lightning_tricks as lt
import torch
from pytorch_lightning_tricks.schedules import LRFinderResult
from pytorch_lightning.utilities.types import OptimizerLRScheduler

class Net(lt.SAMMixin, pl.LightningModule):
    sam = lt.SAM(rho=0.05)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        lt.optimizer_steps(self.trainer)
        return lt.cosine(torch.optim.SGD(self.parameters(), lr=0.1), self, warmup=0.1)

ema = lt.EMA(decay=0.9)
trainer = pl.Trainer(callbacks=[ema, lt.Mixup(alpha=0.2)], strategy=lt.DDPPreset(find_unused_parameters=True))
result: LRFinderResult = lt.find_lr(trainer, Net())
reveal_type(ema)
reveal_type(ema.decay)
reveal_type(lt.functional.mixup)
"""
WRONG = """
lt.EMA(decay="no")
lt.EMO()
lt.optimizer_steps(3)
"""


@pytest.mark.slow
def test_mypy_knows_the_names_and_the_classes_that_they_are_of(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SOURCE.parent / ".ci/stubs.py", tmp_path / "pytorch_lightning_tricks"], check=True)
    shutil.copy(SOURCE / "py.typed", tmp_path / "pytorch_lightning_tricks")
    (tmp_path / "user.py").write_text(USER + WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "user.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    found = [re.sub(r"^user.py:\d+: ", "", line) for line in done.stdout.splitlines()]
    assert found == [
        'note: Revealed type is "pytorch_lightning_tricks.callbacks.ema.EMA"',
        'note: Revealed type is "float"',
        'note: Revealed type is "def (x: torch._tensor.Tensor, lam: float | torch._tensor.Tensor, index:'
        ' torch._tensor.Tensor) -> torch._tensor.Tensor"',
        'error: Argument "decay" to "EMA" has incompatible type "str"; expected "float"  [arg-type]',
        'error: Module has no attribute "EMO"  [attr-defined]',
        'error: Argument 1 to "optimizer_steps" has incompatible type "int"; expected "Trainer"  [arg-type]',
        "Found 3 errors in 1 file (checked 1 source file)",
    ], done.stdout + done.stderr
