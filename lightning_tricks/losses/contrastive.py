"""Contrastive losses over the samples of all devices, with the gradient of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_tricks.core.checks import check_range, check_type
from lightning_tricks.core.ranks import sample_group

__all__ = ["clip_loss", "info_nce"]


def info_nce(
    queries: Tensor, keys: Tensor, *, temperature: float | Tensor = 0.07, gather: bool | dist.ProcessGroup = True
) -> Tensor:
    """The cross-entropy of finding each query's key among the keys of all devices.

    ``loss = mean_i(-log(exp(q_i @ k_i / temperature) / sum_j(exp(q_i @ k_j / temperature))))``, where i and j run over
    the samples of all ranks, of which each may have another number. Every rank gets the loss of the whole batch, and
    the mean of the ranks' gradients, which DDP and FSDP2 take, is the gradient of one process with the whole batch: it
    is not to be multiplied by the number of ranks. A rank holds the similarities of its own queries alone, in fp32.

    Args:
        queries: Embeddings (n, d); usually of length one, ``F.normalize(x, dim=-1)``, for which 0.07 is meant.
        keys: Embeddings (n, d), of which the i-th belongs to the i-th query.
        temperature: The divisor of similarities, above 0; a learned one is a tensor with one entry.
        gather: Whether the keys of all ranks are taken, if there are several; a process group for those of its ranks,
            as where tensor parallelism gives several ranks the same samples. All of these ranks call it together.

    Returns:
        The loss, a scalar in fp32 (in fp64 for embeddings in fp64).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For other shapes, a temperature out of range, and a batch without samples.

    Example:
        >>> x = torch.eye(4)
        >>> round(float(info_nce(x, x, temperature=1.0)), 4)  # log(e + 3) - 1
        0.7437

    References:
        van den Oord et al., arXiv 1807.03748.
    """
    _check("queries", queries, "keys", keys, temperature, gather)
    ranks = _Ranks(gather)
    (everywhere,), first = ranks.gathered(keys)
    return ranks.mean(_losses(queries, everywhere, first, temperature).sum(), len(everywhere))


def clip_loss(
    images: Tensor, texts: Tensor, *, temperature: float | Tensor = 0.07, gather: bool | dist.ProcessGroup = True
) -> Tensor:
    """The loss of CLIP: the mean of ``info_nce(images, texts)`` and ``info_nce(texts, images)``.

    Embeddings of both kinds are gathered at once. For CLIP's learned scale of similarities, ``log_scale``, pass
    ``temperature=(-self.log_scale).exp()``.

    Args:
        images: Embeddings (n, d) of one kind, as in ``info_nce``.
        texts: Embeddings (n, d) of the other kind, of which the i-th belongs to the i-th image.
        temperature: The divisor of similarities, above 0; a learned one is a tensor with one entry.
        gather: Whether the samples of all ranks are compared, or the process group of those that are.

    Returns:
        The loss, a scalar in fp32 (in fp64 for embeddings in fp64).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For other shapes, a temperature out of range, and a batch without samples.

    Example:
        >>> images, texts = torch.eye(4), torch.eye(4).roll(1, 0)  # each text belongs to another image
        >>> bool(clip_loss(images, images) < clip_loss(images, texts))
        True

    References:
        Radford et al., arXiv 2103.00020.
    """
    _check("images", images, "texts", texts, temperature, gather)
    ranks = _Ranks(gather)
    (all_images, all_texts), first = ranks.gathered(images, texts)
    losses = _losses(images, all_texts, first, temperature) + _losses(texts, all_images, first, temperature)
    return ranks.mean(losses.sum() / 2, len(all_texts))


def _losses(queries: Tensor, keys: Tensor, first: int, temperature: float | Tensor) -> Tensor:
    """The loss of each query (n,), whose keys begin at ``first``; 16 bits would round similarities too much."""
    with torch.autocast(queries.device.type, enabled=False):
        queries, keys = _wide(queries), _wide(keys)
        scale = temperature.reshape(()) if isinstance(temperature, Tensor) else temperature
        own = torch.arange(first, first + len(queries), device=queries.device)
        return F.cross_entropy(queries @ keys.T / scale, own, reduction="none")


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Ranks:
    """The ranks whose samples are compared."""

    def __init__(self, gather: bool | dist.ProcessGroup) -> None:
        there = gather is not False and dist.is_available() and dist.is_initialized()
        group = sample_group() if gather is True else gather
        self.group: Any = group if there and dist.get_world_size(group) > 1 else None  # type: ignore[arg-type]

    def gathered(self, *embeddings: Tensor) -> tuple[tuple[Tensor, ...], int]:
        """The embeddings (N, d) of all ranks, and the row at which those of this rank begin."""
        if self.group is None:
            sizes, rank, everywhere = [len(embeddings[0])], 0, embeddings
        else:
            sizes, rank = _sizes(embeddings[0], self.group), dist.get_rank(self.group)
            everywhere = _Gather.apply(torch.stack(embeddings, 1), sizes, self.group).unbind(1)
        if not sum(sizes):
            raise ValueError("A contrastive loss needs at least one sample, got embeddings (0, d): drop empty batches.")
        return everywhere, sum(sizes[:rank])

    def mean(self, total: Tensor, samples: int) -> Tensor:
        """The mean over samples of all ranks, of this rank's sum."""
        mean = total / samples
        return mean if self.group is None else _Sum.apply(mean, self.group)


def _sizes(embeddings: Tensor, group: Any) -> list[int]:
    """The number of samples of every rank."""
    own = torch.full((1,), len(embeddings), device=embeddings.device)  # without a copy, which would wait
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, own, group=group)
    return torch.cat(sizes).tolist()


class _Gather(Function):
    """Rows of all ranks; the gradient of a rank's rows is the sum of those that all ranks have for them."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])  # Gloo gathers tensors of one shape.
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)], None, None


class _Sum(Function):
    """The sum over the ranks, on every rank; so is its gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _check(
    name: str, one: Tensor, other_name: str, other: Tensor, temperature: Any, gather: bool | dist.ProcessGroup
) -> None:
    for argument, x in ((name, one), (other_name, other)):
        check_type(argument, x, Tensor)
        if not x.is_floating_point():
            raise TypeError(f"{argument} must be floating-point embeddings, got {x.dtype}.")
    if one.ndim != 2 or one.shape != other.shape:
        raise ValueError(
            f"{name} and {other_name} must both be embeddings (n, d), one row a sample, got {tuple(one.shape)} and"
            f" {tuple(other.shape)}: give every sample of the batch a row in both."
        )
    if not isinstance(temperature, Tensor):
        check_range("temperature", temperature, 0.0)
    if temperature.numel() != 1 if isinstance(temperature, Tensor) else temperature == 0:
        raise ValueError(f"temperature must be above 0, a number or a tensor with one entry, got {temperature!r}.")
    if dist.is_available():
        check_type("gather", gather, bool, dist.ProcessGroup)
