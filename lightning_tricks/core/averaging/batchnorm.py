"""Running statistics of BatchNorm, recalculated for the weights that a module holds at present."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.checks import some
from lightning_tricks.core.device import fetched
from lightning_tricks.core.lightning.loaders import loaders_untouched, train_loader, training_steps
from lightning_tricks.core.lightning.next_step import around_next_step
from lightning_tricks.core.lightning.trainer import takes_dataloader_iter
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.trial import WithoutGradients, trial_steps
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.tensors import copies


def batchnorm_layers(module: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
    }


def scripted_batchnorm(module: nn.Module) -> dict[str, nn.Module]:
    """The BatchNorm layers in TorchScript modules that keep running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, torch.jit.ScriptModule)
        and "BatchNorm" in getattr(layer, "original_name", "")
        and "running_mean" in layer._buffers
    }


def require_recalibration(trick: Trick, trainer: L.Trainer, pl_module: L.LightningModule, remedy: str) -> None:
    """Raise if the module has BatchNorm statistics, and a ``training_step`` that cannot be run to recalculate them.

    Whether what a step changes can be restored is seen at the first one.
    """
    name, layers = type(pl_module).__name__, batchnorm_layers(pl_module)
    rule = f"{type(trick).__name__} runs training_step for the BatchNorm statistics of the averaged weights"
    if not layers and not scripted_batchnorm(pl_module):
        return
    if layers and not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"{rule}, which must not step the optimizers, got {name}.automatic_optimization=False: {remedy}."
        )
    if layers and takes_dataloader_iter(pl_module):
        raise MisconfigurationException(
            f"{rule} on batches, got {name}.training_step(dataloader_iter): take the batch, or {remedy}."
        )

    @contextmanager
    def look() -> Iterator[None]:
        if scripted := [path for path, layer in scripted_batchnorm(pl_module).items() if layer.training]:
            raise MisconfigurationException(
                f"{rule}, which torch.jit does not let it recalculate in {some(scripted)}: script the module after"
                f" training, or {remedy}."
            )
        with _naming(rule, remedy):
            state = ModuleState(pl_module, deep=True)
        yield
        with _naming(rule, remedy):
            state.refuse_counts()

    around_next_step(trainer, trick._undo, look)


@contextmanager
def _naming(rule: str, remedy: str) -> Iterator[None]:
    """Say in the error for what cannot be restored why it must be."""
    try:
        yield
    except MisconfigurationException as error:
        raise MisconfigurationException(f"{rule}. {error} Or {remedy}.") from error


def recalibrate(trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Tensor]:
    """The BatchNorm statistics of the module's present weights: the mean over the training batches of one epoch.

    Every rank runs ``training_step`` without gradients on its batches, and the mean is over the batches of all ranks.
    Nothing is logged, and no hooks run except those of batch transfer. The module and its metrics, random numbers, the
    loaders' own state and the Trainer's progress are restored. Layers in eval mode, or that are never called, are left
    out. So is a batch whose statistics are not finite: ``SkipNonFinite`` leaves out its step as well. A loader without
    a length is read for as many batches as the present epoch had.

    Args:
        trainer: A Trainer in a fit that makes no further training step.
        pl_module: The Trainer's module, with its layers in their modes of training.

    Returns:
        ``running_mean`` and ``running_var`` of the layers by buffer name, in fp32 or more.

    Raises:
        RuntimeError: If the training loader yields no batch when it is read again.
    """
    layers = {name: layer for name, layer in batchnorm_layers(pl_module).items() if layer.training}
    if not layers:
        return {}
    sums, steps = WithoutGradients()(pl_module, partial(_sums, trainer, pl_module, layers), lambda: None)
    if not trainer.strategy.reduce_boolean_decision(steps > 0, all=False):
        raise RuntimeError(
            "The training loader yielded no batch when it was read again for the BatchNorm statistics of the averaged"
            " weights. If it can be read only once, leave them out: SWA(recalibrate_batchnorm=False); with"
            " ScheduleFree, use a norm without statistics, as GroupNorm."
        )
    return _means({name: trainer.strategy.reduce(total, reduce_op="mean") for name, total in sums.items()})


def recalibrate_averages(trainer: L.Trainer, averages: Averages) -> None:
    """Give averages the BatchNorm statistics of a module that holds them; no checkpoint is saved meanwhile."""
    with averages.marked_busy(), averages.showing("averaged"):
        statistics = recalibrate(trainer, trainer.lightning_module)
    averages.put(statistics)


def _sums(
    trainer: L.Trainer, pl_module: L.LightningModule, layers: dict[str, _BatchNorm], gradients: bool
) -> tuple[dict[str, Tensor], int]:
    """The sums of the layers' statistics over the batches of this rank, and the number of batches.

    Args:
        trainer: The Trainer.
        pl_module: Its module.
        layers: The layers, by name.
        gradients: Whether ``training_step`` differentiates inside.
    """
    sums, steps = {name: torch.zeros_like(_statistics(layer)) for name, layer in layers.items()}, 0
    # In compiled code a momentum that changes would compile the graph again.
    with (
        _undone(trainer, pl_module, gradients) as restore_weights,
        torch.compiler.set_stance("force_eager"),
        _mean_over_calls(layers) as calls,
    ):
        for arguments in training_steps(trainer, pl_module):
            calls.clear()
            for layer in layers.values():
                layer.reset_running_stats()
            trainer.strategy.training_step(*arguments)
            restore_weights()
            for name, layer in layers.items():
                found = _statistics(layer) * cast(Tensor, layer.num_batches_tracked)
                sums[name] += torch.where(found.isfinite().all(), found, 0.0)
            steps += 1
    return sums, steps


@contextmanager
def _mean_over_calls(layers: Mapping[str, _BatchNorm]) -> Iterator[dict[nn.Module, int]]:
    """Let running statistics be the mean over the calls that are counted in what this gives.

    So they are with ``momentum=None`` as well, for which torch reads its own count from the device in each call.
    """
    calls: dict[nn.Module, int] = {}

    def count(layer: Any, _: Any) -> None:
        calls[layer] = calls.get(layer, 0) + 1
        layer.momentum = 1 / calls[layer]

    with ExitStack() as hooks:
        for layer in layers.values():
            hooks.callback(layer.register_forward_pre_hook(count).remove)
        yield calls


def _statistics(layer: _BatchNorm) -> Tensor:
    """Ones, running means and running variances, of shape (3, channels)."""
    mean, variance = copies([cast(Tensor, layer.running_mean), cast(Tensor, layer.running_var)])
    return torch.stack([torch.ones_like(mean), mean, variance])


def _means(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means and variances of the layers that were called, from sums over their calls; row 0 counts the calls."""
    calls = fetched([total[0, 0] for total in sums.values()])
    return {
        f"{name}.{buffer}": total[row] / total[0]
        for (name, total), called in zip(sums.items(), calls, strict=True)
        for row, buffer in ((1, "running_mean"), (2, "running_var"))
        if called > 0
    }


@contextmanager
def _undone(trainer: L.Trainer, pl_module: L.LightningModule, gradients: bool) -> Iterator[Callable[[], None]]:
    """Log nothing inside the block, and restore everything at its end; yields a function that restores the weights."""
    parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in pl_module.parameters()]
    # A step may write into weights by hand: those of a teacher, or all of them to decay.
    kept = [parameter.detach().clone() for parameter, _, _ in parameters]

    @torch.no_grad()
    def restore_weights() -> None:
        for (parameter, _, _), before in zip(parameters, kept, strict=True):
            if parameter.shape == before.shape:  # ZeRO-3 may have gathered it, of shards that are as before
                parameter.detach().copy_(before)

    try:
        for parameter, _, _ in parameters:
            parameter.grad = None
        with trial_steps(trainer, pl_module, deep=True, gradients=gradients), loaders_untouched(train_loader(trainer)):
            yield restore_weights
    finally:
        restore_weights()
        for parameter, trains, gradient in parameters:
            parameter.requires_grad_(trains).grad = gradient
