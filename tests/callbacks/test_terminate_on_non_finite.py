"""TerminateOnNonFinite: what it leaves is the state before, and the batch; nothing that was there is touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.runs import fp16
from tests.nets import NormNet, PlainNet, ShardedLayers, assert_equal, build, data, fit, loader, rank_loader, weights
from tests.ranks import run_ranks


class Bad(NormNet):
    """The fourth batch is bad on the first rank, in one way or another."""

    how = "input"

    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=0.02), self, total_steps=40)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        bad = self.trainer.global_step == self.bad_step and self.global_rank == 0
        if bad and self.how == "input":
            x = x * torch.nan  # reaches the statistics of BatchNorm
        loss = super().training_step((x, y), batch_idx)
        return loss * torch.inf if bad and self.how == "loss" else loss

    bad_step = 3

    def on_after_backward(self) -> None:
        if self.how == "gradient" and self.trainer.global_step == self.bad_step:
            self.layers[0].weight.grad.fill_(torch.nan)


class Good(Bad):
    bad_step = -1


def stopped(folder: Path, **settings: Any) -> tuple[Any, str]:
    module = build(type("Spoiled", (Bad,), {"how": settings.pop("how", "input")}))
    with pytest.raises(FloatingPointError) as caught:
        fit(module, callbacks=[lt.TerminateOnNonFinite(str(folder))], **settings)
    return module, str(caught.value)


@pytest.mark.parametrize("how", ["input", "loss", "gradient"])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_the_checkpoint_is_the_last_good_state(how: str, settings: dict[str, Any], tmp_path: Path) -> None:
    stopped_module, said = stopped(tmp_path, how=how, **settings)
    run = fit(clean := build(Good), max_steps=3, **settings)
    saved = torch.load(tmp_path / "non_finite-step=3" / "last_good.ckpt", weights_only=True)
    assert_equal(saved["state_dict"], weights(clean))
    assert_equal(weights(stopped_module), weights(clean))
    theirs = run.optimizers[0].state_dict()["state"]
    for number, state in saved["optimizer_states"][0]["state"].items():
        assert_equal(state, theirs[number])
    assert saved["global_step"] == 3
    batch = torch.load(tmp_path / "non_finite-step=3" / "batch-rank=0.pt", weights_only=True)
    expected = list(loader())[3]
    assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True))
    assert "after step 3, in batch 3 of epoch 0" in said
    assert str(tmp_path / "non_finite-step=3") in said
    assert ("layers.0.weight" in said) == (how == "gradient")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_training_goes_on_from_what_it_left(tmp_path: Path) -> None:
    stopped(tmp_path)
    run = fit(resumed := build(Good), ckpt_path=tmp_path / "non_finite-step=3" / "last_good.ckpt", max_steps=6)
    assert run.global_step == 6
    assert all(value.isfinite().all() for value in weights(resumed).values())


def test_an_earlier_folder_is_never_touched(tmp_path: Path) -> None:
    for name in ("non_finite-step=3", "non_finite-step=3-v1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "last_good.ckpt").write_text("precious")
    _, said = stopped(tmp_path)
    assert "non_finite-step=3-v2" in said
    for name in ("non_finite-step=3", "non_finite-step=3-v1"):
        (file,) = (tmp_path / name).iterdir()
        assert (file.name, file.read_text()) == ("last_good.ckpt", "precious")


def test_an_accumulated_window_is_dropped(tmp_path: Path) -> None:
    class Late(Bad):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return NormNet.training_step(self, (x * (torch.nan if batch_idx == 5 else 1), y), batch_idx)

    with pytest.raises(FloatingPointError, match="after step 2, in batch 5"):
        fit(build(Late), callbacks=[lt.TerminateOnNonFinite(str(tmp_path))], accumulate_grad_batches=2)
    saved = torch.load(tmp_path / "non_finite-step=2" / "last_good.ckpt", weights_only=True)
    fit(clean := build(Good), max_steps=2, accumulate_grad_batches=2)
    assert_equal(saved["state_dict"], weights(clean))


class Local(list[Any]):
    """A batch with something that cannot be pickled."""

    why = staticmethod(lambda: None)

    def __reduce__(self) -> Any:
        return self.why, ()


def test_what_cannot_be_written_does_not_hide_the_reason(tmp_path: Path) -> None:
    batches = DataLoader(data(), batch_size=8, collate_fn=lambda items: Local(default_collate(items)))
    _, said = stopped(tmp_path, train=batches)
    assert "after step 3" in said
    assert "The state before it and the batch are incomplete in" in said
    assert [file.name for file in (tmp_path / "non_finite-step=3").iterdir()] == ["last_good.ckpt"]
    file = tmp_path / "file"
    in_the_way = DataLoader(data(), batch_size=8, collate_fn=lambda items: file.touch() or default_collate(items))
    _, said = stopped(file, train=in_the_way)
    assert "after step 3" in said
    assert f"Nothing could be kept in {file}: " in said


class Slices(Dataset[Any]):
    """Batches that are views of one large tensor."""

    whole = torch.randn(100_000, 8)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return self.whole[8 * number : 8 * number + 8], torch.zeros(8, dtype=torch.long)


def test_only_the_batch_is_saved(tmp_path: Path) -> None:
    stopped(tmp_path, train=DataLoader(Slices(), batch_size=None))
    assert (tmp_path / "non_finite-step=3" / "batch-rank=0.pt").stat().st_size < 10_000


def test_infinite_gradients_are_left_to_a_grad_scaler(tmp_path: Path) -> None:
    module = build(type("Spoiled", (Bad,), {"how": "gradient"}))
    assert fit(module, callbacks=[lt.TerminateOnNonFinite(str(tmp_path))], **fp16()).global_step == 12
    stopped(tmp_path, how="loss", **fp16())


def test_the_default_folder_is_the_trainers(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError):
        fit(build(Bad), callbacks=[lt.TerminateOnNonFinite()], default_root_dir=tmp_path)
    assert (tmp_path / "non_finite-step=3" / "last_good.ckpt").is_file()


class Sharded(ShardedLayers, Bad):
    bad_step = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = PlainNet().layers

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def two_ranks(folder: Path) -> None:
    settings: dict[str, Any] = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False}
    for name in ("ddp", "fsdp", "zero"):
        strategy = {"ddp": lambda: "ddp", "fsdp": lambda: ModelParallelStrategy(2, 1), "zero": cpu_deepspeed}[name]()
        callback = lt.TerminateOnNonFinite(str(folder / name))
        with pytest.raises(FloatingPointError) as caught:
            fit(build(Sharded), callbacks=[callback], strategy=strategy, **settings)
        assert "after step 2" in str(caught.value)
        (made,) = (folder / name).iterdir()
        batch = torch.load(made / f"batch-rank={os.environ['RANK']}.pt", weights_only=True)
        assert torch.equal(batch[0], list(rank_loader())[2][0])
        assert (made / "last_good.ckpt").exists()


def with_a_logger(folder: Path) -> str:
    settings = {"devices": 2, "use_distributed_sampler": False, "logger": CSVLogger(folder)}
    with pytest.raises(FloatingPointError) as caught:
        fit(build(Sharded), train=rank_loader(), strategy="ddp", callbacks=[lt.TerminateOnNonFinite()], **settings)
    return str(caught.value)


def test_ranks_agree_on_the_folder_of_a_logger(tmp_path: Path) -> None:
    made = tmp_path / "lightning_logs" / "version_0" / "non_finite-step=2"
    for said in run_ranks(with_a_logger, tmp_path, timeout=300):
        assert str(made) in said
    assert sorted(file.name for file in made.iterdir()) == ["batch-rank=0.pt", "batch-rank=1.pt", "last_good.ckpt"]


def test_all_ranks_stop_together(tmp_path: Path) -> None:
    run_ranks(two_ranks, tmp_path)
