"""Lists of weight tensors, and the foreach operations on them that EMA, SWA and SAM use."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy


def bits(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, detached, of which every method is torch's own.

    A class that is written in Python may have a ``clone`` that needs more than numbers, such as names of columns.
    """
    with torch._C.DisableTorchFunctionSubclass():  # as in "Extending PyTorch" of torch's documentation
        return Tensor.detach(tensor)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, detached."""
    tensor = bits(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor; all ranks that have a shard of it take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, dense or sparse, hold the same, NaN included."""
    if a.shape != b.shape:
        return False
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name; tied ones appear once, and those of lazy layers once they have a shape."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, nn.UninitializedParameter)
    }


def float_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The floating-point buffers that are saved, by name, for example the running statistics of BatchNorm.

    Those of lazy layers are not there before these know their shapes.
    """
    caches = {
        f"{path}.{name}" if path else name
        for path, owner in module.named_modules()
        for name in owner._non_persistent_buffers_set  # torch has no public list of them
    }
    named = {name: buffer for name, buffer in module.named_buffers() if not is_lazy(buffer)}
    return {name: buffer for name, buffer in named.items() if buffer.is_floating_point() and name not in caches}


@torch.no_grad()
def copies(weights: Sequence[Tensor], device: torch.device | str | None = None) -> list[Tensor]:
    """Detached copies in full precision (at least fp32), beside the weights or on ``device``."""
    return [w.detach().to(device or w.device, torch.promote_types(w.dtype, torch.float32), copy=True) for w in weights]


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write each source into its target, converting dtype and device."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def lerp_(averages: Sequence[Tensor], weights: Sequence[Tensor], fraction: float) -> None:
    """Move each average towards its weight: ``average += fraction * (weight - average)``."""
    pairs = list(zip(averages, weights, strict=True))
    for bucket in buckets(averages):  # bounds the memory for converted weights
        near = [weight.to(average.device, average.dtype) for average, weight in pairs[bucket]]
        torch._foreach_lerp_(list(averages[bucket]), near, fraction)


def lerp_same_dtype_(averages: list[Tensor], weights: list[Tensor], fraction: float) -> None:
    """``lerp_`` for averages that have the dtype and device of their weights, without checking that."""
    if averages:
        with torch.set_grad_enabled(False):  # torch.no_grad() takes as long as averaging a layer
            torch._foreach_lerp_(averages, weights, fraction)


def buckets(tensors: Sequence[Tensor]) -> list[slice]:
    """Slices of a list of tensors: of about 1 MB on CPU, which fits its cache, and of 64 MB on other devices."""
    limit = 2**20 if all(tensor.device.type == "cpu" for tensor in tensors) else 2**26
    ends, filled = [0], 0
    for index, tensor in enumerate(tensors):
        if filled and filled + tensor.nbytes > limit:
            ends.append(index)
            filled = 0
        filled += tensor.nbytes
    return [slice(start, end) for start, end in zip(ends, [*ends[1:], len(tensors)], strict=True) if end > start]


def hidden_from_autograd(weights: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide from autograd that weights change inside the block; at its end they must be the same again, bit for bit.

    Without it, a checkpoint that is saved between a forward and its backward pass would make the backward pass raise.
    """
    counted = tuple(weight for weight in weights if not weight.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted)


@contextmanager
def gradients_kept(weights: Iterable[Tensor]) -> Iterator[None]:
    """Leave the gradients of weights as they are, whatever a backward pass adds to them."""
    kept = [(weight, weight.grad) for weight in dict.fromkeys(weights)]
    for weight, _ in kept:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in kept:
            weight.grad = gradient


@torch.no_grad()
def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all tensors together, in fp32, or in fp64 if one of them is."""
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors), 2, dtype)))


def identity(value: object) -> Hashable:
    """A key that is equal for tied weights, as long as all compared values are alive."""
    if not isinstance(value, Tensor) or value.data_ptr() == 0:  # no numbers, or none that torch tells, as on XLA
        return id(value)
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def checksum(tensor: Tensor) -> int:
    """The sum of the bits as integers, weighted by position; the same on every device, in any order of summation."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().flatten().view(integer)
    size = 2**15 if bits.is_cpu else max(len(bits), 1)  # stays in a CPU's cache, and is the work of one thread
    total: Tensor | int = 0
    for begin in range(0, len(bits), size):
        piece = bits[begin : begin + size].long()
        total = total + (piece * torch.arange(begin + 1, begin + len(piece) + 1, device=bits.device)).sum()
    return int(total)
