"""What ranks find out together: equal averaged BatchNorm statistics, and a distance over all shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback

import lightning_tricks as lt
from lightning_tricks.core.lightning.trainer import extremes
from tests.core.weights.test_local import train
from tests.nets import NormNet, build, fit, rank_loader
from tests.ranks import run_ranks


class Statistics(Callback):
    """The running mean of every step, and what validation and the end show."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []
        self.shown: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps.append(pl_module.layers[1].running_mean.clone())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.shown.append(pl_module.layers[1].running_mean.clone())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.shown.append(pl_module.layers[1].running_mean.clone())


def statistics(folder: str) -> tuple[Any, Any]:
    seen, ema = Statistics(), lt.EMA(0.9, warmup=False, buffers="average", start=1)
    settings = {"train": rank_loader(), "use_distributed_sampler": False, "strategy": "ddp", "devices": 2}
    run = fit(build(NormNet), callbacks=[ema, seen], max_epochs=3, **settings)
    run.save_checkpoint(f"{folder}/x.ckpt")
    saved = torch.load(f"{folder}/x.ckpt", weights_only=True)["state_dict"]["layers.1.running_mean"]
    assert torch.equal(saved, seen.shown[-1])
    return torch.stack(seen.steps).numpy(), torch.stack(seen.shown).numpy()


def test_averaged_statistics_are_the_same_on_all_ranks_and_the_mean_of_theirs(tmp_path: Any) -> None:
    (mine, shown), (other, theirs) = run_ranks(statistics, str(tmp_path))
    assert (shown == theirs).all()
    assert not (mine == other).all()
    means = []
    for steps in (mine, other):
        average = steps[0].astype("float64")
        for step in steps[1:]:
            average = 0.9 * average + 0.1 * step
        means.append(average)
    torch.testing.assert_close(torch.tensor(shown[-1]).double(), torch.tensor(sum(means) / 2), atol=1e-6, rtol=1e-6)


def distances(engine: str) -> tuple[float, float]:
    ema, logged = lt.EMA(0.9, at_end="raw"), list[float]()

    def note(trainer: Any, *_: Any) -> None:
        logged.append(ema._running.distance(trainer.strategy.root_device))

    train(engine, ema, callbacks=[LambdaCallback(on_train_batch_end=note)], max_epochs=1)
    averages = ema._running
    raw = torch.cat([value.flatten() for value in averages.weights.state().values()])
    averaged = torch.cat([value.flatten() for value in ema.averaged_state_dict().values()])
    return logged[-1], float((raw - averaged).norm() / raw.norm())


@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_the_distance_is_that_of_the_gathered_weights(engine: str) -> None:
    for logged, expected in run_ranks(distances, engine):
        assert logged == pytest.approx(expected, rel=1e-4)


def smallest_and_largest() -> tuple[int, int]:
    found: list[tuple[int, int]] = []
    ask = LambdaCallback(on_train_start=lambda trainer, _: found.append(extremes(trainer, 5 + trainer.global_rank)))
    fit(build(NormNet), callbacks=[ask], max_epochs=1, strategy="ddp", devices=2)
    return found[0]


def test_the_extremes_of_numbers_that_differ_between_ranks() -> None:
    assert run_ranks(smallest_and_largest) == [(5, 6), (5, 6)]
