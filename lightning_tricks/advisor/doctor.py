"""Lints when training starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_strings, some
from lightning_tricks.core.lightning.steps import UnknownTotalSteps, optimizer_steps
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.trick import Trick
from lightning_tricks.modules.bias_before_batchnorm import biases_before_batchnorm

__all__ = ["Doctor"]


class Finding(NamedTuple):
    """A rule that a module or its training breaks, where, and what to do."""

    rule: str
    text: str


def reused_modules(module: nn.Module) -> Iterator[str]:
    """One module without weights (dropout, an activation) that stands at several places."""
    places: dict[nn.Module, list[str]] = {}
    for path, parent in module.named_modules():  # a parent with two names makes no second place
        for name, each in parent._modules.items():
            if each is not None and not any((each._parameters, each._buffers, each._modules)):
                places.setdefault(each, []).append(f"{path}.{name}".lstrip("."))
    for each, names in places.items():
        if len(names) > 1:
            yield (
                f"one {type(each).__name__} stands at {some(names, 3)}: a hook, a replacement or quantization of one of"
                " them reaches all. Make one for each place."
            )


def redundant_biases(module: nn.Module) -> Iterator[str]:
    """Biases that a following BatchNorm takes away again."""
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        return  # sharded in an earlier fit: tracing would run FSDP's hooks
    if names := biases_before_batchnorm(module):
        yield (
            f"BatchNorm takes {some(names, 3)} away again: pass bias=False, or call"
            " lightning_tricks.drop_bias_before_batchnorm(model)."
        )


def bf16_weights_in_fp16(module: nn.Module, trainer: pl.Trainer) -> Iterator[str]:
    """Weights that were pretrained in bf16, whose range fp16 has not."""
    if not str(trainer.precision).startswith("16"):
        return
    held = [name for name, weight in module.named_parameters() if weight.dtype == torch.bfloat16]
    told = [name for name, each in module.named_modules() if _dtype_of_config(each) in (torch.bfloat16, "bfloat16")]
    if held or told:
        yield (
            f"{some(held or [name or type(module).__name__ for name in told], 3)} comes from bf16, and trains with"
            f" precision={trainer.precision!r}, in which its activations overflow. Use 'bf16-mixed', or '32-true'."
        )


def _dtype_of_config(module: nn.Module) -> object:
    config = getattr(module, "config", None)  # of transformers
    return getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)


def loader_workers(module: nn.Module, trainer: pl.Trainer) -> Iterator[str]:
    """More loader workers than cores, all processes of this machine together."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for loader in _loaders(trainer):
        if loader.num_workers * trainer.num_devices > cores:
            yield (
                f"num_workers={loader.num_workers} in each of {trainer.num_devices} processes on {cores} cores: the"
                f" workers wait for each other. Pass num_workers={max(1, cores // trainer.num_devices)} or less."
            )


def pinned_memory(module: nn.Module, trainer: pl.Trainer) -> Iterator[str]:
    """``pin_memory`` without a GPU, and a GPU without it."""
    for loader in _loaders(trainer):
        if loader.pin_memory and isinstance(trainer.accelerator, CPUAccelerator):
            yield "pin_memory=True copies each batch once more for a GPU that is not used. Leave it out."
        elif not loader.pin_memory and isinstance(trainer.accelerator, CUDAAccelerator):
            yield "a training loader without pin_memory=True: batches reach the GPU late. Pass it."


def schedule_length(module: nn.Module, trainer: pl.Trainer) -> Iterator[str]:
    """A schedule of torch that is longer or shorter than the training, for example since batches are accumulated."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined] # set by a connector
        return
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        if isinstance(scheduler, OneCycleLR):
            planned = scheduler.total_steps
        elif isinstance(scheduler, CosineAnnealingLR):
            planned = scheduler.T_max
        else:
            continue
        try:
            steps = optimizer_steps(trainer) if config.interval == "step" else trainer.max_epochs
        except UnknownTotalSteps:
            continue
        if config.frequency == 1 and steps not in (planned, -1, None):  # the latter without max_epochs
            yield (
                f"{type(scheduler).__name__} is made for {planned} steps, and interval={config.interval!r} gives it"
                f" {steps}. Pass lightning_tricks.optimizer_steps(self.trainer) with interval='step', or return"
                " lightning_tricks.one_cycle(optimizer, self)."
            )


MODULE_RULES: dict[str, Callable[[nn.Module], Iterator[str]]] = {
    "reused-modules": reused_modules,
    "redundant-biases": redundant_biases,
}
TRAINER_RULES: dict[str, Callable[[nn.Module, pl.Trainer], Iterator[str]]] = {
    "bf16-weights-in-fp16": bf16_weights_in_fp16,
    "loader-workers": loader_workers,
    "pinned-memory": pinned_memory,
    "schedule-length": schedule_length,
}
SYNC_DIST = "sync-dist"
RULES = (*MODULE_RULES, *TRAINER_RULES, SYNC_DIST)


def lint(module: nn.Module) -> list[Finding]:
    """What is probably not meant in a module."""
    return [Finding(name, text) for name, rule in MODULE_RULES.items() for text in rule(module)]


def lint_training(module: nn.Module, trainer: pl.Trainer) -> list[Finding]:
    """What is probably not meant in how a Trainer is about to train a module."""
    return [Finding(name, text) for name, rule in TRAINER_RULES.items() for text in rule(module, trainer)]


def _loaders(trainer: pl.Trainer) -> list[DataLoader[object]]:
    found: list[DataLoader[object]] = []
    apply_to_collection(trainer.train_dataloader, DataLoader, found.append)
    return found


@final
class Doctor(Trick):
    """Warns when training starts of what is probably not meant, each with its remedy; changes nothing.

    - ``reused-modules``: one dropout or activation stands at several places
    - ``redundant-biases``: biases in front of a BatchNorm
    - ``bf16-weights-in-fp16``: pretrained in bf16, trained in fp16
    - ``loader-workers``: more workers than cores
    - ``pinned-memory``: without a GPU, or a GPU without it
    - ``schedule-length``: torch's OneCycleLR or CosineAnnealingLR made for another number of steps than there are
    - ``sync-dist``: ``self.log(..., sync_dist=True)`` in ``training_step``, which waits for all ranks in every step

    Args:
        silence: Rules that are not to be looked at.

    Raises:
        ValueError: For a rule that does not exist.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[Doctor(silence=["loader-workers"])], accelerator="cpu", logger=False)
    """

    def __init__(self, silence: str | Sequence[str] = ()) -> None:
        check_strings("silence", silence)
        silence = (silence,) if isinstance(silence, str) else tuple(silence)
        for rule in silence:
            check_choice("silence", rule, RULES)
        super().__init__()
        self.silence = silence

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._say(lint(pl_module))  # which traces it: before it is sharded or compiled

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._say(lint_training(pl_module, trainer))
        if trainer.world_size > 1 and SYNC_DIST not in self.silence:
            self._wrap(pl_module, "log", self._logged)

    def _logged(self, log: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
        log(name, *args, **kwargs)
        given = inspect.signature(pl.LightningModule.log).bind(None, name, *args, **kwargs).arguments
        if given.get("sync_dist") and given.get("on_step") is not False:
            text = (
                f"self.log({name!r}, sync_dist=True) in training_step makes each step wait for all ranks. Log it with"
                " on_step=False, on_epoch=True, or without sync_dist: the epoch's mean of rank 0 is close."
            )
            self._say([Finding(SYNC_DIST, text)])
            self._close()  # log_dict may have many

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._close()  # one batch shows what is logged

    def _say(self, findings: Sequence[Finding]) -> None:
        for rule, text in findings:
            if rule not in self.silence:
                rank_zero_warn(f"Doctor, {rule}: {text}")
