"""Pipeline parallelism as docs/scaling.md has it: stages on two ranks train what one process trains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, Subset

import lightning_tricks as lt
from tests.nets import TORCH_2_9, PlainNet, assert_close, build, data, loader, trainer, weights
from tests.ranks import Cases, run_cases, run_ranks
from tests.test_docs import DOCS, blocks

CLIP = 0.3
pytestmark = pytest.mark.skipif(TORCH_2_9, reason="a limit of torch 2.9: gloo aborts a process of a pipeline")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01, betas=(0.8, 0.9)),
}


def recipe(optimizer: str, schedule: Any = Schedule1F1B, samples: int = 4) -> Any:
    """The class of the page."""
    (block,) = [block for block in blocks(DOCS / "scaling.md", "python") if "PipelineStage" in block]
    names: dict[str, Any] = {"torch": torch, "L": L, "lt": lt}
    exec(block, names)
    make = OPTIMIZERS[optimizer]
    body = {"configure_optimizers": lambda module: make(module.parameters()), "schedule": schedule, "max_norm": CLIP}
    return type("Recipe", (names["Pipeline"],), {**body, "samples": samples})


class Alone(PlainNet):
    """The same network in one process."""

    optimizer = "sgd"

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        first, *inner, last = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)]
        self.layers = nn.Sequential(first, nn.Tanh(), inner[0], nn.Tanh(), inner[1], nn.Tanh(), last)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


class AloneWithAdamW(Alone):
    optimizer = "adamw"


def alone(kind: type[Alone] = Alone) -> tuple[dict[str, Tensor], float]:
    run = trainer(gradient_clip_val=CLIP)
    run.fit(module := build(kind), loader(48, 16), loader(16, 16))
    return weights(module), float(run.callback_metrics["val_loss"])


def part(copies: int) -> DataLoader[Any]:
    """What a copy of the pipeline has of the batches of ``loader(48, 16)``."""
    copy, size = int(os.environ["RANK"]) // 2, 16 // copies
    mine = [16 * step + size * copy + number for step in range(3) for number in range(size)]
    return DataLoader(Subset(data(48), mine), batch_size=size)


def run(kind: Any, folder: Path, epochs: int = 2, ckpt_path: Any = None, copies: int = 1) -> Any:
    module, saved = build(kind), ModelCheckpoint(folder, filename=f"{epochs}", monitor="val_loss")
    fit = trainer(
        max_epochs=epochs,
        callbacks=[saved],
        enable_checkpointing=True,
        strategy=ModelParallelStrategy(data_parallel_size=copies, tensor_parallel_size=2),
        devices=2 * copies,
        use_distributed_sampler=False,
    )
    fit.fit(module, part(copies), loader(16, 16 // copies), ckpt_path=ckpt_path)
    return weights(module), float(fit.callback_metrics["val_loss"])


def on_ranks(case: str, folder: Path) -> Any:
    if case == "odd":
        with pytest.raises(ValueError, match="12 samples, not 4 x 4") as caught:
            trainer(
                strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
                devices=2,
                use_distributed_sampler=False,
            ).fit(build(recipe("sgd")), loader(12, 12))
        return str(caught.value)
    if case == "resumed":
        run(recipe("adamw"), folder / "half", 1)
        return run(recipe("adamw"), folder / "half", 2, folder / "half" / "1.ckpt")
    schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "adamw": Schedule1F1B}[case]
    return run(recipe("adamw" if case == "adamw" else "sgd", schedule), folder / case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Cases:
    return run_cases(on_ranks, ["1f1b", "gpipe", "adamw", "resumed", "odd"], folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["1f1b", "gpipe"])
def test_stages_equal_one_process(case: str, ranks: Cases) -> None:
    expected, val_loss = alone()
    (first, first_loss), (last, last_loss) = ranks[case]
    assert_close({**first, **last}, expected, 1e-5)
    assert not first.keys() & last.keys()
    assert first_loss == last_loss == pytest.approx(val_loss, abs=1e-5)
    assert (build(Alone).layers[6].weight - expected["layers.6.weight"]).abs().max() > 0.01


def test_a_resumed_fit_is_exact(ranks: Cases) -> None:
    for (found, _), (expected, _) in zip(ranks["resumed"], ranks["adamw"], strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert_close({**ranks["adamw"][0][0], **ranks["adamw"][1][0]}, alone(AloneWithAdamW)[0], 1e-4)


def test_one_file_of_all_stages_loads_into_the_network(ranks: Cases, folder: Path) -> None:
    (first, _), (last, _) = ranks["1f1b"]
    lt.consolidate(folder / "1f1b" / "2.ckpt", folder / "one.pt")
    module = build(Alone)
    module.load_state_dict(torch.load(folder / "one.pt"))
    assert_close(weights(module), {**first, **last}, 0)


def test_batches_of_another_size_are_refused(ranks: Cases) -> None:
    assert ["drop_last=True" in message for message in ranks["odd"]] == [True, True]


# -- beside data parallelism ------------------------------------------------------------------------------------------


def copies(folder: Path) -> Any:
    return run(recipe("sgd", samples=2), folder, copies=2)


@pytest.mark.slow
def test_two_copies_of_two_stages_equal_one_process(folder: Path) -> None:
    ranks = run_ranks(copies, folder / "copies", nprocs=4)
    expected, val_loss = alone()
    for (first, loss), (last, _) in (ranks[:2], ranks[2:]):
        assert_close({**first, **last}, expected, 1e-5)
        assert loss == pytest.approx(val_loss, abs=1e-5)
