"""The optimizers of docs/optimizers.md that LightningCLI makes of a file: they train what the same in Python trains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_tricks as lt
from tests.nets import assert_equal, loader, quiet, trainer, weights
from tests.test_docs import DOCS, blocks, my_project

PAGE = DOCS / "optimizers.md"
FILES = [yaml.safe_load(block) for block in blocks(PAGE, "yaml")]


def lion(module: nn.Module) -> Optimizer:
    from timm.optim import Lion

    return Lion(module.parameters(), lr=3e-4, weight_decay=0.1)


# The same in Python, in the order of the page.
MADE: list[Callable[[Any], Any]] = [
    lambda self: lt.optimizer("adan", self, 1e-3, weight_decay=0.02, betas=(0.98, 0.92, 0.99)),
    lion,
    lambda self: lt.cosine(lion(self), self, warmup=0.1),
]


class Reads(L.LightningModule):
    """What the page leaves out of a module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch[0]), batch[1])


class Bare(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)


class Given(Bare):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Default(Bare):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.AdamW) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def project() -> ModuleType:
    """The user's module: the classes of the page, with a training step."""
    found = my_project(PAGE)
    for name in ("Named", "ByClass", "Bare"):
        kind = getattr(found, name)
        setattr(found, name, type(name, (kind, Reads), {"__module__": "my_project", "__doc__": name}))
    return found


def cli(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> LightningCLI:
    """A LightningCLI that has read a file, and trained."""
    settings = {**quiet, **config.get("trainer", {})}
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "trainer": settings, "seed_everything": 3}))
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(folder / "config.yaml")])
    read = LightningCLI(save_config_callback=None, run=False)
    L.seed_everything(7, verbose=False)
    read.trainer.fit(read.model, loader())
    return read


@pytest.mark.parametrize("number", range(len(MADE)))
def test_the_files_of_the_page_train_as_the_same_in_python(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(FILES) == len(MADE)
    monkeypatch.setitem(sys.modules, "my_project", project())
    read = cli(FILES[number], tmp_path, monkeypatch)
    L.seed_everything(3, verbose=False)
    same = type("Same", (Bare,), {"configure_optimizers": MADE[number]})()
    run = trainer()
    L.seed_everything(7, verbose=False)
    run.fit(same, loader())
    assert_equal(weights(read.model), weights(same))
    assert type(read.trainer.optimizers[0]) is type(run.optimizers[0])


def test_an_optimizer_beside_the_model_takes_the_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": f"{__name__}.Given", "optimizer": {"class_path": "timm.optim.Lion", "init_args": {"lr": 1e-3}}}
    with pytest.warns(UserWarning, match="Given.configure_optimizers` will be overridden"):
        assert type(cli(config, tmp_path, monkeypatch).trainer.optimizers[0]).__name__ == "Lion"


@pytest.mark.parametrize(("kind", "decay"), [("Default", 0.01), ("ByClass", 0.0)])
def test_a_default_leaves_its_arguments_to_another_class(
    kind: str, decay: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "my_project", project())
    place = __name__ if kind == "Default" else "my_project"
    made = {"class_path": "timm.optim.Lion", "init_args": {"lr": 1e-3}}
    config = {"model": {"class_path": f"{place}.{kind}", "init_args": {"optimizer": made}}}
    assert cli(config, tmp_path, monkeypatch).trainer.optimizers[0].param_groups[0]["weight_decay"] == decay
