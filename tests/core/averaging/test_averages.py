"""Averages in the module, beside it and in a checkpoint: every copy exact, whatever the names and dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import float_buffers, trainable
from tests.nets import assert_equal, weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight


class Renamed(nn.Module):
    """A module that saves its weights under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {f"net.{name}": value for name, value in state.items()} | {"version": 3}


class RenamedCopies(Renamed):
    """Saves copies under other names, so that nothing but the call itself tells which weight is which."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}


class Cloned(Tied):
    """A module that saves copies of its weights."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def bf16() -> nn.Module:
    return nn.Linear(3, 3).bfloat16()


def make(kind: Callable[[], nn.Module], *, buffers: bool = False, updates: int = 3) -> Averages:
    """Averages after some updates of a module whose weights move at random."""
    torch.manual_seed(0)
    averages = Averages(LocalWeights(kind()))
    averages.track({**trainable(averages.module), **(float_buffers(averages.module) if buffers else {})})
    for _ in range(updates):
        move(averages.module)
        averages.lerp(0.1)
    return averages


@torch.no_grad()
def move(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.add_(torch.randn(tensor.shape).to(tensor.dtype) if tensor.is_floating_point() else 1)


def expected(averages: Averages) -> dict[str, Tensor]:
    """The module's own state with the averages in the place of the weights they are of."""
    values = {_place(w): a for w, a in zip(averages.parts(), averages.tensors.values(), strict=True)}
    own = nn.Module.state_dict(averages.module)
    return {name: values.get(_place(v), v).to(v.dtype, copy=True) for name, v in own.items()}


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr()


EACH = pytest.mark.parametrize(
    ("kind", "buffers"),
    [
        (Tied, False),
        (Renamed, False),
        (RenamedCopies, False),
        (Cloned, False),
        (norm_net, False),
        (norm_net, True),
        (bf16, False),
    ],
    ids=["tied", "renamed", "renamed-copies", "cloned", "batchnorm", "batchnorm-averaged", "bf16"],
)


@EACH
def test_an_average_is_the_running_formula_in_fp32(kind: Callable[[], nn.Module], buffers: bool) -> None:
    averages = make(kind, buffers=buffers, updates=0)
    reference = {name: value.detach().double() for name, value in averages.tensors.items()}
    for _ in range(5):
        move(averages.module)
        averages.lerp(0.1)
        now = zip(reference, averages.parts(), strict=True)
        reference = {name: 0.9 * reference[name] + 0.1 * w.detach().double() for name, w in now}
    for name, average in averages.tensors.items():
        assert average.dtype is torch.float32
        torch.testing.assert_close(average.double(), reference[name], atol=1e-6, rtol=1e-6)
    assert averages.updates == 5


@EACH
def test_showing_swaps_in_and_back_bit_for_bit(kind: Callable[[], nn.Module], buffers: bool) -> None:
    averages = make(kind, buffers=buffers)
    raw, averaged = copy.deepcopy(nn.Module.state_dict(averages.module)), expected(averages)
    for _ in range(2):
        averages.show("averaged")
        averages.show("averaged")
        assert averages.holds == "averaged"
        assert_equal(nn.Module.state_dict(averages.module), averaged)
        averages.show("raw")
        assert averages.holds == "raw"
        assert_equal(nn.Module.state_dict(averages.module), raw)


@EACH
@pytest.mark.parametrize("held", ["raw", "averaged"])
def test_either_set_goes_into_the_state_dict_whatever_is_held(
    kind: Callable[[], nn.Module], buffers: bool, held: Any
) -> None:
    averages = make(kind, buffers=buffers)
    both = {"raw": weights_of(nn.Module.state_dict(averages.module)), "averaged": expected(averages)}
    averages.show(held)
    for which in ("raw", "averaged"):
        with averages.showing(which):
            found = copy.deepcopy(averages.module.state_dict())
        assert found.keys() == averages.module.state_dict().keys()
        tensors = {name.removeprefix("net."): value for name, value in found.items() if isinstance(value, Tensor)}
        assert_equal(tensors, both[which])
    assert averages.holds == held


def weights_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def test_before_the_first_update_the_averaged_weights_are_the_raw_ones() -> None:
    averages = make(Tied, updates=0)
    move(averages.module)
    raw = weights(averages.module)
    averages.show("averaged")
    assert averages.holds == "raw"
    with averages.showing("averaged"):
        assert_equal(averages.module.state_dict(), raw)


@EACH
@pytest.mark.parametrize("saved", ["raw", "averaged"])
@pytest.mark.parametrize("held", ["raw", "averaged"])
@pytest.mark.parametrize("updates", [0, 3])
def test_a_checkpoint_restores_both_sets_bit_for_bit(
    kind: Callable[[], nn.Module], buffers: bool, saved: Any, held: Any, updates: int
) -> None:
    averages = make(kind, buffers=buffers, updates=updates)
    move(averages.module)
    raw = weights_of(nn.Module.state_dict(averages.module))
    averages.show(held)
    with averages.showing(saved):
        file = copy.deepcopy({"net": averages.module.state_dict(), "averages": averages.state_dict()})
    restored = Averages(LocalWeights(kind()))
    tensors = {name.removeprefix("net."): value for name, value in file["net"].items() if isinstance(value, Tensor)}
    restored.module.load_state_dict(tensors)
    names = {**file["averages"]["raw"], **file["averages"]["averaged"]}
    restored.load_state_dict(file["averages"], names)
    assert_equal(nn.Module.state_dict(restored.module), raw)
    averages.show("raw")
    assert_equal(restored.tensors, averages.tensors)
    assert restored.updates == averages.updates
    for each in (averages, restored):
        each.track(trainable(each.module))
        each.lerp(0.5)
    assert_equal(restored.tensors, averages.tensors)


def test_a_checkpoint_keeps_only_what_the_state_dict_cannot() -> None:
    fp32, half = make(Tied), make(bf16)
    assert fp32.state_dict()["raw"] == half.state_dict()["raw"] == {}
    fp32.show("averaged"), half.show("averaged")
    assert fp32.state_dict()["averaged"] == {}
    assert half.state_dict()["averaged"].keys() == half.tensors.keys()


def test_a_write_to_the_parameters_after_leaving_is_noticed_and_one_of_ours_is_not() -> None:
    averages = make(norm_net)
    averages.remember_weights()
    with averages.showing("averaged"):
        pass
    averages.module.train()(torch.randn(4, 3))  # moves buffers only
    assert averages.unchanged()
    averages.module.load_state_dict(averages.module.state_dict())
    assert averages.unchanged()
    weight = averages.module[0].weight
    for write in (lambda: weight.data.copy_(weight.flip(0).clone()), lambda: weight.data.add_(1e-6)):
        averages.remember_weights()
        write()
        assert not averages.unchanged()
    with averages.showing("averaged"):
        pass
    assert not averages.unchanged()


def test_a_weight_that_is_gone_is_named() -> None:
    averages = make(Tied)
    del averages.module.b
    with pytest.raises(MisconfigurationException, match=r"has lost b\.bias, which is averaged"):
        averages.show("averaged")


def test_an_unknown_name_is_left_out() -> None:
    averages = make(Tied)
    averages.show("averaged")
    state = averages.state_dict()
    other = Averages(LocalWeights(nn.ModuleDict({"a": nn.Linear(3, 3)})))
    other.load_state_dict(state, state["raw"])
    assert list(other.tensors) == ["a.weight", "a.bias"]
    assert_equal(weights(other.module), {name: state["raw"][name] for name in ("a.weight", "a.bias")})


def test_a_weight_tracked_later_starts_at_its_value() -> None:
    averages = make(Tied, updates=0)
    averages.tensors.pop("b.bias")
    averages.track({})
    move(averages.module)
    averages.lerp(0.1)
    before = averages.tensors["a.weight"].clone()
    averages.track(trainable(averages.module))
    assert torch.equal(averages.tensors["b.bias"], dict(averages.module.named_parameters())["b.bias"])
    assert torch.equal(averages.tensors["a.weight"], before)


def test_a_buffer_assigned_anew_is_followed() -> None:
    averages = make(norm_net, buffers=True, updates=0)
    averages.module[1].running_mean = torch.full((3,), 10.0)
    averages.lerp(0.1)
    assert torch.equal(averages.tensors["1.running_mean"], torch.full((3,), 1.0))


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("kind", [Tied, bf16])
def test_an_interrupted_swap_leaves_the_way_back(
    kind: Callable[[], nn.Module], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages = make(kind)
    raw = weights(averages.module)
    real = torch._foreach_copy_

    def interrupted(targets: list[Tensor], sources: list[Tensor]) -> None:
        monkeypatch.setattr(torch, "_foreach_copy_", real)
        if number:
            real(targets[:number], sources[:number])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        averages.show("averaged")
    averages.show("raw")
    assert_equal(weights(averages.module), raw)


def test_averages_live_on_the_device_asked_for() -> None:
    averages = Averages(LocalWeights(nn.Linear(2, 2)), "meta")
    averages.track(trainable(averages.module))
    assert {average.device.type for average in averages.tensors.values()} == {"meta"}
