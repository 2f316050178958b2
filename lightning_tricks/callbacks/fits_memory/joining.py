"""What parts return and log, joined to what the whole batch would; apart from the parts, which train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.mixed_targets.target import plain_tensor

LogCall = dict[str, Any]  # the arguments of a call of LightningModule.log, by name


def mean_of_parts(values: Sequence[Any], counts: Sequence[Tensor]) -> Tensor:
    """The mean of a batch from those of its parts, ``sum_i(n_i * x_i) / sum_i(n_i)``.

    Args:
        values: The means of the parts x_i, numbers or tensors of one shape.
        counts: What each is the mean of, n_i, at least 0. A part with none of them does not count, though its mean is
            NaN.

    Example:
        >>> mean_of_parts([1.0, 4.0, float("nan")], [torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.0)])
        tensor(2.)
    """
    n = torch.stack(list(counts))
    x = torch.stack([torch.as_tensor(value, dtype=n.dtype, device=n.device).detach() for value in values], -1)
    return torch.where(n > 0, x * n, 0.0).sum(-1) / n.sum()


def _tensors(values: Sequence[Any], counts: Sequence[Tensor]) -> list[Tensor]:
    return [torch.as_tensor(value, device=counts[0].device) for value in values]


_REDUCTIONS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], Any]] = {
    "mean": mean_of_parts,
    "sum": lambda values, counts: sum(values),
    "max": lambda values, counts: torch.stack(_tensors(values, counts)).amax(0),
    "min": lambda values, counts: torch.stack(_tensors(values, counts)).amin(0),
}


def loss_in(output: Any) -> Any:
    """The loss in what a step returns."""
    return output.get("loss") if isinstance(output, Mapping) else output


def with_loss(output: Any, loss: Tensor) -> Any:
    """What a step returns, with another loss."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


def without_graph(output: Any) -> Any:
    """What a step returns, without what its backward pass has kept."""
    if isinstance(output, Mapping):
        return {name: without_graph(value) for name, value in output.items()}
    return output.detach() if isinstance(output, Tensor) else output


def joined_outputs(outputs: list[Any], counts: list[Tensor], shares: list[float]) -> Any:
    """What a step would return for the whole batch, without a graph.

    Numbers are means, and tensors with an entry for each sample are joined. Of all else the last part's is returned.
    """
    losses = [loss_in(output) for output in outputs]
    loss = None if losses[0] is None else mean_of_parts(losses, counts).requires_grad_()
    if not isinstance(outputs[0], Mapping):
        return loss
    joined = {name: _joined_values([output.get(name) for output in outputs], counts, shares) for name in outputs[-1]}
    return {**joined, "loss": loss}


def _joined_values(values: list[Any], counts: list[Tensor], shares: list[float]) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values[-1]
    values = [plain_tensor(value).detach() for value in values]
    if all(value.ndim == 0 and value.is_floating_point() for value in values):
        return mean_of_parts(values, counts)
    lengths = [len(value) if value.ndim else 0 for value in values]
    by_sample = all(abs(length - share * sum(lengths)) < 0.5 for length, share in zip(lengths, shares, strict=True))
    return torch.cat(values) if min(lengths) and by_sample else values[-1]


def joined_logs(logs: Sequence[Sequence[LogCall]], counts: Sequence[Tensor]) -> list[LogCall]:
    """The calls of log for the whole batch, in the order of their first ones.

    Args:
        logs: The calls of each part.
        counts: The numbers of targets of the parts, by which means are weighed.
    """
    by_name: dict[str, list[tuple[LogCall, Tensor]]] = {}
    for calls, count in zip(logs, counts, strict=True):
        for call in calls:
            by_name.setdefault(call["name"], []).append((call, count))
    return [_joined_call([call for call, _ in calls], [n for _, n in calls]) for calls in by_name.values()]


def _joined_call(calls: list[LogCall], counts: list[Tensor]) -> LogCall:
    call = dict(calls[-1])
    if isinstance(call["value"], int | float | Tensor):  # a metric has seen all parts
        how = call.get("reduce_fx", "mean")
        reduce = _REDUCTIONS.get(getattr(how, "__name__", how).removeprefix("a"))
        if reduce is None:
            raise MisconfigurationException(
                f"FitsMemory joins what the parts of a batch log, got reduce_fx={how!r} for {call['name']!r}: use"
                f" {', '.join(map(repr, _REDUCTIONS))}, or log a metric object."
            )
        call["value"] = reduce([each["value"] for each in calls], counts)
    if call.get("batch_size") is not None:
        call["batch_size"] = sum(each["batch_size"] for each in calls)
    return call
