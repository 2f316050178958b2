"""A step that runs again sees the same random numbers and leaves buffers and metrics alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.rerun import Start, begin_run, is_replaying, replaying, run_again, run_number, undone


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    state = ModuleState(module)
    try:
        yield
    finally:
        state.restore()


class Counters(nn.Module):
    """Buffers of every sort, changed in place or assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("anew", torch.zeros(3))
        self.register_buffer("grown", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("expanded", torch.ones(1).expand(5))
        self.register_buffer("nan", torch.tensor([float("nan"), 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.flag.fill_(True)
        self.anew = self.anew + x.detach().mean()
        self.grown = torch.cat([self.grown, self.grown])
        self.nan.zero_()
        return x


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": lambda: nn.BatchNorm1d(4),
    "cumulative batchnorm": lambda: nn.BatchNorm1d(4, momentum=None),
    "instancenorm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "spectral_norm": lambda: spectral_norm(nn.Linear(4, 4)),
    "counters": Counters,
    "shared": lambda: nn.Sequential(*[nn.BatchNorm1d(4)] * 2),
}


def buffers(module: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (id(buffer), buffer.clone()) for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nan"])
@pytest.mark.parametrize("kind", MODULES)
def test_buffers_are_the_same_objects_with_the_same_bits(kind: str, bad: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[kind]()
    module(torch.randn(8, 4))
    before = buffers(module)
    with state_kept(module):
        loss = module(torch.randn(8, 4) * (float("nan") if bad else 3.0)).sum()
        if loss.requires_grad:
            loss.backward()
        changed = buffers(module)
    after = buffers(module)
    assert after.keys() == before.keys()
    assert any(
        identity != before[name][0] or not same(value, before[name][1]) for name, (identity, value) in changed.items()
    )
    for name, (identity, value) in before.items():
        assert after[name][0] == identity, name
        assert same(after[name][1], value), name


def same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype and torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(a[~a.isnan()], b[~b.isnan()])
    )


@pytest.mark.parametrize("layout", ["strided", "sparse"])
def test_a_buffer_that_is_written_counts_as_changed_if_its_values_are(layout: str) -> None:
    module, values = nn.Module(), torch.tensor([[float("nan"), 0.0, 1.0]])
    module.register_buffer("held", values.clone() if layout == "strided" else values.to_sparse())
    state = ModuleState(module, compared=True)
    module.held.copy_(module.held.clone())
    assert state.changed() is None
    module.held.mul_(2)
    assert state.changed() == "Module.held"


METRICS: dict[str, Callable[[], Metric | MetricCollection]] = {
    "tensor state": lambda: MulticlassAccuracy(3),
    "list state": lambda: CatMetric(),
    "mean": lambda: MeanMetric(),
    "collection": lambda: MetricCollection([MulticlassAccuracy(3), MulticlassF1Score(3), MulticlassConfusionMatrix(3)]),
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("seen_before", [0, 1, 2])
@pytest.mark.parametrize("call", ["forward", "update"])
# asked for the result before any update, torchmetrics warns
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_metrics_go_on_as_if_the_block_had_not_run(kind: str, seen_before: int, call: str) -> None:
    batches = [metric_batch(kind, seed) for seed in range(4)]
    module, reference = nn.ModuleDict({"metric": METRICS[kind]()}), METRICS[kind]()
    for batch in batches[:seen_before]:
        getattr(module["metric"], call)(*batch)
        getattr(reference, call)(*batch)
    with state_kept(module):
        getattr(module["metric"], call)(*batches[3])
        module["metric"].compute()
    assert_same_metrics(module["metric"], reference)
    getattr(module["metric"], call)(*batches[2])
    getattr(reference, call)(*batches[2])
    assert_same_metrics(module["metric"], reference)


def metric_batch(kind: str, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(6, 3, generator=generator)
    return (
        (values.flatten(),) if kind in ("list state", "mean") else (values, torch.randint(3, (6,), generator=generator))
    )


def assert_same_metrics(metric: Any, reference: Any) -> None:
    for mine, theirs in zip(
        *(m.values() if isinstance(m, MetricCollection) else [m] for m in (metric, reference)), strict=True
    ):
        assert mine._update_count == theirs._update_count
        torch.testing.assert_close(mine.metric_state, theirs.metric_state, atol=0, rtol=0)
        torch.testing.assert_close(mine.compute(), theirs.compute(), atol=0, rtol=0, equal_nan=True)


class Carrier(nn.Module):
    """Plain attributes of every sort that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1
        self.items = [1, 2]
        self.table = {"a": 1}
        self.names = {"x"}
        self.recent = deque([1, 2], maxlen=2)
        self.carried = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(0)

    def change(self) -> None:
        self.number += 1
        self.items.append(3)
        self.table["b"] = self.table.pop("a")
        self.names.clear()
        self.recent.append(3)
        self.carried.add_(1)
        self.carried = self.carried + 1
        torch.rand(1, generator=self.generator)
        self.added = True

    def state(self) -> list[Any]:
        contents = [self.number, *self.items, *self.table.items(), *self.names, *self.recent, *self.carried.tolist()]
        return [*contents, self.generator.get_state().tolist(), hasattr(self, "added")]


def test_attributes_are_the_same_objects_with_the_same_contents() -> None:
    module = nn.Sequential(Carrier(), nn.Linear(2, 2))
    carrier = module[0]
    before, objects = carrier.state(), [id(v) for v in carrier.__dict__.values()]
    with state_kept(module):
        carrier.change()
        assert carrier.state() != before
    assert carrier.state() == before
    assert [id(v) for v in carrier.__dict__.values()] == objects


def test_parameters_are_left_alone() -> None:
    module = nn.Linear(2, 2)
    with state_kept(module), torch.no_grad():
        module.weight.fill_(7)
    assert module.weight.eq(7).all()


def test_runs_have_numbers_which_stay_when_they_are_run_again() -> None:
    begin_run()
    first = run_number()
    with replaying():
        assert run_number() == first
    begin_run()
    assert run_number() != first


def test_a_step_knows_that_it_runs_again_until_the_end_of_an_exception() -> None:
    assert not is_replaying()
    with pytest.raises(KeyError), replaying():
        assert is_replaying()
        with replaying():
            pass
        assert is_replaying()
        raise KeyError
    assert not is_replaying()


class Counts(nn.Module):
    """Counts its runs in a buffer, and in a closure, which nothing can set back, if it is told to."""

    def __init__(self, closure: bool = False) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.teacher = nn.Parameter(torch.zeros(()), requires_grad=False)
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += closure

        self.count = count

    def forward(self) -> float:
        self.runs.add_(1)
        self.teacher.data.add_(1)
        self.count()
        return torch.rand(()).item()


def test_a_run_again_gives_the_same_and_changes_nothing_more() -> None:
    module = Counts()
    start = Start.here(module)
    with start.state.watching():
        first = module()
    following = torch.rand(()).item()
    torch.set_rng_state(start.random["torch"])
    torch.rand(())
    with run_again(start) as again:
        assert module.runs == module.teacher == 0
        with again.running():
            assert module() == first
        assert module.runs == module.teacher == 1
    assert module.runs == module.teacher == 1
    assert torch.rand(()).item() == following


def test_a_run_again_is_undone_after_an_exception() -> None:
    module = Counts()
    start = Start.here(module)
    with start.state.watching():
        module()
    with pytest.raises(KeyError), run_again(start) as again, again.running():
        module(), module()
        raise KeyError
    assert module.runs == module.teacher == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_what_cannot_be_undone_is_refused_before_the_second_run_or_after_it(at_once: bool) -> None:
    module, entered = Counts(closure=True), []
    start = Start.here(module)
    with start.state.watching():
        module()
    with pytest.raises(MisconfigurationException, match=r"Counts\.count"), run_again(start, at_once=at_once):
        entered.append(True)
        module()
    assert bool(entered) is not at_once
    assert module.runs == 1


def test_an_undone_run_leaves_no_trace_and_one_that_has_failed_is_set_back() -> None:
    module = Counts()
    start = Start.here(module)
    with undone(start):
        first = module()
    assert module.runs == module.teacher == 0
    with start.state.watching():
        assert module() == first
    start.set_back()
    assert module.runs == module.teacher == 0
    assert module() == first
