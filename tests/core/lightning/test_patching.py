"""A method is wrapped for a while, and by several."""

from __future__ import annotations

from itertools import permutations

from torch import nn

from lightning_tricks.core.lightning.patching import wrap_method


class Owner(nn.Module):
    def forward(self, a: int, b: int = 1) -> int:
        return a + b


def test_a_method_is_wrapped_until_it_is_given_back() -> None:
    owner, other = Owner(), Owner()
    undo = wrap_method(owner, "forward", lambda original, *args, **kwargs: 10 * original(*args, **kwargs))
    assert (owner.forward(1, b=2), other.forward(1, b=2)) == (30, 3)
    undo()
    undo()
    assert owner.forward(1, b=2) == 3
    assert "forward" not in vars(owner)


def test_wrappers_undone_in_any_order_leave_nothing() -> None:
    for order in permutations(range(3)):
        owner, undo = Owner(), []
        for factor in (2, 3, 5):
            undo.append(wrap_method(owner, "forward", lambda original, a, factor=factor: factor * original(a)))
        assert owner.forward(1) == 60
        left = 60
        for place in order:
            undo[place]()
            left //= (2, 3, 5)[place]
            assert owner.forward(1) == left, order
        assert "forward" not in vars(owner), order


# -- the transfer of batches ------------------------------------------------------------------------------------------
