"""Which objects and arguments a call finds on the stack."""

from __future__ import annotations

from itertools import islice

from lightning_tricks.core.call_stack import callers, locals_of


class Owner:
    def read(self, depth: int) -> list[object]:
        return self.read(depth - 1) if depth else through_a_function()


def through_a_function() -> list[object]:
    return ask()


def ask() -> list[object]:
    return list(islice(callers(), 4))


def test_callers_come_from_the_innermost_on_and_functions_are_none() -> None:
    owner = Owner()
    assert owner.read(1) == [None, owner, owner, None]


def outer(word: str, times: int) -> str | None:
    return outer(word * 2, times - 1) if times else inner()


def inner() -> str | None:
    found = locals_of(outer)
    return None if found is None else found["word"]


def test_locals_are_those_of_the_innermost_running_call() -> None:
    assert outer("a", 2) == "aaaa"
    assert inner() is None
