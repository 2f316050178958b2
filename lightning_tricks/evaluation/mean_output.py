"""Modules whose outputs are means: of several networks, or of several views of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

Mean = Literal["probabilities", "logits"]


def mean_logits(logits: Sequence[Tensor], mean: Mean = "probabilities", dim: int | None = None) -> Tensor:
    """Logits of the mean: ``log(mean_i(softmax(x_i)))``, or ``mean_i(x_i)`` with "logits".

    Args:
        logits: Outputs x_i of the members, of one shape.
        mean: "probabilities", or "logits" for the mean of the outputs as they are.
        dim: Dimension of the classes; None for logits (B, C).

    Raises:
        ValueError: If what should be logits are not, or do not say where the classes are.

    Example:
        >>> mean_logits([torch.tensor([[9.0, 9.0]]), torch.tensor([[0.0, 0.0]])]).exp()
        tensor([[0.5000, 0.5000]])
    """
    stacked = torch.stack([*logits])
    if mean == "logits":
        return stacked.mean(0)
    dim = require_logits(logits[0], dim)
    return torch.log_softmax(stacked.float(), dim if dim < 0 else dim + 1).logsumexp(0) - math.log(len(logits))


def require_logits(logits: Tensor, dim: int | None = None) -> int:
    """The dimension of the classes, if these may be logits.

    Raises:
        ValueError: For probabilities, for logits of one class only, and if ``dim`` is needed.
    """
    if dim is None and logits.dim() != 2:
        raise ValueError(f"logits must be (B, C), got {tuple(logits.shape)}: pass dim=, the dimension of the classes.")
    dim = 1 if dim is None else dim
    if not -logits.dim() <= dim < logits.dim():
        raise ValueError(f"dim must be a dimension of logits {tuple(logits.shape)}, got {dim}.")
    if logits.shape[dim] < 2:
        raise ValueError(
            f"logits must have two classes or more, got {tuple(logits.shape)} with dim={dim}: for a single output use"
            " mean='logits'."
        )
    sums = logits.detach().float().sum(dim)
    if logits.numel() and (logits >= 0).all() and torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
        raise ValueError(
            "logits must not be probabilities, got rows that are positive and sum to 1: use the output before softmax,"
            " its logarithm, or mean='logits'."
        )
    return dim


def logits_in(output: Any) -> Any:
    """An output, or its ``logits`` where it is an object with them, as the models of transformers return it."""
    return getattr(output, "logits", output)


def with_logits(output: Any, logits: Tensor) -> Any:
    """Logits in the form of an output, without its other parts: a loss is no mean.

    Raises:
        MisconfigurationException: For an object that logits alone do not make.
    """
    if isinstance(output, Tensor):
        return logits
    try:
        return type(output)(logits=logits)
    except TypeError as error:
        name = type(output).__name__
        raise MisconfigurationException(
            f"The mean of {name} has logits alone, and {name}(logits=...) cannot be made of them: {error}; give its"
            " other parts defaults, or return logits from forward."
        ) from error


class OutputMean:
    """The mean of outputs, and how often it was computed.

    Args:
        mean: What is averaged.
        dim: Dimension of the classes; None for logits (B, C).
        of_module: Whether it is of the outputs of the module itself, and not of those of a submodule.
    """

    trick: ClassVar[str]  # the name in errors
    remedy: ClassVar[str]  # where a step passes by the mean

    def __init__(self, mean: Mean, dim: int | None, of_module: bool = True) -> None:
        self.mean, self.dim, self.of_module, self.calls = mean, dim, of_module, 0
        self.in_call = False  # whether self(...) runs, which calls forward

    def of(self, outputs: Sequence[Any]) -> Any:
        """The mean of outputs, tensors or objects with ``logits``, of which the mean has nothing else."""
        self.calls += 1
        return with_logits(outputs[0], mean_logits([logits_in(each) for each in outputs], self.mean, self.dim))


class MeanOutput(L.LightningModule):
    """A module that is an instance of another class, too, whose steps must see the mean."""

    means: list[OutputMean]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leave out that of the module's class, which knows nothing of a class that is made for one instance."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_redirected():
            return super().__call__(*args, **kwargs)
        mean = self.means[-1]
        before, mean.in_call = mean.in_call, True
        try:
            return super().__call__(*args, **kwargs)
        finally:
            mean.in_call = before

    def is_redirected(self) -> bool:
        """Whether a strategy calls a step in place of ``forward``."""
        own = vars(self).get("forward", None)
        return own is not None and getattr(getattr(own, "__self__", None), "__dict__", None) is not vars(self)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for mean in self.means:
            if mean.of_module and not self.means[-1].in_call:
                raise MisconfigurationException(
                    f"{mean.trick} averages what self(...) returns, and self.forward(...) passes by it: call self(...)."
                )
        return super().forward(*args, **kwargs)

    @override
    def on_validation_epoch_end(self) -> None:
        self._require_mean("validation_step")
        super().on_validation_epoch_end()

    @override
    def on_test_epoch_end(self) -> None:
        self._require_mean("test_step")
        super().on_test_epoch_end()

    @override
    def on_predict_epoch_end(self) -> None:
        self._require_mean("predict_step")
        super().on_predict_epoch_end()

    def _require_mean(self, step: str) -> None:
        for mean in self.means:
            if not mean.calls:
                raise MisconfigurationException(
                    f"{mean.trick} averages what the module returns, but {step} does not call self(...): {mean.remedy}."
                )
            mean.calls = 0

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        kind: Any = type(self)
        added: list[type[MeanOutput]] = []
        while "means_of" in vars(kind):
            added.append(kind.__bases__[0])
            kind = kind.means_of
        return _empty, (kind, added[::-1]), {**self.__getstate__(), "means": self.means}


Kind = TypeVar("Kind", bound=MeanOutput)


def with_mean(module: Any, kind: type[Kind], mean: OutputMean) -> Kind:
    """Make a module an instance of ``kind``, too, which replaces its outputs by a mean."""
    module.__class__ = _class_of(kind, type(module))  # type: ignore[arg-type]
    module.means = [*getattr(module, "means", ()), mean]
    return module


def with_mean_beside(module: Any, kind: type[Kind], mean: OutputMean) -> Kind:
    """An instance of ``kind`` beside a module, which has all of its attributes: what either writes, the other has.

    Forward hooks may be functions of the module, and write what a step of the new instance reads.
    """
    means = [*getattr(module, "means", ()), mean]
    own = _class_of.__wrapped__(kind, type(module), means=property(lambda _: means))  # a class of its own, not kept
    seen: Kind = object.__new__(own)
    object.__setattr__(seen, "__dict__", vars(module))
    return seen


@cache
def _class_of(added: type[MeanOutput], kind: type[L.LightningModule], **attributes: Any) -> type[Any]:
    name = f"{added.__name__}Of{kind.__name__}"
    return type(name, (added, kind), {"__module__": kind.__module__, "means_of": kind, **attributes})


def _empty(kind: type[L.LightningModule], added: list[type[MeanOutput]]) -> L.LightningModule:
    """A module without state, for pickle: its class has no name of its own."""
    for each in added:
        kind = _class_of(each, kind)  # type: ignore[arg-type]
    return kind.__new__(kind)
