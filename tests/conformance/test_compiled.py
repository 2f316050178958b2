"""A compiled network trains, with a trick, what the same network trains eagerly, alone and in two processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.conformance.runs import Compiled, refusal, run
from tests.conformance.settings import SETTINGS, quick
from tests.conformance.trick import NEEDS, Enrolment, public_name
from tests.nets import PlainNet, assert_close, loader, rank_loader
from tests.ranks import Cases, run_cases

# Graphs that a trick compiles beyond those of the same network without it, and breaks of graphs; all others cause none.
MORE = {
    "Distill": ((1, 4), "the hook of the module is called eagerly, and the teacher runs in eval mode"),
    "Distill(module)": ((0, 3), "the hook of the module is called eagerly"),
    "GradualUnfreeze": ((1, 0), "other weights have gradients once a stage begins"),
    "HiddenMixup": ((0, 3), "the hook of the layer that is mixed draws random numbers and looks at what came in"),
    "InspectTraining": ((2, 0), "a step that is looked at has hooks on every layer"),
    "LayerFreezing": ((1, 0), "fewer weights have gradients once a stage begins"),
    "LeanLoss": ((-3, 6), "the head is called eagerly, and torch gives up a Sequential whose loop is interrupted"),
    "lean_loss": ((-3, 6), "the head is called eagerly, and torch gives up a Sequential whose loop is interrupted"),
    'LoRA(variant="dora")': ((6, 11), "peft asks each call whether a weight is one of torchao's"),
    "NEFTune": ((6, 6), "the hook of the embedding draws random numbers of the batch's seed"),
    "QAT": ((8, 13), "torchao imports a module in each call of a quantized layer"),
}


def compiled_run(trick: Enrolment) -> tuple[dict[str, Any], int, int]:
    """Trained weights of the compiled network, the number of graphs, and that of their breaks."""
    torch.compiler.reset()
    counters.clear()
    ended = run(trick, base=Compiled)
    return ended, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@cache
def compiled_alone(*needs: Any) -> tuple[int, int]:
    return compiled_run(Enrolment(**dict(zip(NEEDS, needs, strict=True))))[1:]


# torch's compiler looks at it where a hook interrupts a network
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", quick("EMA", "Mixup", "SAMMixin", "SkipNonFinite", "cosine"))
def test_a_compiled_network_gives_the_same_in_the_same_graphs(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    compiled, graphs, breaks = compiled_run(trick)
    eager = run(trick, base=PlainNet)
    assert_close({key: compiled[key] for key in eager}, eager)
    usual = compiled_alone(*(getattr(trick, need) for need in NEEDS))
    assert (graphs - usual[0], breaks - usual[1]) == MORE.get(name, ((0, 0), ""))[0]
    cell(name, "compile")


def two_compiled(name: str) -> dict[str, Any] | str:
    torch.compiler.reset()
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    if "DDP" in SETTINGS[name].refused:
        return refusal(SETTINGS[name], Compiled, train=rank_loader(), **settings)
    ended = run(SETTINGS[name], base=Compiled, train=rank_loader(), **settings)
    return {key: value.numpy() for key, value in ended.items()}


@pytest.fixture(scope="module")
def compiled(selected: Callable[..., list[str]]) -> Callable[[], Cases]:
    """What all tricks give under DDP in a compiled network, in the same two processes."""
    return cache(lambda: run_cases(two_compiled, selected("name", devices=2)))


@pytest.mark.parametrize("name", quick("EMA"))
@pytest.mark.parametrize("devices", [2])
def test_compiled_networks_in_processes_equal_one_process(
    name: str, devices: int, compiled: Callable[[], Cases], cell: Callable[..., None]
) -> None:
    trick = SETTINGS[name]
    first, second = compiled()[name]
    if "DDP" in trick.refused:
        assert "DDP" in first
        assert public_name(name) in first
        cell(name, "compiled DDP", "refused", first)
        return
    by_itself = "accumulate" in trick.refused
    batches = {"train": loader(48, 16)} if by_itself else {"train": loader(48), "accumulate_grad_batches": 2}
    for key, value in run(trick, base=PlainNet, **batches).items():
        assert (first[key] == second[key]).all()
        torch.testing.assert_close(torch.from_numpy(first[key]), value, atol=1e-5, rtol=1e-4)
    cell(name, "compiled DDP")
