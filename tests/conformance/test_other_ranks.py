"""A checkpoint of one process goes on in two, and theirs in one: each trains what the other would on its batches."""

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
from tests.conformance.runs import refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.trick import Enrolment, public_name
from tests.nets import PlainNet, loader, rank_loader
from tests.ranks import Cases, run_cases

EPOCHS = 4
HALF, LATER = "epoch=1.ckpt", "two-epoch=2.ckpt"


def settings_of(name: str) -> Enrolment:
    """A trick as it is on; one that ends a fit at a bad batch has none to end."""
    trick = SETTINGS[name]
    return replace(trick, stops=False) if trick.stops else trick


def saved(folder: Path, filename: str) -> dict[str, Any]:
    """Settings of a fit that leaves the checkpoints of its epochs in a folder."""
    save = ModelCheckpoint(folder, filename=filename, save_top_k=-1, enable_version_counter=False)
    return {"max_epochs": EPOCHS, "enable_checkpointing": True, "callbacks": [save]}


def gone_on(name: str, folder: Path) -> dict[str, Any] | str:
    """In one of two processes, from the checkpoint of one."""
    torch.compiler.reset()
    settings = {"train": rank_loader(), "strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    settings |= {"ckpt_path": folder / name / HALF, **saved(folder / name, "two-{epoch}")}
    if "DDP" in SETTINGS[name].refused:
        return refusal(settings_of(name), PlainNet, **settings)
    return {key: value.numpy() for key, value in run(settings_of(name), base=PlainNet, **settings).items()}


@pytest.fixture(scope="module")
def ended(
    selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], tuple[Path, Cases]]:
    """The checkpoints of all tricks, and what they end as in the same two processes."""

    @cache
    def of() -> tuple[Path, Cases]:
        folder = tmp_path_factory.mktemp("ranks")
        for name in selected("name"):
            run(settings_of(name), base=PlainNet, train=loader(48, 16), **saved(folder / name, "{epoch}"))
        return folder, run_cases(gone_on, selected("name"), folder)

    return of


@pytest.mark.few(2)
@pytest.mark.parametrize("name", quick("EMA", "Mixup", "SAMMixin", "cosine"))
def test_two_processes_go_on_from_the_checkpoint_of_one_and_one_from_theirs(
    name: str, ended: Callable[[], tuple[Path, Cases]], cell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cases = ended()
    first, second = cases[name]
    trick = settings_of(name)
    if "DDP" in trick.refused:
        assert "DDP" in first
        assert public_name(name) in first
        cell(name, "ranks", "refused", first)
        return
    by_itself = "accumulate" in trick.refused
    batches = {"train": loader(48, 16)} if by_itself else {"train": loader(48), "accumulate_grad_batches": 2}
    draw = pipeline.BatchPipeline._numbers
    # For a plateau Lightning leaves out the metric of the epoch in which a fit is resumed, and that fit was not there.
    checkpoints = {HALF: 6} if name == "reduce_on_plateau" else {HALF: 6, LATER: 9}
    for checkpoint, done in checkpoints.items():  # batches of a process before it

        def as_two(self: Any, trainer: Any, number: int, done: int = done) -> Any:
            """The numbers of rank (number - done) % 2 in the step of both."""
            step, rank = divmod(number - done, 2)
            return draw(self, trainer, 2 * (done + step) + rank)

        monkeypatch.setattr(pipeline.BatchPipeline, "_numbers", as_two)
        alone = run(trick, base=PlainNet, max_epochs=EPOCHS, ckpt_path=folder / name / checkpoint, **batches)
        for key, value in alone.items():
            assert (first[key] == second[key]).all()
            torch.testing.assert_close(torch.from_numpy(first[key]), value, atol=1e-5, rtol=1e-4)
    cell(name, "ranks")
