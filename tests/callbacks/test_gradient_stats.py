"""GradientStats: every so many steps the norms of a plain loop, for each group of layers; what is trained stays."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core import device
from lightning_tricks.core.lightning import trainer as facts
from tests.conformance.runs import ShardedNet, Steps, fp16
from tests.nets import TWO, PlainNet, assert_equal, build, fit, loader, rank_loader, trained, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused

KINDS = ("gradient_norm", "weight_norm", "update_norm", "update_ratio")
OURS = tuple(f"tricks/{kind}" for kind in KINDS)


class Kept(Logger):
    """Keeps what it is given."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = {name: value for name, value in metrics.items() if name.startswith(OURS)}
        if ours:
            assert step is not None
            assert step not in self.steps
            self.steps[step] = ours

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Deep(PlainNet):
    """Layers of two groups, one of which begins at zero, and a weight of its own."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.backbone = nn.ModuleDict({"first": nn.Linear(8, 4), "second": nn.Linear(8, 4)})
        self.head, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(()))
        self.layers = nn.Identity()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * torch.tanh(self.backbone["first"](x) + self.backbone["second"](x)))


GROUPS = {
    1: {"backbone": ("backbone.",), "head": ("head.",), "scale": ("scale",)},
    2: {name: (f"{name}.",) for name in ("backbone.first", "backbone.second", "head")} | {"scale": ("scale",)},
}


def naive(depth: int, accumulate: int = 1) -> dict[int, dict[str, float]]:
    """The norms of all steps of two epochs, one number after the other."""
    module, steps = build(Deep), {}
    optimizer = module.configure_optimizers()
    batches = list(loader())
    for _ in range(2):
        for first in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            for x, y in batches[first : first + accumulate]:
                (F.cross_entropy(module(x), y) / accumulate).backward()
            before = {name: p.detach().clone() for name, p in module.named_parameters()}
            gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            optimizer.step()
            updates = {name: p.detach() - before[name] for name, p in module.named_parameters()}
            values = {}
            for group, prefixes in {"": ("",), **{f"/{g}": p for g, p in GROUPS[depth].items()}}.items():
                for kind, tensors in zip(KINDS, (gradients, before, updates), strict=False):
                    numbers = [v for n, t in tensors.items() if n.startswith(prefixes) for v in t.flatten().tolist()]
                    values[f"tricks/{kind}{group}"] = math.sqrt(sum(v * v for v in numbers))
                weight, update = values[f"tricks/weight_norm{group}"], values[f"tricks/update_norm{group}"]
                values[f"tricks/update_ratio{group}"] = update / weight if weight else 0.0
            steps[len(steps)] = values
    return steps


def logged(*callbacks: Any, kind: Any = Deep, **settings: Any) -> tuple[dict[int, dict[str, float]], Any]:
    logger, module = Kept(), build(kind)
    run = fit(module, callbacks=[*callbacks], **{"logger": logger, "log_every_n_steps": 1, **settings})
    return logger.steps, (module, run)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_norms_are_those_of_a_plain_loop(accumulate: int, depth: int) -> None:
    found, (module, run) = logged(lt.GradientStats(every_n_steps=1, depth=depth), accumulate_grad_batches=accumulate)
    expected = naive(depth, accumulate)
    assert found.keys() == expected.keys()
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-4, abs=1e-6)
    last = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("tricks/")}
    assert last == pytest.approx(found[max(found)])
    assert_equal(weights(module), trained(Deep, accumulate_grad_batches=accumulate))


def test_only_every_so_many_steps_are_measured_each_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers, fetched = [], device.fetched
    monkeypatch.setattr(facts, "fetched", lambda tensors: transfers.append(len(tensors)) or fetched(tensors))
    found, _ = logged(lt.GradientStats(every_n_steps=5))
    assert [*found] == [0, 5, 10]
    assert transfers == [len(values) for values in found.values()]


def test_without_a_logger_the_values_are_in_the_metrics_of_callbacks() -> None:
    run = fit(build(Deep), callbacks=[lt.GradientStats(every_n_steps=5)])
    assert {f"tricks/{kind}/backbone.first" for kind in KINDS} <= run.callback_metrics.keys()


def test_all_loggers_get_them(tmp_path: Any) -> None:
    kept, csv = Kept(), CSVLogger(tmp_path)
    logged(lt.GradientStats(every_n_steps=4), logger=[kept, csv])
    assert [*kept.steps] == [0, 4, 8]
    assert "tricks/update_ratio/backbone.second" in (tmp_path / csv.name / "version_0" / "metrics.csv").read_text()


def test_gradients_are_those_before_clipping_and_without_the_scale() -> None:
    plain, _ = logged(lt.GradientStats(every_n_steps=1), max_steps=1)
    clipped, _ = logged(lt.GradientStats(every_n_steps=1), max_steps=1, gradient_clip_val=1e-3)
    scaled, _ = logged(lt.GradientStats(every_n_steps=1), max_steps=1, **fp16())
    assert clipped[0]["tricks/gradient_norm"] == plain[0]["tricks/gradient_norm"]
    assert clipped[0]["tricks/update_norm"] < 1e-2 * plain[0]["tricks/update_norm"]
    assert scaled[0]["tricks/gradient_norm"] == pytest.approx(plain[0]["tricks/gradient_norm"], rel=1e-2)


class Reads(Callback):
    """Computes the norm of all gradients at its place in the callbacks."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(gradients).norm()))


def test_of_tricks_that_change_gradients_those_before_it_count() -> None:
    for callbacks in ([lt.AutoClip(0)], []):
        reads, behind = Reads(), [] if callbacks else [lt.AutoClip(0)]
        found, _ = logged(*callbacks, reads, lt.GradientStats(every_n_steps=1), *behind)
        norms = [values["tricks/gradient_norm"] for values in found.values()]
        assert norms == pytest.approx(reads.norms, rel=1e-5)
        clipped = all(now <= before * (1 + 1e-5) for before, now in pairwise(norms))
        assert clipped == bool(callbacks)


class Frozen(Deep):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.backbone["first"].requires_grad_(False)


def test_what_has_no_gradient_is_left_out() -> None:
    found, _ = logged(lt.GradientStats(every_n_steps=1), kind=Frozen, max_steps=1)
    assert {name for name in found[0] if "first" in name} == set()
    assert {name for name in found[0] if "second" in name} == {f"tricks/{kind}/backbone.second" for kind in KINDS}


class InTurn(Deep):
    """Two optimizers, of which one steps in every other batch."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.backbone, self.head)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        optimizer.step()


def test_each_of_several_optimizers_is_measured() -> None:
    found, _ = logged(lt.GradientStats(every_n_steps=4, depth=1), kind=InTurn)
    heads = [step for step, values in found.items() if "tricks/gradient_norm/head" in values]
    backbones = [step for step, values in found.items() if "tricks/gradient_norm/backbone" in values]
    assert backbones == [0, 4, 8]
    assert heads == [1, 5, 9]


def on_two_ranks(strategy: str) -> dict[int, dict[str, float]]:
    kind, engine = (ShardedNet, ModelParallelStrategy(2, 1)) if strategy == "fsdp2" else (PlainNet, strategy)
    return logged(lt.GradientStats(every_n_steps=1), kind=kind, train=rank_loader(), strategy=engine, **TWO)[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_log_what_one_process_logs(strategy: str) -> None:
    first, _ = run_ranks(on_two_ranks, strategy)
    alone, _ = logged(lt.GradientStats(every_n_steps=1), kind=PlainNet, train=loader(48, 16))
    assert first.keys() == alone.keys()
    for step, values in alone.items():
        assert first[step] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_a_second_fit_begins_anew() -> None:
    trick = lt.GradientStats(every_n_steps=5)
    first, _ = logged(trick)
    second, _ = logged(trick)
    assert first == second


class Sparse(Deep):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.table = nn.Embedding(2, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table((x[:, 0] > 0).long())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sparse_gradients_are_refused() -> None:
    steps = Steps()
    with pytest.raises(MisconfigurationException, match=r"GradientStats works on dense gradients, .* table.weight"):
        logged(lt.GradientStats(), steps, kind=Sparse)
    assert steps.made == 0


def test_wrong_arguments_are_refused() -> None:
    cases = [
        (ValueError, {"every_n_steps": 0}, "every_n_steps must be"),
        (TypeError, {"every_n_steps": 0.5}, "every_n_steps must be"),
        (ValueError, {"depth": 0}, "depth must be"),
        (TypeError, {"depth": "2"}, "depth must be"),
    ]
    assert_refused(lt.GradientStats, cases)
