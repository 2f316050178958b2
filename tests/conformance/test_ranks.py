"""Two processes train what one process trains on their batches: DDP, FSDP2 and ZeRO-3, or refuse by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from tests.conformance.engines import cpu_deepspeed
from tests.conformance.runs import Gather, ShardedNet, Steps, fitted, refusal, run
from tests.conformance.settings import NAMES, SETTINGS
from tests.conformance.trick import public_name
from tests.nets import PlainNet, assert_close, build, fit, loader, rank_loader
from tests.ranks import Cases, run_cases, run_ranks


def two_ranks(name: str, strategy: str) -> dict[str, Any] | str:
    torch.compiler.reset()
    settings = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    if "DDP" in SETTINGS[name].refused:
        return refusal(SETTINGS[name], PlainNet, train=rank_loader(), **settings)
    ended = run(SETTINGS[name], base=PlainNet, train=rank_loader(), **settings)
    return {key: value.numpy() for key, value in ended.items()}


@pytest.fixture(scope="module")
def ended(selected: Callable[..., list[str]]) -> Callable[[str], Cases]:
    """What all tricks give with a strategy, in the same two processes."""
    return cache(lambda strategy: run_cases(two_ranks, selected("name", strategy=strategy), strategy))


APART, TOGETHER = "the batches of the ranks in turn", "those of both ranks as one"


@cache
def alone(name: str, batches: str, strategy: str = "auto") -> dict[str, torch.Tensor]:
    """What one process gives, with which several engines are compared."""
    apart = {"train": loader(48), "accumulate_grad_batches": 2}
    given = apart if batches == APART else {"train": loader(48, batch_size=16)}
    return run(SETTINGS[name], base=PlainNet, **given, strategy=strategy)


KINDS = ("AdaptiveClip", "EMA", "HardExampleFilter", "Mixup", "SAMMixin", "SkipNonFinite", "cosine")
NAMED = [pytest.param(each) if isinstance(each, str) else each for each in NAMES]
CELLS = [
    *(pytest.param("ddp", *each.values, marks=each.marks) for each in NAMED),
    *(
        pytest.param("ddp_bf16", name, marks=marks if name in KINDS else pytest.mark.slow)
        for (name,), marks, _ in NAMED
    ),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("strategy", "name"), CELLS)  # in fp32 all of them, in 16 bits one of each kind
def test_two_ranks_agree_and_equal_one_process(
    name: str, strategy: str, ended: Callable[[str], Cases], cell: Callable[..., None]
) -> None:
    first, second = ended(strategy)[name]
    if "DDP" in SETTINGS[name].refused:
        assert "DDP" in first
        assert public_name(name) in first
        if strategy == "ddp":
            cell(name, "DDP", "refused", first)
        return
    assert all((first[key] == second[key]).all() for key in first)
    bf16, by_itself = strategy == "ddp_bf16", "accumulate" in SETTINGS[name].refused
    expected = alone(name, TOGETHER if by_itself else APART, "single_bf16" if bf16 else "auto")
    wide = by_itself and bf16  # 16 bits round sums over other batches differently
    for key, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(first[key]), value, atol=1e-3 if wide else 1e-5, rtol=1e-4)
    if not bf16:
        cell(name, "DDP")


def sharded(name: str, engine: str) -> dict[str, Any] | str:
    torch.compiler.reset()
    fsdp = engine == "FSDP2"
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if fsdp else cpu_deepspeed()
    trick, gather, steps = SETTINGS[name], Gather(), Steps()
    callbacks = [*trick.make_callbacks("on"), gather, steps]
    try:
        fitted(
            trick.module(ShardedNet if fsdp else PlainNet, "on"),
            train=rank_loader(),
            callbacks=callbacks,
            strategy=strategy,
            devices=2,
            use_distributed_sampler=False,
        )
    except MisconfigurationException as error:
        assert steps.made == 0, "refused too late"
        return str(error)
    return {name: weight.numpy() for name, weight in gather.weights.items()}


@pytest.fixture(scope="module")
def gathered(selected: Callable[..., list[str]]) -> Callable[[str], Cases]:
    """The full weights or refusals of all tricks with an engine, in the same two processes."""
    return cache(lambda engine: run_cases(sharded, selected("name", engine=engine), engine))


SHARDED = [
    *(pytest.param("FSDP2", *each.values, marks=each.marks) for each in NAMED),
    *(  # one of each kind, and what is refused
        pytest.param("DeepSpeed", name, marks=marks if quick else pytest.mark.slow)
        for (name,), marks, _ in NAMED
        for quick in [name in KINDS or "DeepSpeed" in SETTINGS[name].refused]
    ),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("engine", "name"), SHARDED)
def test_sharded_weights_are_right_or_refused_by_name(
    name: str, engine: str, gathered: Callable[[str], Cases], cell: Callable[..., None]
) -> None:
    first, _ = gathered(engine)[name]
    if engine in SETTINGS[name].refused:
        names = {"FSDP2": ("ModelParallelStrategy", "FSDP2"), "DeepSpeed": ("DeepSpeedStrategy", "ZeRO-3")}
        assert any(each in first for each in names[engine])
        assert public_name(name).removesuffix("Mixin") in first
        cell(name, engine, "refused", first)
    else:
        expected = alone(name, APART if SETTINGS[name].by_batches else TOGETHER)
        assert_close({key: torch.from_numpy(value) for key, value in first.items()}, expected, 1e-5)
        cell(name, engine)


def accumulating_across_epochs() -> str:
    module = build(SETTINGS["cosine"].module(PlainNet, "on"))
    with pytest.raises(lt.UnknownTotalSteps) as caught:
        fit(module, strategy=cpu_deepspeed(), devices=2, accumulate_grad_batches=2)
    return str(caught.value)


def test_accumulation_by_deepspeed_is_not_counted_but_refused() -> None:
    first, second = run_ranks(accumulating_across_epochs)
    assert first == second
    assert first.endswith(": CPUDeepSpeedStrategy accumulates gradients across epochs; pass total_steps=...")
