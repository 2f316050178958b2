"""DeepSpeed's names that core/zero.py stands on; what is done with them is tested in test_shards.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.zero import load_full_weights
from tests.conformance.engines import cpu_deepspeed
from tests.nets import NormNet, PlainNet, assert_equal, build, fit, rank_loader, weights
from tests.ranks import _environment, _free_port, run_ranks

ROOT = Path(__file__).parents[3]


class Masters(Callback):
    """The local masters after a step, beside what DeepSpeed's public functions say."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        held = local_weights(trainer, pl_module, "Masters")
        parts = held.trainable()
        for name, parameter in pl_module.named_parameters():
            whole = safe_get_full_fp32_param(parameter).flatten()
            if name in parts:
                values = torch.cat([whole, torch.zeros(1)])  # a shard may be padded
                assert torch.isin(parts[name], values).all()
                assert parts[name].data_ptr() == held.local(parameter).data_ptr()


def zero_fit(module: Any, stage: int, *callbacks: Callback, **settings: Any) -> L.Trainer:
    """A fit of this rank's batches under DeepSpeed."""
    distributed = {"strategy": cpu_deepspeed(stage), "devices": 2, "use_distributed_sampler": False}
    return fit(module, train=rank_loader(), callbacks=[*callbacks], **distributed, **settings)


def masters(stage: int) -> None:
    zero_fit(build(PlainNet), stage, Masters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_local_masters_are_parts_of_what_deepspeed_gives(stage: int) -> None:
    run_ranks(masters, stage)


class One(PlainNet):
    """So few weights that a rank may have none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


def one_weight() -> tuple[int, float]:
    ema = lt.EMA(0.9)
    zero_fit(build(One), 2, ema, log_every_n_steps=1)
    return ema._running.updates, float(ema.averaged_state_dict()["scale"])


def test_a_rank_without_a_part_takes_part() -> None:
    first, second = run_ranks(one_weight)
    assert first == second


def save_averages(folder: str) -> None:
    ema = lt.EMA(0.9)
    run = zero_fit(build(PlainNet), 3, ema)
    torch.save(ema.averaged_state_dict(), Path(folder) / f"{run.global_rank}.pt")
    torch.distributed.destroy_process_group()  # a live gloo group at exit aborts now and then


def order_of_gathers() -> tuple[list[str], list[str]]:
    """The names whose weights are gathered for the average, and those of the module."""
    import deepspeed

    gathered: list[str] = []
    ema, module = lt.EMA(0.9), build(PlainNet)
    zero_fit(module, 3, ema)
    names = {id(weight): name for name, weight in module.named_parameters()}
    original = deepspeed.zero.GatheredParameters

    def noting(params: Any, *args: Any, **settings: Any) -> Any:
        gathered.extend(names[id(weight)] for weight in params)
        return original(params, *args, **settings)

    deepspeed.zero.GatheredParameters = noting
    ema.averaged_state_dict()
    return gathered, list(names.values())


def test_weights_are_gathered_in_the_order_of_the_module_whatever_the_hashes_of_their_names() -> None:
    (gathered, names), other = run_ranks(order_of_gathers)
    assert other == (gathered, names)
    assert gathered == names


@pytest.mark.slow
def test_ranks_that_hash_names_differently_gather_in_one_order(tmp_path: Path) -> None:
    port = _free_port()
    code = "import sys; from tests.core.weights.test_zero import save_averages; save_averages(sys.argv[1])"
    ranks = [  # not by run_ranks, whose children have the hashes of one forkserver
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, **_environment(rank, 2, port), "PYTHONHASHSEED": str(rank + 1)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert_equal(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)))


def test_whole_weights_must_fit_unless_told_otherwise() -> None:
    module, other = build(NormNet), NormNet()
    state = {**weights(other), "extra": torch.zeros(1)}
    state.pop("layers.1.running_mean")
    with pytest.raises(RuntimeError, match=r"missing \['layers.1.running_mean'\], unexpected \['extra'\]"):
        load_full_weights(module, state, strict=True, masters=False)
    load_full_weights(module, state, strict=False, masters=False)
    assert_equal(weights(module), weights(other))
