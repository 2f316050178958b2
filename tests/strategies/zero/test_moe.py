"""DeepSpeed's mixture of experts, as docs/losses.md has it: experts on two ranks equal those of one process."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, assert_close, build, loader, rank_loader, trainer
from tests.ranks import Cases, run_cases
from tests.test_docs import DOCS, blocks

pytestmark = pytest.mark.slow
GATE, EXPERTS = "moe.deepspeed_moe.gate.wg", "moe.deepspeed_moe.experts.deepspeed_experts"


def recipe() -> Any:
    """The class of the page, trained by SGD, without its balancing loss, which each rank has of its own tokens."""
    (block,) = [block for block in blocks(DOCS / "losses.md", "python") if "deepspeed.moe" in block]
    names: dict[str, Any] = {"torch": torch, "L": L, "lt": lt}
    exec(block, names)

    class Recipe(names["Mixture"]):  # type: ignore[misc]
        balance = 0.0

        def __init__(self) -> None:
            torch.manual_seed(1)
            super().__init__()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.training_step(batch, batch_idx))

        def configure_optimizers(self) -> Any:
            groups = super().configure_optimizers().param_groups
            return torch.optim.SGD([{**group, "lr": 0.1, "weight_decay": 0} for group in groups], momentum=0.9)

    return Recipe


class Naive(PlainNet):
    """Both experts in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = None  # type: ignore[assignment]
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def configure_model(self) -> None:
        torch.manual_seed(5)
        expert = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.experts = nn.ModuleList([expert, copy.deepcopy(expert)])
        self.gate = nn.Linear(16, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        weights, chosen = self.gate(hidden).softmax(-1).max(-1)
        mixed = torch.stack([self.experts[int(i)](h) for i, h in zip(chosen, hidden, strict=True)])
        return self.last(hidden + weights[:, None] * mixed)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(folder: Path, epochs: int, ckpt_path: Any = None) -> dict[str, Tensor]:
    module = build(recipe())
    saved = ModelCheckpoint(folder, filename=f"{epochs}")
    settings = {"strategy": cpu_deepspeed(2), "devices": 2, "use_distributed_sampler": False}
    fit = trainer(max_epochs=epochs, callbacks=[saved], enable_checkpointing=True, **settings)
    fit.fit(module, rank_loader(), loader(8), ckpt_path=ckpt_path)
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def on_ranks(case: str, folder: Path) -> Any:
    if case == "whole":
        return run(folder / "whole", 2)
    run(folder / "half", 1)
    return run(folder / "half", 2, str(folder / "half" / "1.ckpt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Cases:
    return run_cases(on_ranks, ["whole", "resumed"], folder)


def test_experts_on_two_ranks_equal_one_process(ranks: Cases) -> None:
    module = build(Naive)
    trainer().fit(module, loader(48, 16), loader(8))
    for rank, found in enumerate(ranks["whole"]):
        own = {"experts.0": f"{EXPERTS}.0", "experts.1": f"{EXPERTS}.0", "gate": GATE}
        expected = {
            f"{own.get(name.rpartition('.')[0].removesuffix('.0'), name.rpartition('.')[0])}"
            f"{'.0' * name.startswith('experts')}.{name.rpartition('.')[2]}": weight.detach()
            for name, weight in module.named_parameters()
            if not name.startswith(f"experts.{1 - rank}")
        }
        assert_close(found, expected, 1e-6)


def test_a_resumed_fit_is_exact(ranks: Cases) -> None:
    for found, expected in zip(ranks["resumed"], ranks["whole"], strict=True):
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


def test_a_folder_of_experts_is_not_consolidated_without_them(ranks: Cases, folder: Path) -> None:
    with pytest.raises(ValueError, match="has DeepSpeed's experts in files of their own"):
        lt.consolidate(folder / "half" / "1.ckpt", folder / "one.pt")
    assert not (folder / "one.pt").exists()
    assert os.listdir(folder / "half" / "1.ckpt" / "checkpoint")
