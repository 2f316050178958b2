"""Random modules on two ranks, under DDP and FSDP2, train with tricks as without them, or refuse them in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import lightning_tricks as lt
from tests.conformance.trick import Trick
from tests.fuzz.modules import EXTRAS, HOOKS, LOSSES, TRAINERS, Spec
from tests.fuzz.profiles import cases
from tests.fuzz.states import State
from tests.fuzz.test_modules import IMAGES, SWEEP, TRICKS, Outcome, difference, fitted, known, refusal_problem
from tests.ranks import run_ranks

STRATEGIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "DDP": lambda precision: {"strategy": "ddp_find_unused_parameters_true", "precision": precision},
    "FSDP2": lambda precision: lt.preset("fsdp2_bf16", precision=precision),
}
NETS = ("linear", "BatchNorm and dropout", "noise", "cached", "recurrent")
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
NAMES = sorted(name for name, trick in TRICKS.items() if trick is not SWEEP and name not in IMAGES)


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


def drawn(part: int, number: int) -> list[tuple[Spec, str]]:
    """The same modules and tricks for all ranks."""
    found: list[tuple[Spec, str]] = []

    @seed(part)
    @cases(number, print_blob=False)
    @given(spec=specs(), name=st.sampled_from(NAMES))
    def draw(spec: Spec, name: str) -> None:
        found.append((spec, name))

    draw()
    return found


def ended(spec: Spec, trick: Trick, strategy: str) -> Outcome:
    more = {"precision": "32-true", **TRAINERS[spec.trainer]}
    settings = {**STRATEGIES[strategy](more.pop("precision")), **more, "max_epochs": 2, "devices": 2}
    with TemporaryDirectory() as folder:
        outcome = fitted(spec, trick, settings, Path(folder), None, "off")
    local = {name: w.to_local() if isinstance(w, DTensor) else w for name, w in outcome.weights.items()}
    return replace(outcome, weights=local)


def problems(strategy: str, given: list[tuple[Spec, str]]) -> list[str]:
    """What is wrong with each of the tricks, on this rank."""
    said = []
    for spec, name in given:
        plain = ended(spec, Trick(), strategy)
        assert plain.refused is None, f"{spec} does not train: {plain.refused}"
        try:
            other = ended(spec, TRICKS[name], strategy)
            problem = refusal_problem(name, other.refused) if other.refused else difference(plain, other)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            said.append(f"{name} with {spec}: {problem}")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_without_a_trick_or_refuse_it_in_time(strategy: str, part: int) -> None:
    given = [(spec, name) for spec, name in drawn(part, 40) if not known(spec, name)]
    assert run_ranks(problems, strategy, given, timeout=1200) == [[], []]
