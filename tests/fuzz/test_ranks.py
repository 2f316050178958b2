"""Random modules on two ranks, under DDP and FSDP2, train with tricks as without them, or refuse them in time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Enrolment
from tests.fuzz.losses import LOSSES
from tests.fuzz.modules import HOOKS, TRAINERS, Spec
from tests.fuzz.parts import EXTRAS
from tests.fuzz.profiles import drawn
from tests.fuzz.runs import Outcome, accepted, fitted, repeated
from tests.fuzz.states import State
from tests.fuzz.tricks import AT_WORK, TRICKS, kind
from tests.ranks import run_ranks

STRATEGIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "DDP": lambda precision: {"strategy": "ddp_find_unused_parameters_true", "precision": precision},
    "FSDP2": lambda precision: lt.preset("fsdp2_bf16", precision=precision),
}
NETS = ("linear", "BatchNorm and dropout", "noise", "cached", "recurrent", "convolution", "experts")
STATES = ((), (State("list"),), (State("tensor", moment="on_train_batch_end"),), (State("number", moment="forward"),))
# Not here: what torch does not shard, or Lightning does not do on several devices.
WITHOUT = {
    "complex",
    "empty",
    "scalar",
    "parameters in a list",
    "integer parameter",
    "sparse embedding",
    "embedding with max_norm",
}
WITHOUT |= {"optimizer_step past Lightning", "training_step(dataloader_iter)", "transfer_batch_to_device", "state_dict"}
NAMES = [name for name in TRICKS if name != "find_lr"]  # which is another process's
PARTS = 5
Case = tuple[str, ...]  # tricks at their limits, or one at work and "at work"


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """A module that DDP and FSDP2 train without tricks."""
    few = lambda table: st.lists(st.sampled_from(sorted({*table} - WITHOUT)), max_size=2, unique=True).map(tuple)  # noqa: E731
    return Spec(
        net=draw(st.sampled_from(NETS)),
        batch=draw(st.sampled_from(["tuple", "dict", "dataclass", "nested"])),
        loss=draw(st.sampled_from(sorted({*LOSSES} - {"sometimes None"}))),
        optimizer=draw(st.sampled_from(["SGD", "Adam", "groups", "step schedule"])),
        states=draw(st.sampled_from(STATES)),
        extras=draw(few(EXTRAS)),
        hooks=draw(few(HOOKS)),
        trainer=draw(st.sampled_from(["plain", "accumulate", "clip", "bf16"])),
        seed=draw(st.integers(0, 9)),
    )


def cases(part: int) -> list[tuple[Case, Spec]]:
    """Some of the tricks: each in the simplest module and in others, at work, and beside three other tricks."""
    numbers, simplest, found = random.Random(part), list[Case](), list[Case]()
    for name in NAMES[part::PARTS]:
        simplest += [(name,)]
        found += [(name,), (name,), *((name, other) for other in numbers.sample([o for o in NAMES if o != name], 3))]
    for name in list(AT_WORK)[part::PARTS]:
        simplest += [(name, "at work")]
        found += [(name, "at work")]
    return [*((case, Spec()) for case in simplest), *zip(found, drawn(specs(), len(found), part), strict=True)]


def run(strategy: str, spec: Spec, trick: Enrolment, folder: Path) -> Outcome:
    """A fit on the ranks; of what is sharded, the whole."""
    more = {"precision": "32-true", **TRAINERS[spec.trainer]}
    settings = {**STRATEGIES[strategy](more.pop("precision")), **more, "max_epochs": 2, "devices": 2}
    outcome = fitted(spec, trick, settings, folder)
    whole = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in outcome.weights.items()}
    return replace(outcome, weights=whole)


def trained(strategy: str, given: list[tuple[Case, Spec]]) -> list[bool | str]:
    """Whether each case was accepted, or what is wrong with it, on this rank."""
    fits, ends = partial(run, strategy), list[bool | str]()
    for names, spec in given:
        try:
            at_work = names[1:] == ("at work",)
            ends.append(repeated(spec, names[0], run=fits) if at_work else accepted(spec, *names, run=fits))
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_without_a_trick_or_refuse_it_in_time(strategy: str, part: int) -> None:
    given = cases(part)
    first, second = run_ranks(trained, strategy, given, timeout=1200)
    assert [end for end in first + second if isinstance(end, str)] == []
    assert first == second
    never = {case for case, _ in given} - {case for (case, _), end in zip(given, first, strict=True) if end}
    alone = {case for case in never if case[1:] in ((), ("at work",))}  # which others may refuse
    assert {case for case in alone if strategy not in SETTINGS[kind(case[0])].refused} == set()
