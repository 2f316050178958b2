"""A checkpoint of one process goes on in two: they train what one process trains from it on their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_tricks.core.batches import pipeline
from tests.conformance.runs import run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.trick import Trick
from tests.nets import PlainNet, loader, rank_loader
from tests.ranks import Cases, run_cases

EPOCHS = 4
HALF = "epoch=1.ckpt"


def settings_of(name: str) -> Trick:
    """A trick as it is on; one that ends a fit at a bad batch has none to end."""
    trick = SETTINGS[name]
    return replace(trick, stops=False) if trick.stops else trick


def begun(name: str, folder: Path) -> Path:
    """The checkpoint of one process half way."""
    save = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    settings = {"max_epochs": EPOCHS, "enable_checkpointing": True, "callbacks": [save]}
    run(settings_of(name), base=PlainNet, train=loader(48, 16), **settings)
    return folder / HALF


def gone_on(name: str, path: Path) -> dict[str, Any]:
    """In one of two processes, from the checkpoint of one."""
    torch.compiler.reset()
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    ended = run(
        settings_of(name),
        base=PlainNet,
        train=rank_loader(),
        max_epochs=EPOCHS,
        ckpt_path=path / name / HALF,
        **settings,
    )
    return {key: value.numpy() for key, value in ended.items()}


@pytest.fixture(scope="module")
def ended(
    selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], tuple[Path, Cases]]:
    """The checkpoints of all tricks, and what they end as in the same two processes."""

    @cache
    def of() -> tuple[Path, Cases]:
        folder = tmp_path_factory.mktemp("ranks")
        names = [name for name in selected("name") if "DDP" not in SETTINGS[name].refused]
        for name in names:
            begun(name, folder / name)
        return folder, run_cases(gone_on, names, folder)

    return of


@pytest.mark.parametrize("name", quick("EMA", "Mixup", "SAMMixin", "cosine"))
def test_two_processes_go_on_from_the_checkpoint_of_one(
    name: str, ended: Callable[[], tuple[Path, Cases]], cell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trick = settings_of(name)
    if "DDP" in trick.refused:
        cell(name, "ranks", "refused", f"{name} is refused under DDP")
        return
    folder, cases = ended()
    first, second = cases[name]
    by_itself = "accumulate" in trick.refused
    batches = {"train": loader(48, 16)} if by_itself else {"train": loader(48), "accumulate_grad_batches": 2}
    draw, done = pipeline.BatchPipeline._numbers, 6  # batches before the checkpoint

    def as_two(self: Any, trainer: Any, number: int) -> Any:
        """The numbers of rank (number - done) % 2 in the step of both."""
        step, rank = divmod(number - done, 2)
        return draw(self, trainer, 2 * (done + step) + rank)

    monkeypatch.setattr(pipeline.BatchPipeline, "_numbers", as_two)
    alone = run(trick, base=PlainNet, max_epochs=EPOCHS, ckpt_path=folder / name / HALF, **batches)
    for key, value in alone.items():
        assert (first[key] == second[key]).all()
        torch.testing.assert_close(torch.from_numpy(first[key]), value, atol=1e-5, rtol=1e-4)
    cell(name, "ranks")
