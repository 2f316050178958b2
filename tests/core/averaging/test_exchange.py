"""Two lists of tensors change places: exactly, with one bucket to spare, and whatever is interrupted."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_tricks.core.averaging import transfer
from lightning_tricks.core.averaging.transfer import Exchange

Lists = tuple[list[Tensor], dict[str, Tensor]]


def lists() -> Lists:
    """Seven buckets on CPU, with tensors of any shape, layout and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (600, 600), (), (0, 4), (2**18,), (2**19,), (5, 7), (2**18 - 1,), (2,)]
    first, second = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    first[0][:] = torch.tensor([-0.0, float("nan"), float("inf")])
    first[1] = first[1].t()  # not contiguous
    return first, dict(zip("abcdefghi", second, strict=True))


def copied(both: Lists) -> Lists:
    return [t.clone() for t in both[0]], {name: t.clone() for name, t in both[1].items()}


def turned(both: Lists) -> Lists:
    return list(both[1].values()), dict(zip(both[1], both[0], strict=True))


def assert_same(both: Lists, other: Lists) -> None:
    values = [[*each[0], *each[1].values()] for each in (both, other)]
    for tensor, expected in zip(*values, strict=True):
        assert torch.equal(tensor.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def test_there_and_back_is_bit_equal() -> None:
    both = lists()
    before, swap = copied(both), Exchange(list(both[1]), both[0])
    for _ in range(2):
        swap.run(*both)
        swap.run(*both)
        assert_same(both, turned(before))
        swap.run(*both, back=True)
        swap.run(*both, back=True)
        assert_same(both, before)


def test_only_one_bucket_is_held_besides_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> int:
        return sum(t.nbytes for t in gc.get_objects() if type(t) is Tensor)

    both, most, real = lists(), 0, transfer.copy_
    before = held()

    def measured(targets: list[Tensor], sources: list[Tensor]) -> None:
        nonlocal most
        most = max(most, held() - before)
        real(targets, sources)

    monkeypatch.setattr(transfer, "copy_", measured)
    Exchange(list(both[1]), both[0]).run(*both)
    assert 0 < most <= 2**21  # the largest tensor


@pytest.mark.few(18)
@pytest.mark.parametrize("stop", range(1, 15))
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("back", [False, True])
def test_an_interrupt_anywhere_leaves_both_ways_open(
    stop: int, part: int, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for then_back in (False, True):
        both = lists()
        before, swap, copies, real = copied(both), Exchange(list(both[1]), both[0]), 0, transfer.copy_
        if back:
            swap.run(*both)

        def interrupted(targets: list[Tensor], sources: list[Tensor], real: Any = real) -> None:
            nonlocal copies
            copies += 1
            if copies == stop:
                real(targets[:part], sources[:part])
                raise KeyboardInterrupt
            real(targets, sources)

        monkeypatch.setattr(transfer, "copy_", interrupted)
        try:
            swap.run(*both, back=back)
        except KeyboardInterrupt:
            copies = -100
        monkeypatch.setattr(transfer, "copy_", real)
        swap.run(*both, back=then_back)
        assert_same(both, before if then_back else turned(before))


def test_nothing_to_exchange_is_no_error() -> None:
    Exchange([], []).run([], {})
