"""GradientStats: norms of gradients, weights and updates by group of layers, logged every so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_count
from lightning_tricks.core.lightning.trainer import log_metrics, stepped_batches
from lightning_tricks.core.weights.gradients import GradientCallback
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import copies

__all__ = ["GradientStats"]


def layer_group(name: str, depth: int) -> str:
    """The group of layers that a parameter belongs to: the first parts of the name of its layer.

    Example:
        >>> [layer_group(name, 2) for name in ("model.blocks.3.attention.weight", "head.bias", "scale")]
        ['model.blocks', 'head', 'scale']
    """
    layer = name.rpartition(".")[0]
    return ".".join(layer.split(".")[:depth]) if layer else name


@final
class GradientStats(GradientCallback):
    """Logs the norms of gradients, weights and updates, of each group of layers and of all, every so many steps.

    Of the first optimizer step and of every n-th after it the loggers get ``tricks/gradient_norm``,
    ``tricks/weight_norm`` before the step, ``tricks/update_norm``, by how much the step has changed the weights, and
    ``tricks/update_ratio``, the update's norm by that of the weights, which is around 1e-3 in a healthy training by
    Adam. Behind a slash each has the group: ``tricks/update_ratio/model.blocks``. The same names are in
    ``trainer.callback_metrics``. Norms are Euclidean, over the weights that have a gradient, of all ranks, without the
    scale of fp16. Gradients are those before Lightning's clipping, and before tricks that come later in the callbacks.

    The values of a step come from the device in one transfer; between these steps nothing is computed. In such a step
    there is one more copy of the weights that train.

    Args:
        every_n_steps: The optimizer steps from one measurement to the next, at least 1.
        depth: The number of parts of a layer's dotted name that make a group, at least 1: "model.blocks" of
            "model.blocks.3.attention" for 2.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, under a strategy that owns the gradients (DeepSpeed, FSDP1); in the first
            step, for sparse gradients, and for a fused optimizer under fp16.

    Example:
        >>> trainer = L.Trainer(callbacks=[GradientStats(every_n_steps=100)], accelerator="cpu", logger=False)
    """

    def __init__(self, *, every_n_steps: int = 50, depth: int = 2) -> None:
        check_count("every_n_steps", every_n_steps)
        check_count("depth", depth)
        super().__init__()
        self.every_n_steps, self.depth = every_n_steps, depth
        self._forget()

    def _forget(self) -> None:
        """Begin a fit."""
        self._last: dict[int, int] = {}  # when the weights of an optimizer were last measured, by its id
        self._measured: list[_Measured] = []  # in the present batch

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._forget()

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        now, last = stepped_batches(trainer), self._last.get(id(optimizer))
        if last is None or now - last >= self.every_n_steps:
            self._last[id(optimizer)] = now
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    @override
    @torch.no_grad()
    def _change(
        self, trainer: L.Trainer, optimizer: Optimizer, parameters: list[nn.Parameter], weights: LocalWeights
    ) -> None:
        """Measure gradients, which stay as they are, and keep what the weights are."""
        known = {id(each.parameter) for each in self._measured}  # of a step before in this batch
        names = {id(p): name for name, p in trainer.lightning_module.named_parameters() if id(p) not in known}
        found = [parameter for parameter in parameters if id(parameter) in names]
        gradients = _norms(weights, weights.parts(p.grad for p in found), found)
        before = copies(weights.parts(found))
        self._measured += [
            _Measured(names[id(parameter)], parameter, *values)
            for parameter, *values in zip(found, before, gradients, strict=True)
        ]

    @override
    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        measured, self._measured = self._measured, []
        if not measured:
            return
        assert self._weights is not None, "set in setup"
        names, parameters, before, gradients = map(list, zip(*measured, strict=True))
        norms = {"gradient": gradients, "weight": _norms(self._weights, before, parameters)}
        for then, now in zip(before, self._weights.parts(parameters), strict=True):
            then -= now
        norms["update"] = _norms(self._weights, before, parameters)
        groups: dict[str, list[int]] = {"": list(range(len(names)))}
        for number, name in enumerate(names):
            groups.setdefault(f"/{layer_group(name, self.depth)}", []).append(number)
        metrics: dict[str, Tensor] = {}
        for group, numbers in groups.items():
            together = {kind: _norm([each[number] for number in numbers]) for kind, each in norms.items()}
            metrics |= {f"tricks/{kind}_norm{group}": norm for kind, norm in together.items()}
            ratio = together["update"] / together["weight"]
            metrics[f"tricks/update_ratio{group}"] = torch.where(together["weight"] > 0, ratio, 0.0)
        log_metrics(trainer, metrics)


class _Measured(NamedTuple):
    """A parameter that an optimizer steps in the present batch.

    Args:
        name: Its name in the module.
        parameter: The parameter.
        before: A copy of this rank's part of before the step, in fp32 or more.
        gradient: The norm of its gradient.
    """

    name: str
    parameter: nn.Parameter
    before: Tensor
    gradient: Tensor


def _norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several tensors together, by their norms."""
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]))


def _norms(weights: LocalWeights, parts: Sequence[Tensor], of: Sequence[Tensor]) -> list[Tensor]:
    """The norms of tensors of the shapes of parameters, in fp32 or more."""
    wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
    return weights.norms(wide, of=of)
