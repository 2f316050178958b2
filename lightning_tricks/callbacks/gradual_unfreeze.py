"""Gradual unfreezing of a pretrained model, from the head to the stem."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice, pairwise, takewhile
from typing import Any, Literal, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_duration, check_range, examples
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import has_comm_state, is_fitting
from lightning_tricks.core.selection import batchnorm_stages, check_patterns, select_parameters
from lightning_tricks.core.trick import Conflict, Trick
from lightning_tricks.core.weights.by_engine import local_gradients
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import trainable
from lightning_tricks.schedules.param_groups import known_layers, numbered_layers
from lightning_tricks.schedules.split_groups import split_groups

__all__ = ["GradualUnfreeze"]


def unfreeze_order(model: nn.Module, parameters: str | Sequence[str] | None, count: int) -> list[list[str]]:
    r"""The names of the trainable parameters, in ``count`` groups from the head to the stem, without the head.

    Args:
        model: The model.
        parameters: The groups, as for GradualUnfreeze.
        count: The number of groups; layers are divided evenly, with larger groups first.

    Raises:
        ValueError: If a pattern selects no parameter, there are fewer layers than groups, or the layers are unknown.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        >>> unfreeze_order(model, r"^(\d+)", 2)
        [['1.weight', '2.weight'], ['0.weight']]
        >>> unfreeze_order(model, ["^2", ""], 2)
        [['2.weight'], ['0.weight', '1.weight', '3.weight']]
    """
    names = list(trainable(model))
    if parameters is not None and not isinstance(parameters, str):
        order: list[list[str]] = []
        left = dict.fromkeys(names)  # in the order of the model
        for pattern in parameters:
            order.append([name for name in select_parameters(model, pattern) if name in left])
            left = {name: None for name in left if name not in order[-1]}
            if not order[-1]:
                raise ValueError(
                    f"parameters: a pattern must select a trainable parameter that no earlier pattern selects,"
                    f" {pattern!r} selects none. {examples(names)}"
                )
        return order
    own = "parameters"  # the user's argument, for the error messages
    keys = known_layers(model, own) if parameters is None else numbered_layers(model, parameters, own)
    layers = sorted({keys[name] for name in names}, reverse=True)[1:]
    if len(layers) < count:
        raise ValueError(
            f"at: {count} times need as many layers below the head, found {len(layers)}: give fewer times."
        )
    size, more = divmod(len(layers), count)
    taken = iter(layers)
    parts = [set(islice(taken, size + (n < more))) for n in range(count)]
    return [[name for name in names if keys[name] in part] for part in parts]


class Stages:
    """Groups of parameters from the head to the stem, which join one after the other; all others always train."""

    def __init__(self, weights: LocalWeights, order: list[list[str]]) -> None:
        self.weights, self.order = weights, order
        self.joined = len(order)
        self._held: dict[str, nn.Parameter] | None = None
        self._norms: list[tuple[_BatchNorm, int]] = []
        self._silenced: list[tuple[_BatchNorm, int]] = []  # layers that were put into eval mode here

    def names(self, first: int = 0) -> list[str]:
        """The parameters' names in the groups from number ``first`` on."""
        return [name for names in self.order[first:] for name in names]

    def frozen(self) -> list[str]:
        """The parameters' names in the groups that have not joined."""
        return self.names(self.joined)

    def hold(self) -> None:
        """Keep references to the parameters, whose names change when their modules are wrapped."""
        self._held = self.named()

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by name; a strategy may replace them in its setup."""
        self.weights.reshard()  # a weight has its shards' requires_grad when it is gathered
        if self._held is not None:
            return self._held
        parameters = dict(self.weights.module.named_parameters())
        return {name: parameters[name] for name in self.names()}

    def train(self, names: Collection[str], trains: bool) -> None:
        """Set ``requires_grad`` of parameters."""
        named = self.named()
        for name in names:
            named[name].requires_grad_(trains)

    def join(self, count: int) -> None:
        """Let the first ``count`` groups train, and no others.

        Compiled code is dropped, since in some versions of torch (2.10, for example) it would give no gradients to
        parameters that were frozen.
        """
        self.joined = count
        torch.compiler.reset()
        self.train([name for names in self.order[:count] for name in names], True)
        self.train(self.frozen(), False)
        for layer, stage in self._silenced:
            if stage < count:
                layer.train()
        self._silenced = [(layer, stage) for layer, stage in self._silenced if stage >= count]

    def restore(self, frozen: Collection[str]) -> bool:
        """Let all groups join that are not ``frozen``; False if the frozen ones are not the last groups."""
        counts = [n for n in range(len(self.order) + 1) if set(frozen) == set(self.names(n))]
        if counts:
            self.join(counts[0])
        return bool(counts)

    def find_norms(self) -> None:
        """Find the present BatchNorm layers, which SyncBatchNorm may have replaced."""
        named = self.named()
        stages = {named[name]: stage for stage, names in enumerate(self.order) for name in names}
        self._norms = batchnorm_stages(self.weights.module, stages)

    def silence(self) -> None:
        """Put frozen BatchNorm layers into eval mode, also after a call of ``train()``."""
        for layer, stage in self._norms:
            if stage >= self.joined and layer.training:
                layer.eval()
                if (layer, stage) not in self._silenced:
                    self._silenced.append((layer, stage))


@final
class GradualUnfreeze(Trick):
    r"""Gradual unfreezing: the head trains from the start, and the parts below it join one by one, down to the stem.

    The k-th group, k = 1, 2, ..., gets gradients from ``at[k-1]`` on. Its learning rate is your optimizer's times
    ``lr_factor**k``, and follows the schedule from the first step. Momentum and weight decay do not change frozen
    parameters, their BatchNorm layers are in eval mode, and they need no memory for gradients. Give the optimizer all
    parameters, in any groups (``self.parameters()``): they are trainable while ``configure_optimizers`` runs. Groups
    are split there and never added later, so a checkpoint fits at any time. Parameters that you froze yourself stay
    frozen. After training all others are trainable again.

    Under DDP the module is wrapped again whenever a group joins, so ``find_unused_parameters`` is not needed. Compared
    with Lightning's BackboneFinetuning it has several groups, works with any schedule, counts steps as well as epochs,
    and has the same optimizer groups in every checkpoint.

    Args:
        at: When the groups join, in order: ints count ``unit``, floats are fractions of training in [0, 1].
        parameters: A sequence of patterns, as many as ``at``: regular expressions searched in parameters' names, or
            names of classes. A parameter belongs to the first pattern that selects it, and trains from the start if
            none does. Or one regular expression whose first group is the number of a layer, as ``r"blocks\.(\d+)"``,
            or None for a timm or Hugging Face model; the layers below the head are then divided into groups.
        unit: The unit of ints in ``at``: "step" (optimizer steps) or "epoch".
        lr_factor: Factor of the learning rate from one group to the next, above 0 (ULMFiT has 1/2.6).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or times that are not in order.
        MisconfigurationException: At setup, under a strategy that owns the optimizer (DeepSpeed, FSDP1) or with a
            communication hook that has a state (PowerSGD); when training starts, if the groups are not found, nothing
            would train or an optimizer lacks a frozen parameter, for a scheduler that is neither torch's nor of this
            package (with an ``lr_factor``), for a fraction of an unknown length, or a resume with other groups.

    Example:
        >>> callback = GradualUnfreeze([1, 2], parameters=["^net.layer4", "^net"], unit="epoch", lr_factor=0.3)
        >>> trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False)

    References:
        Howard and Ruder, ULMFiT, arXiv 1801.06146.
    """

    durations = ("at",)
    conflicts = (
        Conflict(("BaseFinetuning",), "both freeze parameters and decide when they train", "Leave one of them out"),
    )

    def __init__(
        self,
        at: Sequence[int | float],
        *,
        parameters: str | Sequence[str] | None = None,
        unit: Literal["step", "epoch"] = "step",
        lr_factor: float = 1.0,
    ) -> None:
        _check_times(at)
        if parameters is not None:
            check_patterns("parameters", parameters)
            if not isinstance(parameters, str) and len(parameters) != len(at):
                raise ValueError(
                    f"parameters must be as many patterns as at has times, {len(at)}, got {list(parameters)!r}."
                )
        check_choice("unit", unit, ("step", "epoch"))
        check_range("lr_factor", lr_factor, 0.0)
        if lr_factor == 0:
            raise ValueError(
                "lr_factor must be above 0, got 0: leave a group out that must never train, and freeze it."
            )
        super().__init__()
        self.at = at
        self.parameters = parameters
        self.unit = unit
        self.lr_factor = lr_factor
        self._stages: Stages | None = None  # while a fit runs
        self._joined_before = 0  # the number of groups that had joined when the fit began
        self._frozen: list[str] | None = None  # frozen names of a checkpoint or of the last fit

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        weights = local_gradients(trainer, pl_module, "GradualUnfreeze")
        if has_comm_state(trainer):
            raise MisconfigurationException(
                "GradualUnfreeze changes which gradients DDP reduces, so it conflicts with a communication hook that"
                " keeps a state (PowerSGD, local SGD), got"
                f" {type(trainer.strategy).__name__} with one: leave the hook out."
            )
        self._frozen = None
        # At that point configure_model has run, but the module is not wrapped and has no optimizers.
        self._wrap(trainer.strategy, "setup", partial(self._set_up, weights))
        if weights.sharded:
            self._wrap(trainer.strategy, "load_checkpoint", partial(self._load, trainer))

    def _set_up(self, weights: LocalWeights, set_up: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        try:
            self._stages = Stages(weights, unfreeze_order(weights.module, self.parameters, len(self.at)))
        except ValueError as error:
            raise MisconfigurationException(f"GradualUnfreeze: {error}") from error
        self._stages.join(sum(1 for _ in takewhile(lambda time: time == 0, self.at)))
        self._restore()
        if not trainable(weights.module):
            raise MisconfigurationException(
                "GradualUnfreeze needs parameters that train from the start, got groups with every parameter:"
                f" leave the head out of parameters={self.parameters!r}, or let the first group join at 0."
            )
        wrapper = partial(self._set_up_optimizers, self._stages)
        with ExitStack() as undo:
            undo.callback(wrap_method(trainer.strategy, "setup_optimizers", wrapper))
            set_up(trainer)
        self._stages.hold()

    def _set_up_optimizers(self, stages: Stages, set_up: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        stages.train(stages.frozen(), True)
        try:
            set_up(trainer)
        finally:
            stages.train(stages.frozen(), False)
        named = stages.named()
        held = {
            id(parameter)
            for optimizer in trainer.optimizers
            for g in optimizer.param_groups
            for parameter in g["params"]
        }
        if lost := [name for name in stages.names() if id(named[name]) not in held]:
            raise MisconfigurationException(
                f"GradualUnfreeze: the optimizers must have every parameter that will train, {len(lost)} are in none:"
                f" pass self.parameters(), which includes those that are frozen at first. {examples(lost)}"
            )
        if self.lr_factor != 1:
            self._split(trainer, [[named[name] for name in names] for names in stages.order])

    def _split(self, trainer: pl.Trainer, order: list[list[nn.Parameter]]) -> None:
        parts = [(parameters, self.lr_factor**k) for k, parameters in enumerate(order, 1)]
        for optimizer in trainer.optimizers:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            try:
                split_groups(
                    optimizer, [scheduler for scheduler in schedulers if scheduler.optimizer is optimizer], parts
                )
            except TypeError as error:
                raise MisconfigurationException(f"GradualUnfreeze(lr_factor={self.lr_factor}): {error}") from error

    def _load(self, trainer: pl.Trainer, load: Callable[..., dict[str, Any]], *args: Any, **kw: Any) -> dict[str, Any]:
        """Load the checkpoint, and again once its groups have joined: torch skips states of frozen parameters."""
        checkpoint, stages = load(*args, **kw), self._stages
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if stages is None or not state:
            return checkpoint
        before = stages.joined
        self.load_state_dict(state)
        if stages.joined == before:
            return checkpoint
        for optimizer in trainer.optimizers:
            optimizer.state.clear()  # torch makes empty states anew
        return load(*args, **kw)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self._stages is not None, "set with the strategy"
        self._stages.find_norms()
        self._joined_before = self._stages.joined
        self._proceed(trainer, pl_module, self._stages)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let groups join before the first batch of an epoch, when averages look for trainable weights."""
        assert self._stages is not None, "set with the strategy"
        self._proceed(trainer, pl_module, self._stages)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._stages is not None, "set with the strategy"
        self._proceed(trainer, pl_module, self._stages)  # global_step changes between accumulation windows only

    def _proceed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stages: Stages) -> None:
        due = stages.joined
        while due > self._joined_before and not self._is_due(trainer, due - 1):  # after a rewind
            due -= 1
        while due < len(self.at) and self._is_due(trainer, due):
            due += 1
        if due != stages.joined:
            stages.join(due)
            strategy: Any = trainer.strategy
            if engine_of(trainer) is Engine.DDP and strategy.model is not pl_module:
                strategy.model = pl_module
                strategy.configure_ddp()
        stages.silence()

    def _is_due(self, trainer: pl.Trainer, group: int) -> bool:
        now = trainer.current_epoch if self._in_epochs(self.at[group]) else trainer.global_step
        return bool(now >= self._steps["at"][group])

    @override
    def _in_steps(self, trainer: pl.Trainer, name: str, duration: Any) -> list[float]:
        """The times in their units: epochs, or optimizer steps."""
        in_steps = super()._in_steps
        return [time if self._in_epochs(time) else in_steps(trainer, name, time) for time in duration]

    def _in_epochs(self, time: int | float) -> bool:
        return self.unit == "epoch" and isinstance(time, int)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"frozen": (self._frozen or []) if self._stages is None else self._stages.frozen()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._frozen = list(state_dict["frozen"])
        self._restore()  # sharded checkpoints are loaded after the strategy's setup

    def _restore(self) -> None:
        if self._stages is not None and self._frozen is not None and not self._stages.restore(self._frozen):
            raise MisconfigurationException(
                f"GradualUnfreeze(parameters={self.parameters!r}) must resume with the groups of the checkpoint, got a"
                f" checkpoint with {len(self._frozen)} frozen parameters that are not the last of its groups: use the"
                " groups of that run."
            )

    @override
    def _close(self) -> None:
        """Make everything trainable again; ``state_dict`` still returns what was frozen, for a later checkpoint."""
        super()._close()
        if self._stages is not None:
            self._frozen = self._stages.frozen()
            self._stages.join(len(self.at))
            self._stages = None


def _check_times(at: Sequence[int | float]) -> None:
    if isinstance(at, str | bytes) or not isinstance(at, Sequence) or not at:
        raise TypeError(f"at must be a list of times, one for each group, as [1, 2, 0.5], got {at!r}.")
    for place, time in enumerate(at):
        check_duration(f"at[{place}]", time)
    for kind in (int, float):
        times = [time for time in at if isinstance(time, kind)]
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError(f"at must be in ascending order, got {list(at)!r}: sort it.")
