"""Averages of weights in shards, with the real engines on two ranks: equal to one process, exact on resume, half a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, weights
from tests.ranks import run_ranks


class ShardedNet(PlainNet):
    def configure_model(self) -> None:
        if not isinstance(self.layers[0].weight, DTensor):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def fsdp2(**settings: Any) -> dict[str, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **settings)
    return {"strategy": strategy}


ENGINES: dict[str, tuple[type[PlainNet], Callable[[], dict[str, Any]]]] = {
    "fsdp2": (ShardedNet, fsdp2),
    "fsdp2-one-file": (ShardedNet, lambda: fsdp2(save_distributed_checkpoint=False)),
    "zero1": (PlainNet, lambda: {"strategy": cpu_deepspeed(1)}),
    "zero2": (PlainNet, lambda: {"strategy": cpu_deepspeed(2)}),
    "zero3": (PlainNet, lambda: {"strategy": cpu_deepspeed(3)}),
    "zero3-persistent": (PlainNet, lambda: {"strategy": cpu_deepspeed(3, persistent=True)}),
    "zero3-offload": (
        PlainNet,
        lambda: {"strategy": cpu_deepspeed(3, offload_optimizer=True, offload_parameters=True)},
    ),
}
HALF = {
    "fsdp2-bf16": (ShardedNet, lambda: {**fsdp2(), "precision": "bf16-true"}),
    "zero1-bf16": (PlainNet, lambda: {"strategy": cpu_deepspeed(1), "precision": "bf16-mixed"}),
    "zero2-bf16": (PlainNet, lambda: {"strategy": cpu_deepspeed(2), "precision": "bf16-true"}),
    "zero3-bf16": (PlainNet, lambda: {"strategy": cpu_deepspeed(3), "precision": "bf16-mixed"}),
}
ALL = {**ENGINES, **HALF}


def train(engine: str, ema: lt.EMA | None, *, plain: bool = False, **settings: Any) -> Any:
    kind, make = ALL[engine]
    module = build(kind)
    callbacks = [*([ema] if ema else []), *settings.pop("callbacks", [])]
    own = {} if plain else make()
    run = fit(module, train=rank_loader(), callbacks=callbacks, devices=2, use_distributed_sampler=False, **own, **settings)
    return module, run


class Seen(Callback):
    """The weights of the forward pass at each validation, and the fp32 masters at the end of each epoch."""

    def __init__(self) -> None:
        self.validated: list[Tensor] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        out = pl_module.layers(torch.eye(8, dtype=next(iter(pl_module.buffers()), torch.zeros(1)).dtype))
        self.validated.append(out.detach().float().clone())


def average(engine: str) -> tuple[dict[str, Any], float, int]:
    ema = lt.EMA(0.9)
    _, run = train(engine, ema)
    shard = sum(tensor.numel() for tensor in ema._running.tensors.values())
    state = {name: value.float().numpy() for name, value in ema.averaged_state_dict().items()}
    return state, float(run.callback_metrics["val_loss"]), shard


@pytest.mark.parametrize("engine", ALL)
def test_the_gathered_average_equals_one_process_and_a_rank_has_half(engine: str) -> None:
    (first, loss, shard), (second, _, other) = run_ranks(average, engine)
    ema, module = lt.EMA(0.9), build(PlainNet)
    alone = fit(module, callbacks=[ema], train=loader(48), accumulate_grad_batches=2)
    tolerance = 1e-6 if engine in ENGINES else 2e-2
    for state in (first, second):
        assert_close({name: torch.from_numpy(value) for name, value in state.items()}, ema.averaged_state_dict(), tolerance)
    assert loss == pytest.approx(float(alone.callback_metrics["val_loss"]), abs=tolerance)
    whole = sum(p.numel() for p in module.parameters())
    assert shard + other <= whole + 16  # padding
    assert abs(shard - other) <= 40


def resume(engine: str, folder: str) -> None:
    path = f"{folder}/half.ckpt"

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

    whole, rest = lt.EMA(0.9, at_end="raw"), lt.EMA(0.9, at_end="raw")
    through, _ = train(engine, whole, max_epochs=4, callbacks=[Save()])
    resumed, _ = train(engine, rest, max_epochs=4, ckpt_path=path)
    assert_equal(rest._running.tensors, whole._running.tensors)
    assert_equal(rest.averaged_state_dict(), whole.averaged_state_dict())
    assert_equal(rest._running.weights.state(), whole._running.weights.state())
    plain, _ = train(engine, None, max_epochs=4)
    assert_equal(type(whole._running.weights)(plain).state(), whole._running.weights.state()) if "zero" not in engine else None
    assert Path(path).is_dir() == (engine != "fsdp2-one-file")


@pytest.mark.parametrize("engine", ALL)
def test_resume_from_what_was_saved_is_exact_and_training_untouched(engine: str, tmp_path: Path) -> None:
    run_ranks(resume, engine, str(tmp_path))
