"""SAM under FSDP2 on two ranks: one perturbation by the global norm, so that it equals SAM on the whole batch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, fit, loader, rank_loader
from tests.ranks import Cases, run_cases, run_ranks


class Sharded(lt.SAMMixin, PlainNet):
    """A layer may be sharded by itself, a weight may be frozen."""

    nested = frozen = False

    def configure_model(self) -> None:
        if isinstance(self.layers[0].weight, DTensor):
            return
        self.layers[0].bias.requires_grad_(not self.frozen)
        if self.nested:
            fully_shard(self.layers[2], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])  # stays gathered after the forward pass


class Alone(lt.SAMMixin, PlainNet):
    pass


class Whole(Callback):
    """The full weights when training ends."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layers.reshard() if hasattr(pl_module.layers, "reshard") else None
        named = dict(pl_module.named_parameters())
        self.weights = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in named.items()}


def fit_sharded(module: Any, sam: lt.SAM, **settings: Any) -> dict[str, torch.Tensor]:
    """Fit on this rank's batches, and give the full weights."""
    module.sam, whole = sam, Whole()
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    callbacks = [*settings.pop("callbacks", []), whole]
    distributed = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    fit(module, train=rank_loader(), callbacks=callbacks, **distributed, **settings)
    return whole.weights


def two_ranks(sam: lt.SAM, nested: bool, frozen: bool, settings: dict[str, Any]) -> dict[str, Any]:
    module = build(Sharded)
    module.nested, module.frozen = nested, frozen
    return {name: value.numpy() for name, value in fit_sharded(module, sam, **settings).items()}


CASES: list[tuple[lt.SAM, dict[str, Any]]] = [
    (lt.SAM(0.1), {}),
    (lt.SAM(0.1), {"accumulate_grad_batches": 2}),
    (lt.SAM(0.1), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    (lt.SAM(0.1, every_n_steps=2), {}),
    (lt.SAM(0.5, adaptive=True), {}),
    (lt.SAM(0.1, parameters="weight"), {}),
]


def in_turn(case: tuple[int, bool]) -> dict[str, Any]:
    number, nested = case
    sam, settings = CASES[number]
    return two_ranks(sam, nested, False, settings)


@pytest.fixture(scope="module")
def sharded() -> Cases:
    return run_cases(in_turn, product(range(len(CASES)), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
@pytest.mark.parametrize("nested", [False, True])
def test_two_ranks_equal_one_process_on_the_whole_batch(number: int, nested: bool, sharded: Cases) -> None:
    module = build(Alone)
    module.sam, settings = CASES[number]
    fit(module, train=loader(48, batch_size=16), **settings)
    for weights in sharded[number, nested]:
        assert_close({n: torch.from_numpy(w) for n, w in weights.items()}, module.state_dict(), 1e-6)


def test_a_frozen_weight_is_left_alone() -> None:
    module = build(Alone)
    module.sam = lt.SAM(0.1)
    module.layers[0].bias.requires_grad_(False)
    fit(module, train=loader(48, batch_size=16))
    first, _ = run_ranks(two_ranks, lt.SAM(0.1), True, True, {})
    assert_close({n: torch.from_numpy(w) for n, w in first.items()}, module.state_dict(), 1e-6)


def interrupted() -> None:
    class Fails(Sharded):
        runs = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.sam_runs = getattr(type(self), "total", 0) + 1
            type(self).total = self.sam_runs
            if self.sam_runs == 4:  # the second run of the second batch
                raise RuntimeError("planned")
            return loss

    module = build(Fails)
    with pytest.raises(RuntimeError, match="planned"):
        fit_sharded(module, lt.SAM(0.1))
    expected = fit_sharded(build(Sharded), lt.SAM(0.1), max_steps=1)
    module.layers.reshard()
    assert_equal({n: p.full_tensor().detach() for n, p in module.named_parameters()}, expected)


def test_an_exception_in_the_second_run_leaves_the_weights_unperturbed() -> None:
    run_ranks(interrupted)


def resume(path: str) -> None:
    whole = fit_sharded(build(Sharded), lt.SAM(0.1), callbacks=[SaveAt(path, epoch=1)], max_epochs=4)
    assert_equal(fit_sharded(build(Sharded), lt.SAM(0.1), ckpt_path=path, max_epochs=4), whole)


def test_resume_is_exact(tmp_path: Any) -> None:
    run_ranks(resume, str(tmp_path / "x.ckpt"))
