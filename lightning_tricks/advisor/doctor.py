"""Doctor: warnings about probable mistakes when training starts."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
)
from torch.utils.data import DataLoader, RandomSampler
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_strings, some
from lightning_tricks.core.lightning.engine import engine_of
from lightning_tricks.core.lightning.fit import optimizer_steps
from lightning_tricks.core.lightning.loaders import available_cores
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import callbacks_of, data_parallel, extremes, is_fitting
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.stages import StagedCallback
from lightning_tricks.core.weights.tensors import checksum
from lightning_tricks.modules.bias_before_batchnorm import biases_before_batchnorm
from lightning_tricks.schedules.scheduler import CurveLR

__all__ = ["Doctor"]


class Finding(NamedTuple):
    """A broken rule.

    Args:
        rule: The name of the rule.
        text: The cause, its place and the remedy.
    """

    rule: str
    text: str


def reused_modules(module: nn.Module) -> Iterator[str]:
    """Find modules without weights (dropout, activations) that are used at several places."""
    places: dict[nn.Module, list[str]] = {}
    for path, parent in module.named_modules():  # A parent with two names is visited once.
        for name, child in parent._modules.items():
            if child is not None and not any((child._parameters, child._buffers, child._modules)):
                places.setdefault(child, []).append(f"{path}.{name}".lstrip("."))
    for child, names in places.items():
        if len(names) > 1:
            yield (
                f"one {type(child).__name__} is used at {some(names, 3)}: a hook, a replacement or quantization of one"
                " affects all. Create one for each place."
            )


def redundant_biases(module: nn.Module) -> Iterator[str]:
    """Find biases that the following BatchNorm cancels."""
    if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
        return  # Tracing a module that an earlier fit has sharded would run FSDP's hooks.
    if names := biases_before_batchnorm(module):
        yield (
            f"BatchNorm cancels {some(names, 3)}: pass bias=False, or call"
            " lightning_tricks.drop_bias_before_batchnorm(model)."
        )


def bf16_weights_in_fp16(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find weights that were pretrained in bf16, which has a larger range than fp16."""
    if not str(trainer.precision).startswith("16"):
        return
    names = [name for name, weight in module.named_parameters() if weight.dtype == torch.bfloat16]
    if not names:
        configured = [
            name for name, sub in module.named_modules() if _configured_dtype(sub) in ("bfloat16", torch.bfloat16)
        ]
        names = [name or type(module).__name__ for name in configured]
    if names:
        yield (
            f"{some(names, 3)} was pretrained in bf16 and trains with precision={trainer.precision!r}, in which its"
            " activations overflow. Use 'bf16-mixed' or '32-true'."
        )


def _configured_dtype(module: nn.Module) -> object:
    """The dtype in the configuration of a transformers model."""
    config = getattr(module, "config", None)
    return getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)


def loader_workers(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find loaders with more workers than this machine has cores, over all of its processes."""
    cores = available_cores()
    for loader in _loaders(trainer):
        if loader.num_workers * trainer.num_devices > cores:
            yield (
                f"num_workers={loader.num_workers} in each of {trainer.num_devices} processes on {cores} cores: the"
                f" workers wait for each other. Pass num_workers={max(1, cores // trainer.num_devices)} or fewer."
            )


def pinned_memory(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find loaders with ``pin_memory`` but no GPU, and loaders without it for a GPU."""
    for loader in _loaders(trainer):
        if loader.pin_memory and isinstance(trainer.accelerator, CPUAccelerator):
            yield "pin_memory=True copies each batch once more, for a GPU that is not used. Leave it out."
        elif not loader.pin_memory and isinstance(trainer.accelerator, CUDAAccelerator):
            yield "a training loader has no pin_memory=True: copies of batches to the GPU block. Pass pin_memory=True."


def schedule_length(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find torch schedules that are longer or shorter than the training, for example because of accumulation."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
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
        if config.frequency == 1 and steps not in (planned, -1, None):  # Without max_epochs steps is -1 or None.
            yield (
                f"{type(scheduler).__name__} is made for {planned} steps, and interval={config.interval!r} gives it"
                f" {steps}. Pass lightning_tricks.optimizer_steps(self.trainer) with interval='step', or return"
                " lightning_tricks.one_cycle(optimizer, self)."
            )


def schedule_interval(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find schedules that count steps and are stepped once an epoch, and the reverse."""
    try:
        steps, epochs = optimizer_steps(trainer), trainer.max_epochs
    except UnknownTotalSteps:
        return
    if trainer.fast_dev_run or epochs is None or not 0 < epochs < steps:  # type: ignore[attr-defined]
        return
    for config in trainer.lr_scheduler_configs:
        length, name = _length(config.scheduler, steps), type(config.scheduler).__name__
        if config.frequency == 1 and config.interval == "epoch" and epochs < length <= steps:
            yield (
                f"{name} needs {length} steps and gets {epochs}, one an epoch, as if it counted the {steps} optimizer"
                " steps. Return it with interval='step'."
            )
        if config.frequency == 1 and config.interval == "step" and length == epochs:
            yield (
                f"{name} ends after {length} of {steps} optimizer steps, as if it counted the {epochs} epochs. Return"
                " it with interval='epoch'."
            )


def _length(scheduler: object, steps: int) -> int:
    """The step at which a scheduler ends its warm-up or changes nothing any more; 0 if it does not tell."""
    if isinstance(scheduler, CurveLR):  # whose steps the user has counted
        return 0 if scheduler.follows else scheduler.settings.get("total_steps") or 0
    if isinstance(scheduler, MultiStepLR):
        return max(scheduler.milestones, default=0)
    if isinstance(scheduler, LambdaLR):  # so are the schedules of transformers
        return max(_length_of(factor, steps) for factor in scheduler.lr_lambdas)
    return scheduler.total_iters if isinstance(scheduler, LinearLR | PolynomialLR | ConstantLR) else 0


def _length_of(factor: Callable[[int], float], steps: int) -> int:
    """The step of a function's maximum, or of its last change if it only falls; 0 if that is not within ``steps``."""
    stride = steps // 1000 + 1
    try:
        values = [factor(step) for step in range(0, 2 * steps + stride, stride)]
    except Exception:  # a table of the user's may end before
        return 0
    changes = [place for place in range(1, len(values)) if abs(values[place] - values[place - 1]) > 1e-9]
    length = stride * (values.index(max(values)) or max(changes, default=0))
    return length if length <= steps else 0


def forgotten_parameters(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find parameters that train, and that no optimizer holds."""
    if engine_of(trainer).is_deepspeed:
        return  # It holds flat copies.
    held = {id(parameter) for optimizer in trainer.optimizers for parameter in weights_of(optimizer)}
    names = [name for name, weight in module.named_parameters() if weight.requires_grad and id(weight) not in held]
    if names:
        yield (
            f"no optimizer of configure_optimizers holds {some(names, 3)}: they are trainable and stay as they are."
            " Pass them to an optimizer, or freeze them with requires_grad_(False)."
        )


def frozen_parameters(module: nn.Module, trainer: L.Trainer) -> Iterator[str]:
    """Find frozen parameters that an optimizer holds, unless a callback decides when they train."""
    if any(isinstance(callback, StagedCallback | BaseFinetuning) for callback in callbacks_of(trainer, Callback)):
        return
    for optimizer in trainer.optimizers:
        held = {id(parameter) for parameter in weights_of(optimizer)}
        names = [name for name, weight in module.named_parameters() if not weight.requires_grad and id(weight) in held]
        if names:
            yield (
                f"{type(optimizer).__name__} holds {some(names, 3)}, which are frozen and never train. Pass it the"
                " parameters with requires_grad alone, or unfreeze them."
            )


MODULE_RULES: dict[str, Callable[[nn.Module], Iterator[str]]] = {
    "reused-modules": reused_modules,
    "redundant-biases": redundant_biases,
}
TRAINER_RULES: dict[str, Callable[[nn.Module, L.Trainer], Iterator[str]]] = {
    "bf16-weights-in-fp16": bf16_weights_in_fp16,
    "loader-workers": loader_workers,
    "pinned-memory": pinned_memory,
    "schedule-length": schedule_length,
    "schedule-interval": schedule_interval,
    "forgotten-parameters": forgotten_parameters,
    "frozen-parameters": frozen_parameters,
}
SYNC_DIST, GATHER, SAME_SAMPLES = "sync-dist", "gather-gradients", "same-samples"
RULES = (*MODULE_RULES, *TRAINER_RULES, SYNC_DIST, GATHER, SAME_SAMPLES)


def lint(module: nn.Module) -> list[Finding]:
    """Find probable mistakes in a module."""
    return [Finding(name, text) for name, rule in MODULE_RULES.items() for text in rule(module)]


def lint_training(module: nn.Module, trainer: L.Trainer) -> list[Finding]:
    """Find probable mistakes in how a Trainer is about to train a module."""
    return [Finding(name, text) for name, rule in TRAINER_RULES.items() for text in rule(module, trainer)]


def _loaders(trainer: L.Trainer) -> list[DataLoader[object]]:
    loaders: list[DataLoader[object]] = []
    apply_to_collection(trainer.train_dataloader, DataLoader, loaders.append)
    return loaders


def same_on_all_ranks(trainer: L.Trainer, batch: Any) -> bool:
    """Whether the tensors of a batch are the same on every rank, of which there are several."""
    tensors: list[torch.Tensor] = []
    apply_to_collection(batch, torch.Tensor, tensors.append)
    sums = [checksum(tensor) for tensor in tensors if tensor.layout == torch.strided]  # not all devices have float64
    digest = int.from_bytes(hashlib.blake2b(repr(sums).encode(), digest_size=6).digest(), "big")
    smallest, largest = extremes(trainer, digest if sums else -1 - trainer.global_rank)
    return smallest == largest


def shuffled_by_each_rank(trainer: L.Trainer, loader: DataLoader[Any]) -> bool:
    """Whether every rank draws from all samples, with torch's own sampler and the same data set."""
    if type(loader.sampler) is not RandomSampler:  # Lightning puts a DistributedSampler in its place
        return False
    fewest, most = extremes(trainer, len(loader.sampler))
    if fewest != most or not most:
        return False
    with isolate_rng():  # the data set may draw random numbers for a sample
        return same_on_all_ranks(trainer, loader.dataset[0])


@final
class Doctor(Trick):
    """Warns about likely mistakes when training starts, and says how to fix them; changes nothing.

    - ``reused-modules``: one dropout or activation is used at several places
    - ``redundant-biases``: biases in front of a BatchNorm, which cancels them
    - ``bf16-weights-in-fp16``: weights pretrained in bf16 are trained in fp16
    - ``loader-workers``: more loader workers than cores
    - ``pinned-memory``: ``pin_memory`` without a GPU, or a GPU without ``pin_memory``
    - ``schedule-length``: torch's OneCycleLR or CosineAnnealingLR with another number of steps than the training
    - ``schedule-interval``: a schedule of torch that counts steps is stepped once an epoch, or the reverse
    - ``forgotten-parameters``: parameters that train are in no optimizer
    - ``frozen-parameters``: frozen parameters are in an optimizer
    - ``sync-dist``: ``self.log(..., sync_dist=True)`` in ``training_step``, which waits for all ranks in every step
    - ``gather-gradients``: ``self.all_gather(z)`` in ``training_step`` cuts the graph of z, as in a contrastive loss
    - ``same-samples``: all ranks get the same first batch, or each one shuffles all samples for itself, from a sampler
      or a dataset that knows no ranks, as with ``use_distributed_sampler=False``

    Args:
        silence: The name of a rule to ignore, or a sequence of names.

    Raises:
        TypeError: If ``silence`` is not a string or a sequence of strings.
        ValueError: If there is no such rule.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[Doctor(silence=["loader-workers"])], accelerator="cpu", logger=False)
    """

    def __init__(self, silence: str | Sequence[str] = ()) -> None:
        check_strings("silence", silence)
        silence = (silence,) if isinstance(silence, str) else tuple(silence)
        for rule in silence:
            check_choice("silence", rule, RULES)
        super().__init__()
        self.silence = silence
        self._watched: set[str] = set()  # The rules that look at the first batch and have found nothing yet.

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._warn(lint(pl_module))  # Tracing must come before the module is sharded or compiled.

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._warn(lint_training(pl_module, trainer))
        self._watched.clear()
        if trainer.world_size > 1:
            self._watched |= {SYNC_DIST, GATHER, SAME_SAMPLES} - {*self.silence}
            self._wrap(pl_module, "log", self._check_log)
            self._wrap(pl_module, "all_gather", self._check_gather)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        _, ranks = data_parallel(trainer)
        if SAME_SAMPLES not in self._watched or ranks == 1:
            return
        remedy = (
            "Leave use_distributed_sampler as it is, or have the sampler or the dataset give each rank"
            " (trainer.global_rank) a part of its own."
        )
        if same_on_all_ranks(trainer, batch):
            text = f"the first batch of all {ranks} ranks has the same samples, so that {ranks} devices do the work of"
            self._warn_once(SAME_SAMPLES, f"{text} one. {remedy}")
        elif any(shuffled_by_each_rank(trainer, loader) for loader in _loaders(trainer)):
            text = f"each of {ranks} ranks shuffles all samples for itself, so that an epoch has every sample {ranks}"
            self._warn_once(SAME_SAMPLES, f"{text} times. {remedy}")

    def _check_log(self, log: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
        log(name, *args, **kwargs)
        arguments = inspect.signature(L.LightningModule.log).bind(None, name, *args, **kwargs).arguments
        if arguments.get("sync_dist") and arguments.get("on_step") is not False:
            text = (
                f"self.log({name!r}, sync_dist=True) in training_step makes each step wait for all ranks. Log it with"
                " on_step=False, on_epoch=True, or without sync_dist: rank 0's mean over the epoch is close."
            )
            self._warn_once(SYNC_DIST, text)

    def _check_gather(self, gather: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(L.LightningModule.all_gather).bind(None, data, *args, **kwargs).arguments
        traced: list[bool] = []
        apply_to_collection(data, torch.Tensor, lambda tensor: traced.append(tensor.requires_grad))
        if any(traced) and torch.is_grad_enabled() and not arguments.get("sync_grads"):
            text = (
                "self.all_gather(...) in training_step gives the other ranks' tensors, and this one's, without"
                " gradients. Pass sync_grads=True where a loss is computed of them, or detach them to say that none is."
            )
            self._warn_once(GATHER, text)
        return gather(data, *args, **kwargs)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._close()  # The first batch has shown what there is.
        self._watched.clear()

    def _warn_once(self, rule: str, text: str) -> None:
        if rule in self._watched:
            self._watched.remove(rule)
            self._warn([Finding(rule, text)])

    def _warn(self, findings: Sequence[Finding]) -> None:
        for rule, text in findings:
            if rule not in self.silence:
                rank_zero_warn(f"Doctor, {rule}: {text}")
