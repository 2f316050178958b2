"""Weights as lists of tensors: chosen, copied, moved, measured and swapped exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_tricks.core.weights.tensors import checksum, copies, copy_, float_buffers, global_norm, lerp_, trainable

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 4), (5,), (), (0, 2))]


def test_a_tied_parameter_trains_once_and_a_frozen_one_never() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    module["c"].requires_grad_(False)
    assert list(trainable(module)) == ["a.weight", "a.bias", "b.bias"]
    assert trainable(module)["a.weight"] is module["a"].weight


def test_float_buffers_leave_counters_out() -> None:
    assert list(float_buffers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))) == ["1.running_mean", "1.running_var"]


def test_float_buffers_leave_caches_out_that_are_not_saved() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    module[0].register_buffer("cache", torch.zeros(2), persistent=False)
    assert list(float_buffers(module)) == ["0.running_mean", "0.running_var"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_at_least_fp32_exact_and_apart(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(tensor) for tensor in tensors(dtype)]
    for device in (None, "cpu", torch.device("cpu")):
        for copy, weight in zip(copies(weights, device), weights, strict=True):
            assert copy.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            assert not copy.requires_grad
            assert torch.equal(copy, weight.to(copy.dtype))
            assert copy.numel() == 0 or copy.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_copy_converts_and_keeps_the_objects(source: torch.dtype, target: torch.dtype) -> None:
    targets = [nn.Parameter(tensor) for tensor in tensors(target, seed=1)]
    sources = tensors(source)
    copy_(targets, sources)
    assert all(torch.equal(t, s.to(target)) for t, s in zip(targets, sources, strict=True))
    assert all(t.requires_grad and t.grad_fn is None for t in targets)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.5, 0.9, 1.0])
def test_lerp_is_the_formula(dtype: torch.dtype, fraction: float) -> None:
    weights = [nn.Parameter(tensor) for tensor in tensors(dtype)]
    averages = copies(tensors(seed=1))
    expected = [
        a.double() + fraction * (w.detach().double() - a.double()) for a, w in zip(averages, weights, strict=True)
    ]
    lerp_(averages, weights, fraction)
    for average, value in zip(averages, expected, strict=True):
        torch.testing.assert_close(average.double(), value, atol=1e-6, rtol=1e-6)
    if fraction == 1.0:
        assert all(torch.equal(a, w.to(a.dtype)) for a, w in zip(averages, weights, strict=True))


def test_nothing_to_do_is_fine() -> None:
    copy_([], [])
    lerp_([], [], 0.5)
    assert copies([]) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_all_numbers_in_one_vector(dtype: torch.dtype) -> None:
    values = tensors(dtype)
    expected = torch.cat([value.double().flatten() for value in values]).norm()
    torch.testing.assert_close(global_norm(values).double(), expected, atol=0, rtol=1e-6)


def test_the_norm_of_fp16_does_not_overflow() -> None:
    assert global_norm([torch.full((100,), 60000.0, dtype=torch.float16)]).item() == pytest.approx(600000)


def test_the_norm_of_fp32_and_fp64_together_is_fp64() -> None:
    norm = global_norm([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)])
    assert (norm.item(), norm.dtype) == (5.0, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("size", [0, 1, 100, 2**15 - 1, 2**15, 2**16 + 3])
def test_a_checksum_is_the_sum_of_the_bits_by_position(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).mul(50).to(dtype)
    before = tensor.clone()
    parts = torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.element_size()]
    bits = parts.view(kind).long()
    assert checksum(tensor) == int((bits * torch.arange(1, len(bits) + 1)).sum())
    assert torch.equal(tensor, before)
    if size > 1:
        assert checksum(tensor.flip(0)) != checksum(tensor)
