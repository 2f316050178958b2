"""Random modules with two tricks at once, and with tricks at work: trained rightly, or refused before a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Trick
from tests.fuzz.modules import Spec, specs, suited
from tests.fuzz.profiles import cases
from tests.fuzz.test_modules import IMAGES, SWEEP, TRICKS, Outcome, difference, known, refusal_problem, run

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about what users do

OFF = sorted(name for name, trick in TRICKS.items() if trick is not SWEEP)
# Not here: guards, which wait for a bad batch; schedules, as in test_modules, but for ScheduleFree; inputs of another
# size than the layers'; rates of this machine.
WITHOUT = ("Compile", "DataWait", "GradCacheMixin", "Throughput")
ON = sorted(
    name
    for name, trick in SETTINGS.items()
    if (trick.callbacks or trick.sam) and not (trick.spoiled or trick.stops or trick.grows or name in WITHOUT)
)


def both(one: Trick, other: Trick) -> Trick:
    """Two tricks as one."""
    return replace(
        one,
        callbacks={"off": lambda: [*one.make_callbacks("off"), *other.make_callbacks("off")]},
        sam=one.sam or other.sam,
    )


def refusal_of(names: list[str], error: BaseException) -> str:
    """What the error does not tell a user who has these tricks; "" if it tells all."""
    problems = [refusal_problem(name, error) for name in names]
    return "" if "" in problems else problems[0]


def suited_to(spec: Spec, names: list[str]) -> Spec:
    return suited(replace(spec, net="convolution")) if any(name in IMAGES for name in names) else spec


def problem_of_pair(spec: Spec, names: list[str]) -> str:
    """What is wrong with two tricks at their no-op limits; "" if they change nothing or are refused in time."""
    spec = suited_to(spec, names)
    if any(known(spec, name) for name in names):
        return ""
    with TemporaryDirectory() as folder:
        plain = run(spec, Trick(), Path(folder))
        together = run(spec, both(TRICKS[names[0]], TRICKS[names[1]]), Path(folder))
    return refusal_of(names, together.refused) if together.refused else difference(plain, together)


def problem_at_work(spec: Spec, name: str) -> str:
    """What is wrong with a trick at work; "" if it trains the same weights twice or is refused in time."""
    spec = suited_to(spec, [name])
    if known(spec, name):
        return ""
    ends: list[Outcome] = []
    for _ in range(2):
        with TemporaryDirectory() as folder:
            ends.append(run(spec, SETTINGS[name], Path(folder), "on"))
    refused = ends[0].refused
    return refusal_problem(name, refused) if refused else difference(*ends)


def many(part: int, number: int) -> None:
    @seed(part)
    @cases(number, print_blob=False)
    @given(spec=specs(), names=st.lists(st.sampled_from(OFF), min_size=2, max_size=2, unique=True))
    def pairs(spec: Spec, names: list[str]) -> None:
        assert not told(problem_of_pair, spec, names), (names, spec)

    @seed(part)
    @cases(number, print_blob=False)
    @given(spec=specs(), name=st.sampled_from(ON))
    def at_work(spec: Spec, name: str) -> None:
        assert not told(problem_at_work, spec, name), (name, spec)

    pairs()
    at_work()


def told(problem: Any, *given: Any) -> str:
    """The problem, or the error that is none of ours."""
    try:
        return problem(*given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_two_tricks_and_tricks_at_work_train_or_are_refused_in_time() -> None:
    many(0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 11))
def test_many_more_pairs_and_tricks_at_work_train_or_are_refused_in_time(part: int) -> None:
    many(part, 100)
