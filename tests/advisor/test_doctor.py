"""Doctor warns once, and can be silenced rule by rule."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import lightning_tricks as lt
from tests.device.nccl import rank_with_nccl
from tests.nets import PlainNet, build, data, fit, rank_loader
from tests.ranks import run_ranks


class Reused(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        tanh = nn.Tanh()
        self.layers = nn.Sequential(nn.Linear(8, 16), tanh, nn.Linear(16, 16), tanh, nn.Linear(16, 2))


def test_it_warns_with_the_rule_and_the_remedy() -> None:
    with pytest.warns(UserWarning, match=r"Doctor, reused-modules: one Tanh is used at layers.1, layers.3.* Create"):
        fit(build(Reused), callbacks=[lt.Doctor()], max_epochs=1)


def test_a_silenced_rule_is_not_heard() -> None:
    fit(build(Reused), callbacks=[lt.Doctor(silence=["reused-modules"])], max_epochs=1)  # warnings are errors


def test_what_is_compiled_stays_so() -> None:
    compiled = lt.Compile("layers", backend="eager")
    module = build(Reused)
    fit(module, callbacks=[compiled, lt.Doctor("reused-modules")], max_epochs=1)  # a fallback would warn
    assert not compiled._eager


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"silence must be one of 'reused-modules', .* Did you mean 'sync-dist'\?"):
        lt.Doctor(silence=["sync_dist"])


class Synced(PlainNet):
    settings: dict[str, Any] = {}  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"synced": loss, "again": loss}, **self.settings)
        return loss


def heard_of_logs(settings: dict[str, Any], silence: tuple[str, ...]) -> list[str]:
    return heard(type("Logs", (Synced,), {"settings": settings}), silence)


def heard(kind: type[PlainNet], silence: tuple[str, ...] = (), train: Any = None, **settings: Any) -> list[str]:
    module = build(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            module,
            train=train or rank_loader(),
            callbacks=[lt.Doctor(silence)],
            **{"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, **settings},
        )
    assert not {"log", "all_gather"} & vars(module).keys()
    return [str(each.message) for each in caught if "Doctor" in str(each.message)]


@pytest.mark.parametrize(
    ("settings", "silence", "count"),
    [
        ({"sync_dist": True}, (), 1),
        ({"sync_dist": True}, ("sync-dist",), 0),
        ({"sync_dist": True, "on_step": False, "on_epoch": True}, (), 0),
        ({}, (), 0),
    ],
)
def test_synchronized_logging_in_the_step_is_heard_once_on_rank_zero(
    settings: dict[str, Any], silence: tuple[str, ...], count: int
) -> None:
    first, second = run_ranks(heard_of_logs, settings, silence)
    assert len(first) == count
    assert second == []
    if count:
        assert "Doctor, sync-dist: self.log('synced', sync_dist=True) in training_step" in first[0]


class Gathering(PlainNet):
    sync_grads = detached = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self(batch[0])
        self.all_gather({"z": z.detach() if self.detached else z}, sync_grads=self.sync_grads)
        self.all_gather(batch[1])
        return super().training_step(batch, batch_idx)


def of_gathers() -> list[list[str]]:
    kinds = [Gathering, *(type("Right", (Gathering,), {name: True}) for name in ("sync_grads", "detached"))]
    return [heard(kind) for kind in kinds]


def test_gathers_that_cut_the_graph_are_heard_once() -> None:
    (wrong, synced, detached), _ = run_ranks(of_gathers)
    assert len(wrong) == 1
    assert "Doctor, gather-gradients: self.all_gather(...) in training_step" in wrong[0]
    assert "sync_grads=True" in wrong[0]
    assert synced == detached == []


def of_samplers() -> list[list[str]]:
    rank = int(os.environ["RANK"])
    batches = BatchSampler(SequentialSampler(data(48)), 8, drop_last=False)
    custom, stock = DataLoader(data(48), batch_sampler=batches), DataLoader(data(48), 8)
    return [
        heard(PlainNet, train=custom),
        heard(PlainNet, silence=("same-samples",), train=custom),
        heard(PlainNet, train=stock, use_distributed_sampler=True),
        heard(PlainNet, train=rank_loader()),
        heard(PlainNet, train=shuffled(data(48), rank)),
        heard(PlainNet, train=shuffled(rank_loader().dataset, rank)),
        heard(PlainNet, train=DataLoader(data(48), 8, sampler=lt.LengthBuckets(range(48), 8))),
    ]


def shuffled(samples: Any, seed: int) -> DataLoader[Any]:
    """In another order on every rank, as of processes that were not seeded alike."""
    return DataLoader(samples, 8, shuffle=True, generator=torch.Generator().manual_seed(seed))


def test_samplers_that_give_all_ranks_the_same_samples_are_heard() -> None:
    (same, silenced, distributed, own, shuffles, shuffles_own, buckets), _ = run_ranks(of_samplers)
    assert len(shuffles) == 1
    assert "Doctor, same-samples: each of 2 ranks shuffles all samples for itself" in shuffles[0]
    assert "an epoch has every sample 2 times. Leave use_distributed_sampler" in shuffles[0]
    assert shuffles_own == buckets == []
    assert len(same) == 1
    assert "Doctor, same-samples: the first batch of all 2 ranks has the same samples" in same[0]
    assert silenced == distributed == own == []


def of_a_device() -> list[list[str]]:
    """The same without float64 on the device, as on some of Intel's."""
    with rank_with_nccl(lacks=[torch.float64]):
        settings = {"accelerator": "cuda", "silence": ("pinned-memory",)}
        return [
            heard(PlainNet, train=DataLoader(data(48), 8), **settings),
            heard(PlainNet, train=rank_loader(), **settings),
        ]


def test_the_samples_of_ranks_are_compared_on_any_device() -> None:
    (same, own), _ = run_ranks(of_a_device)
    assert "Doctor, same-samples: the first batch of all 2 ranks has the same samples" in same[0]
    assert own == []
