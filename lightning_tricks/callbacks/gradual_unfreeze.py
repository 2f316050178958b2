"""A pretrained model unfrozen part by part, from the head to the stem."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice, pairwise, takewhile
from typing import Any, Literal, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_duration, check_range, examples
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
    r"""The names of the parameters that train, in ``count`` groups from the head to the stem, without the head.

    Args:
        model: The model.
        parameters: The groups, as for GradualUnfreeze.
        count: How many groups; layers are dealt out to them as evenly as they go, the fuller groups first.

    Raises:
        ValueError: If a pattern gives no parameter, there are fewer layers than groups, or nothing tells the layers.

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
                    f"parameters: each pattern must select a parameter that trains and that no pattern before it"
                    f" selects, {pattern!r} selects none. {examples(names)}"
                )
        return order
    keys = known_layers(model) if parameters is None else numbered_layers(model, parameters)
    layers = sorted({keys[name] for name in names}, reverse=True)[1:]
    if len(layers) < count:
        raise ValueError(f"at: {count} times need as many layers below the head, found {len(layers)}: give fewer.")
    size, more = divmod(len(layers), count)
    taken = iter(layers)
    parts = [set(islice(taken, size + (n < more))) for n in range(count)]
    return [[name for name in names if keys[name] in part] for part in parts]


class Stages:
    """Groups of parameters from the head to the stem, which join one after the other; the rest always trains."""

    def __init__(self, weights: LocalWeights, order: list[list[str]]) -> None:
        self.weights, self.order = weights, order
        self.joined = len(order)
        self._held: dict[str, nn.Parameter] | None = None
        self._norms: list[tuple[_BatchNorm, int]] = []
        self._silenced: list[tuple[_BatchNorm, int]] = []  # those put into eval mode

    def names(self, first: int = 0) -> list[str]:
        """What belongs to the groups from this one on."""
        return [name for names in self.order[first:] for name in names]

    def frozen(self) -> list[str]:
        """What belongs to the groups that have not joined."""
        return self.names(self.joined)

    def hold(self) -> None:
        """Know the parameters from now on by what they are, whatever wraps their modules and changes their names."""
        self._held = self.named()

    def named(self) -> dict[str, nn.Parameter]:
        """The parameters by name; a strategy may replace them in its setup."""
        self.weights.reshard()  # a gathered weight takes over what its shards have, when it is gathered
        if self._held is not None:
            return self._held
        parameters = dict(self.weights.module.named_parameters())
        return {name: parameters[name] for name in self.names()}

    def train(self, names: Collection[str], trains: bool) -> None:
        """Let parameters train, or not."""
        named = self.named()
        for name in names:
            named[name].requires_grad_(trains)

    def join(self, count: int) -> None:
        """Let the first ``count`` groups train, and no other.

        torch up to 2.10 at least goes on with compiled code that gives no gradients to what was frozen: it is dropped.
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
        """Let join what is not in ``frozen``; False if those are not the last groups."""
        counts = [n for n in range(len(self.order) + 1) if set(frozen) == set(self.names(n))]
        if counts:
            self.join(counts[0])
        return bool(counts)

    def find_norms(self) -> None:
        """Find the BatchNorm layers as they are now, which SyncBatchNorm may have replaced."""
        named = self.named()
        stages = {named[name]: stage for stage, names in enumerate(self.order) for name in names}
        self._norms = batchnorm_stages(self.weights.module, stages)

    def silence(self) -> None:
        """Put the BatchNorm layers of what is frozen into eval mode, whoever has called ``train()`` since."""
        for layer, stage in self._norms:
            if stage >= self.joined and layer.training:
                layer.eval()
                if (layer, stage) not in self._silenced:
                    self._silenced.append((layer, stage))


@final
class GradualUnfreeze(Trick):
    r"""Gradual unfreezing: the head trains from the start, the parts below it join one by one, down to the stem.

    The k-th group, k = 1, 2, ..., gets gradients from ``at[k-1]`` on; its learning rate is that of your optimizer times
    ``lr_factor**k``, and follows the schedule from the first step, as if the group had always been there. What is
    frozen is not touched by momentum or weight decay, its BatchNorm layers are in eval mode, and it costs no gradients.
    Give the optimizer all parameters, in whatever groups (``self.parameters()``): they are trainable while
    ``configure_optimizers`` runs, and a group of which a part is frozen is split, so no group is added later and a
    checkpoint fits at any time. What you froze yourself stays frozen. After training everything is trainable again.

    Under DDP the module is wrapped anew whenever a group joins, so that each wrapper knows exactly what trains, and
    ``find_unused_parameters`` is not needed. Compared with Lightning's BackboneFinetuning: several groups, any
    schedule, steps as well as epochs, and groups of the optimizer that do not depend on when it was saved.

    Args:
        at: When the groups join, in order: ints count ``unit``, floats are fractions of training in [0, 1].
        parameters: A sequence of patterns, as many as ``at``: regular expressions searched in parameters' names, or
            names of classes. A parameter belongs to the first pattern that selects it, and trains from the start if
            none does. Or one regular expression whose first group is the number of a layer, as ``r"blocks\.(\d+)"``,
            or None for a timm or Hugging Face model: then the layers below the head make as many groups.
        unit: What an int counts, "step" (optimizer steps) or "epoch".
        lr_factor: Factor of the learning rate from a group to the next, above 0 (ULMFiT has 1/2.6).

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or times that go back.
        MisconfigurationException: At setup, under a strategy that owns the optimizer (DeepSpeed, FSDP1) or with a
            communication hook that has a state (PowerSGD); when training starts, if the groups are not found, nothing
            would train or an optimizer lacks a frozen parameter, if the scheduler is neither torch's nor of this
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
                "lr_factor must be above 0, got 0: leave a group that is never to train out, and freeze it."
            )
        super().__init__()
        self.at = at
        self.parameters = parameters
        self.unit = unit
        self.lr_factor = lr_factor
        self._stages: Stages | None = None  # while a fit runs
        self._joined_before = 0  # how many groups had joined when it began
        self._frozen: list[str] | None = None  # of the checkpoint, or when the fit was left

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        weights = local_gradients(trainer, pl_module, "GradualUnfreeze")
        if has_comm_state(trainer):
            raise MisconfigurationException(
                "GradualUnfreeze changes what DDP communicates, and a communication hook with a state (PowerSGD, local"
                f" SGD) remembers what it was, got {type(trainer.strategy).__name__} with one: leave that out."
            )
        self._frozen = None
        # configure_model has run by then, and neither is the module wrapped nor does it have its optimizers
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
                "GradualUnfreeze needs something that trains from the start, got groups that hold every parameter:"
                f" leave the head out of parameters={self.parameters!r}, or let the first group join at 0."
            )
        undo = wrap_method(trainer.strategy, "setup_optimizers", partial(self._set_up_optimizers, self._stages))
        try:
            set_up(trainer)
        finally:
            undo()
        self._stages.hold()

    def _set_up_optimizers(self, stages: Stages, set_up: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        stages.train(stages.frozen(), True)
        try:
            set_up(trainer)
        finally:
            stages.train(stages.frozen(), False)
        named = stages.named()
        held = {id(each) for optimizer in trainer.optimizers for g in optimizer.param_groups for each in g["params"]}
        if lost := [name for name in stages.names() if id(named[name]) not in held]:
            raise MisconfigurationException(
                f"GradualUnfreeze: the optimizer must hold every parameter that is to train, {len(lost)} are in none:"
                f" give it self.parameters(), also those that are frozen at first. {examples(lost)}"
            )
        if self.lr_factor != 1:
            self._split(trainer, [[named[name] for name in names] for names in stages.order])

    def _split(self, trainer: pl.Trainer, order: list[list[nn.Parameter]]) -> None:
        parts = [(parameters, self.lr_factor**k) for k, parameters in enumerate(order, 1)]
        for optimizer in trainer.optimizers:
            schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
            try:
                split_groups(optimizer, [each for each in schedulers if each.optimizer is optimizer], parts)
            except TypeError as error:
                raise MisconfigurationException(f"GradualUnfreeze(lr_factor={self.lr_factor}): {error}") from error

    def _load(self, trainer: pl.Trainer, load: Callable[..., dict[str, Any]], *args: Any, **kw: Any) -> dict[str, Any]:
        """Load, and once more with what trained then: torch leaves out the optimizer's state of what is frozen now."""
        checkpoint, stages = load(*args, **kw), self._stages
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if stages is None or not state:
            return checkpoint
        before = stages.joined
        self.load_state_dict(state)
        if stages.joined == before:
            return checkpoint
        for optimizer in trainer.optimizers:
            optimizer.state.clear()  # a state without entries is what torch fills anew
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
        """For averages, whose place in the list must not matter: they take in what trains at an epoch's first batch."""
        assert self._stages is not None, "set with the strategy"
        self._proceed(trainer, pl_module, self._stages)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._stages is not None, "set with the strategy"
        self._proceed(trainer, pl_module, self._stages)  # the step changes between accumulation windows only

    def _proceed(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stages: Stages) -> None:
        due = stages.joined
        while due > self._joined_before and not self._is_due(trainer, due - 1):  # RewindOnSpike has gone back
            due -= 1
        while due < len(self.at) and self._is_due(trainer, due):
            due += 1
        if due != stages.joined:
            stages.join(due)
            strategy = trainer.strategy
            if isinstance(strategy, DDPStrategy) and strategy.model is not pl_module:
                strategy.model = pl_module
                strategy.configure_ddp()
        stages.silence()

    def _is_due(self, trainer: pl.Trainer, group: int) -> bool:
        now = trainer.current_epoch if self._in_epochs(self.at[group]) else trainer.global_step
        return bool(now >= self._steps["at"][group])

    @override
    def _in_steps(self, trainer: pl.Trainer, name: str, duration: Any) -> list[float]:
        """Each time in what it counts: epochs, or optimizer steps."""
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
        self._restore()  # of shards: the others are restored before the setup of the strategy

    def _restore(self) -> None:
        if self._stages is not None and self._frozen is not None and not self._stages.restore(self._frozen):
            raise MisconfigurationException(
                f"GradualUnfreeze(parameters={self.parameters!r}) cannot go on where other groups were frozen, got a"
                f" checkpoint with {len(self._frozen)} frozen parameters that are not the last of its groups: resume"
                " with the groups of that run."
            )

    @override
    def _close(self) -> None:
        """Everything trains again; a checkpoint may still be saved."""
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
            raise ValueError(f"at must not go back, from the head to the stem, got {list(at)!r}: sort it.")
