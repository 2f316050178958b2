"""Averages of shards by the real engines on two ranks: equal to one process, exact on resume, half on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from lightning_tricks.core.weights.by_engine import local_weights
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, SaveAt, assert_close, assert_equal, build, fit, loader, rank_loader, trainer
from tests.ranks import Cases, run_cases, run_ranks


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
QUICK = ["fsdp2", "fsdp2-one-file", "zero3"]
each = pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL]
)


def train(engine: str, ema: lt.EMA | None, *, plain: bool = False, **settings: Any) -> Any:
    kind, make = ALL[engine]
    module = build(kind)
    callbacks = [*([ema] if ema else []), *settings.pop("callbacks", [])]
    own = {} if plain else make()
    run = fit(
        module, train=rank_loader(), callbacks=callbacks, devices=2, use_distributed_sampler=False, **own, **settings
    )
    return module, run


class State(Callback):
    """The whole raw weights when training ends."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = local_weights(trainer, pl_module, "State").state()


def scores(run: L.Trainer) -> list[float]:
    return [float(run.callback_metrics[name]) for name in ("val_loss", "val_loss_raw")]


def average(engine: str) -> tuple[dict[str, Any], list[float], int]:
    ema = lt.EMA(0.9, validate="both")
    _, run = train(engine, ema)
    shard = sum(tensor.numel() for tensor in ema._running.tensors.values())
    state = {name: value.float().numpy() for name, value in ema.averaged_state_dict().items()}
    return state, scores(run), shard


@pytest.fixture(scope="module")
def in_turn(selected: Callable[..., list[str]]) -> Callable[..., Cases]:
    """What a function gives for all engines of a library, in the same two processes."""

    def of(function: Callable[..., Any], library: str, *args: Any) -> Cases:
        return run_cases(function, [name for name in selected("engine") if name.startswith(library)], *args)

    return cache(of)


@each
def test_the_gathered_average_equals_one_process_and_a_rank_has_half(
    engine: str, in_turn: Callable[..., Cases]
) -> None:
    (first, losses, shard), (second, _, other) = in_turn(average, engine[:4])[engine]
    ema, module = lt.EMA(0.9, validate="both"), build(PlainNet)
    alone = fit(module, callbacks=[ema], train=loader(48), accumulate_grad_batches=2)
    tolerance = 1e-6 if engine in ENGINES else 2e-2
    for state in (first, second):
        assert_close(
            {name: torch.from_numpy(value) for name, value in state.items()}, ema.averaged_state_dict(), tolerance
        )
    assert losses == pytest.approx(scores(alone), abs=tolerance)
    assert losses[0] != losses[1]
    whole = sum(p.numel() for p in module.parameters())
    assert shard + other <= whole + 16  # padding
    assert abs(shard - other) <= 40


def resume(engine: str, folder: str) -> None:
    path = f"{folder}/{engine}.ckpt"

    emas, states = [lt.EMA(0.9, at_end="raw") for _ in range(2)], [State() for _ in range(3)]
    train(engine, emas[0], max_epochs=4, callbacks=[SaveAt(path, epoch=1), states[0]])
    assert Path(path).is_dir() == (engine != "fsdp2-one-file")
    train(engine, emas[1], max_epochs=4, callbacks=[states[1]], ckpt_path=path)
    assert_equal(emas[1]._running.tensors, emas[0]._running.tensors)
    assert_equal(emas[1].averaged_state_dict(), emas[0].averaged_state_dict())
    assert_equal(states[1].weights, states[0].weights)
    train(engine, None, max_epochs=4, callbacks=[states[2]])
    assert_equal(states[2].weights, states[0].weights)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("saved"))


@pytest.mark.few(1)
@each
def test_resume_from_what_was_saved_is_exact_and_training_untouched(
    engine: str, folder: str, in_turn: Callable[..., Cases]
) -> None:
    assert in_turn(resume, engine[:4], folder)[engine] == [None, None]


class Breaks(Callback):
    """Fails in a validation; from then on no rank answers another."""

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > 3:
            for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast"):
                setattr(dist, name, None)
                setattr(deepspeed.comm, name, None)
            raise RuntimeError("planned")


def fail(engine: str) -> None:
    ema, state = lt.EMA(0.9), State()
    train(engine, None, max_epochs=2, callbacks=[state])
    with pytest.raises(RuntimeError, match="planned"):
        train(engine, ema, max_epochs=3, callbacks=[Breaks()])
    weights, expected = ema._running.weights, state.weights
    assert ema._running.holds == "raw"
    if engine == "zero2":
        assert_equal(weights.state(), expected)
    for name, part in weights.trainable().items():
        whole = expected[name].flatten()
        assert part.numel() <= whole.numel()
        assert torch.isin(part[: part.numel() // 2].flatten(), torch.cat([whole, torch.zeros(1)])).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["fsdp2", "zero2", "zero3"])
def test_the_raw_weights_come_back_without_the_other_ranks(engine: str) -> None:
    run_ranks(fail, engine)


def refused(settings: dict[str, Any]) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        fit(build(PlainNet), callbacks=[lt.EMA()], devices=2, strategy=cpu_deepspeed(**settings))
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stage": 3, "offload_optimizer": True, "offload_optimizer_device": "nvme"}, "with weights on NVMe. Offload"),
        ({"stage": 0}, "ZeRO-3, got DeepSpeedStrategy (DeepSpeed without ZeRO). Use such a strategy"),
    ],
)
def test_what_has_no_shards_to_find_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    message = run_ranks(refused, settings)[0].replace("CPUDeepSpeed", "DeepSpeed")
    assert message.startswith("EMA ")
    assert said in message


def test_fsdp1_is_refused_by_name() -> None:
    class OnCPU(FSDPStrategy):  # FSDP itself is refused on CPU
        pass

    with pytest.raises(MisconfigurationException, match=r"EMA works under .* got OnCPU\."):
        local_weights(trainer(strategy=OnCPU()), build(PlainNet), "EMA")
