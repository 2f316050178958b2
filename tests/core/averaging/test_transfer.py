"""Two lists of tensors change places: exactly, with one bucket to spare, and whatever is interrupted."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core.averaging import transfer
from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.transfer import Exchange, Offload
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import trainable
from tests.device.devices import CUDA, device
from tests.nets import Net, PlainNet, assert_close, assert_equal, build, fit, loader, trainer, weights

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


@pytest.mark.few(9)
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


# -- averages in host memory of weights on a GPU: the copy under way is never overtaken by the next step --------------


def test_nothing_is_offloaded_from_the_host_or_to_the_device() -> None:
    tensor = torch.zeros(3)
    assert Offload.between({"x": tensor}, [tensor]) is None
    assert Offload.between({}, []) is None


def big(width: int, name: str) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).to(name)


@pytest.mark.parametrize("on", CUDA)
def test_a_copy_is_complete_before_the_weights_change(on: str) -> None:
    """On a real device the layers are large, so that a copy takes its time; a simulated one finds what is too early."""
    with device(on) as there:
        module = big(2048 if there.simulation is None else 4, there.name)
        averages = Averages(LocalWeights(module), "cpu")
        averages.track(trainable(module))
        reference = {name: value.clone() for name, value in averages.tensors.items()}
        for step in range(20):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(float(step))
            averages.lerp(0.5)
            averages.guard()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(1e9)  # what a step that comes too early would leave in the average
            reference = {name: value + 0.5 * (step - value) for name, value in reference.items()}
        assert all(value.device.type == "cpu" for value in averages.tensors.values())
        for name, value in averages.tensors.items():
            torch.testing.assert_close(value, reference[name])
        if there.simulation is not None:
            assert not there.simulation.races
            assert "synchronize" not in {wait.what for wait in there.simulation.waits}


@pytest.mark.parametrize("on", CUDA)
def test_a_weight_written_to_in_the_forward_pass_is_an_error(on: str) -> None:
    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[0].weight.mul_(1.0)
            return super().forward(x)

    with device(on) as there:
        fit(build(Writes), callbacks=[lt.EMA(0.9)], accelerator=there.name)
        with pytest.raises(RuntimeError, match="Use device=None for a module that changes its weights in the forward"):
            fit(build(Writes), callbacks=[lt.EMA(0.9, device="cpu")], accelerator=there.name)


@pytest.mark.few(2)
@pytest.mark.parametrize("on", CUDA)
@pytest.mark.parametrize("settings", [{}, {"precision": "16-mixed"}, {"precision": "bf16-true"}], ids=str)
def test_a_fit_gives_the_same_average_in_either_memory(settings: Any, on: str, tmp_path: Any) -> None:
    beside, apart, resumed = build(), build(), build()
    with device(on) as there:
        settings = {**settings, "accelerator": there.name}
        fit(beside, callbacks=[lt.EMA(0.9)], **settings)
        run = fit(apart, callbacks=[lt.EMA(0.9, device="cpu")], **settings)
        assert_close(weights(beside), weights(apart), 1e-5)
        run.save_checkpoint(tmp_path / "x.ckpt")
        fit(resumed, callbacks=[lt.EMA(0.9, device="cpu")], ckpt_path=tmp_path / "x.ckpt", **settings)
        assert_close(weights(resumed), weights(apart), 1e-6)
        assert there.simulation is None or not there.simulation.races


# -- saves that are asked for while weights change places, and that end in an interrupt -------------------------------


@pytest.mark.parametrize("call", [1, 2])  # in and out
def test_a_save_that_waited_is_made_after_an_interrupt_and_never_again(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls, path = transfer.copy_, 0, tmp_path / "x.ckpt"
    module, ema = build(PlainNet), lt.EMA(0.9)
    run = trainer(callbacks=[ema], max_epochs=4)

    def interrupted(targets: Any, sources: Any) -> None:
        nonlocal calls
        calls += 1
        real(targets[:2], sources[:2])
        if calls == call:
            run.save_checkpoint(path, weights_only=True)
            run.save_checkpoint(path)  # replaces the first
            raise KeyboardInterrupt
        real(targets, sources)

    monkeypatch.setattr(transfer, "copy_", interrupted)
    with pytest.raises(SystemExit):
        run.fit(module, loader(), loader(24))
    monkeypatch.setattr(transfer, "copy_", real)
    raw = weights(module)
    saved = torch.load(path, weights_only=True)
    assert_equal({**saved["state_dict"], **saved["callbacks"]["EMA(decay=0.9)"]["raw"]}, raw)
    assert_equal(saved["state_dict"], ema.averaged_state_dict())
    path.unlink()
    fit(build(PlainNet), callbacks=[ema])
    assert not path.exists()
