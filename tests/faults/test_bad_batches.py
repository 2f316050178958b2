"""Bad batches now on one rank, now on another, and loaders whose workers fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from tests.faults import everything
from tests.faults.everything import Free, Growing, Images, InChunks, Mixture, lora
from tests.faults.runs import differences
from tests.faults.test_interrupt import Watch
from tests.nets import NormNet, assert_equal, build, data, fit, trainer, weights
from tests.ranks import run_ranks

BAD = {2: (0,), 5: (1,), 6: (0,), 9: (0, 1)}  # on which ranks


class Spoiled(NormNet):
    """A bad batch makes the input, the loss or a gradient undefined, in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, number = batch
        bad = self.global_rank in BAD.get(int(number), ())
        loss = super().training_step((x * torch.nan if bad and number % 3 == 0 else x, y), batch_idx)
        if bad and number % 3 == 1:
            self.layers[0].weight.register_hook(lambda gradient: gradient * torch.inf)
        return loss * torch.inf if bad and number % 3 == 2 else loss


def batches(*left_out: int) -> DataLoader[Any]:
    rank = int(os.environ["RANK"])
    made = [(*data(8, seed=2 * each + rank)[:], torch.tensor(each)) for each in range(12) if each not in left_out]
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


def several_faults() -> int:
    ended = []
    for left_out in ((), tuple(BAD)):
        module, skip, ema = build(Spoiled), lt.SkipNonFinite(), lt.EMA(0.9, at_end="raw")
        settings = {"devices": 2, "strategy": "ddp", "max_epochs": 1, "use_distributed_sampler": False}
        run = fit(module, train=batches(*left_out), callbacks=[skip, lt.AdaptiveClip(0.1), ema], **settings)
        ended.append((skip.skipped_steps, {**weights(module)}, ema.averaged_state_dict(), run.global_step))
    (skipped, *with_faults), (none, *without) = ended
    assert_equal(with_faults[0], without[0])
    assert_equal(with_faults[1], without[1])
    assert (none, with_faults[2]) == (0, without[2])
    return skipped


def test_bad_batches_on_any_rank_are_left_out_on_all() -> None:
    assert run_ranks(several_faults) == [len(BAD)] * 2


NEW_STATE: dict[str, tuple[type[everything.Images], Callable[[], list[Callback]]]] = {
    "nothing": (Growing, list),
    "EMA": (Growing, lambda: [lt.EMA(0.9)]),
    "ScheduleFree": (Free, lambda: [lt.ScheduleFree()]),
    "ScheduleFree, QAT": (Free, lambda: [lt.ScheduleFree(), lt.QAT("int8")]),
    "LoRA": (Images, lambda: [lora()]),
    "LoRA, EMA": (Images, lambda: [lora(), lt.EMA(0.9)]),
    "QAT": (Growing, lambda: [lt.QAT("int4", start=4)]),
    "MoEBalance": (Mixture, lambda: [lt.MoEBalance(0.05)]),
    "GradCacheMixin": (InChunks, list),
    "SAMCallback": (Images, lambda: [lt.SAMCallback(0.05)]),
    "LayerFreezing": (Growing, lambda: [lt.LayerFreezing(start=3, stop=6, parameters=[r"^layers\.[01]\."])]),
    "ProgressiveResizing": (Growing, lambda: [lt.ProgressiveResizing(0.5, stop=8, multiple_of=1)]),
    "SequenceLengthWarmup": (Growing, lambda: [lt.SequenceLengthWarmup(0.5, stop=8, multiple_of=1, inputs=0)]),
}
GUARDS: dict[str, Callable[[], Callback]] = {
    "SkipNonFinite": lt.SkipNonFinite,
    "RewindOnSpike": lambda: lt.RewindOnSpike(window=100, every_n_steps=1, max_rewinds=6),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("state", NEW_STATE)
def test_what_has_state_is_as_without_the_bad_batches(state: str, guard: str, order: int) -> None:
    x, y = data()[:]
    good = [*zip(x.split(8), y.split(8), strict=True)]
    bad = [(x * torch.nan, y) if number in (2, 4) else (x, y) for number, (x, y) in enumerate(good)]
    kind, make = NEW_STATE[state]
    ended = []
    for batches in (bad, [*good[:2], good[3], *good[5:]]):
        module, callbacks = everything.fresh(kind), [GUARDS[guard](), *make()][::order]
        made = trainer(max_epochs=3, callbacks=callbacks)
        everything.run(made, module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        ended.append(deepcopy(everything.outcome(made, module)))
    assert not differences(*ended)
    assert ended[0]["steps"] == 3 * 4


class Failing(Dataset[Any]):
    """One sample raises, or ends the process that reads it."""

    def __init__(self, how: str) -> None:
        self.how, self.whole = how, data()

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> Any:
        if index == 27 and self.how == "raises":
            raise KeyError("no such picture")
        if index == 27 and self.how == "dies":
            os._exit(9)
        return self.whole[index]


def workers(how: str) -> DataLoader[Any]:
    return DataLoader(Failing(how), batch_size=8, num_workers=2, multiprocessing_context="forkserver")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("raises", KeyError, "DataLoader worker process"),
        pytest.param("dies", RuntimeError, "exited unexpectedly", marks=pytest.mark.slow),  # torch looks every 5 s
    ],
)
def test_a_worker_of_the_loader_that_fails(how: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    watch, expected, module = Watch(), everything.fresh(), everything.fresh()
    made = everything.make(tmp_path)
    everything.run(made, expected, workers("works"))
    outcome = everything.outcome(made, expected)
    made = everything.make(tmp_path, watch)
    with pytest.raises(error, match=said):
        everything.run(made, module, workers(how))
    assert made.global_step <= 3
    watch.check(module)
    again = everything.make(tmp_path)
    again.callbacks[:] = made.callbacks  # type: ignore[attr-defined]
    module.load_state_dict(everything.fresh().state_dict())
    everything.run(again, module, workers("works"))
    assert not differences(everything.outcome(again, module), outcome)
