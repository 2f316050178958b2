"""A pretrained model unfrozen part by part, from the head to the stem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise, takewhile
from typing import Any, Literal, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_tricks.callbacks.freeze import batchnorms_of
from lightning_tricks.core.checks import check_choice, check_duration, check_range, compiled, examples
from lightning_tricks.core.gradients import gradients_held
from lightning_tricks.core.shards import LocalWeights
from lightning_tricks.core.trainer import has_comm_state, is_fitting
from lightning_tricks.core.weights import trainable
from lightning_tricks.core.wrapping import wrap_method
from lightning_tricks.schedules.layers import known_layers, numbered_layers
from lightning_tricks.schedules.split_groups import split_groups
from lightning_tricks.schedules.steps import steps_of


def unfreeze_order(model: nn.Module, groups: str | Sequence[str] | None, count: int) -> list[list[str]]:
    r"""The names of the parameters that train, in ``count`` groups from the head to the stem, without the head.

    Args:
        model: The model.
        groups: As of GradualUnfreeze.
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
    if groups is not None and not isinstance(groups, str):
        winners = {name: next((g for g in groups if compiled("groups", g).search(name)), None) for name in names}
        order = [[name for name in names if winners[name] == pattern] for pattern in groups]
        if useless := [pattern for pattern, group in zip(groups, order, strict=True) if not group]:
            raise ValueError(
                f"groups: every pattern must be found in the name of a parameter that trains, and in no earlier group,"
                f" {useless[0]!r} gives none. {examples(names)}"
            )
        return order
    keys = known_layers(model) if groups is None else numbered_layers(model, groups)
    layers = sorted({keys[name] for name in names}, reverse=True)[1:]
    if len(layers) < count:
        raise ValueError(f"at: {count} times need as many layers below the head, found {len(layers)}: give fewer.")
    size, more = divmod(len(layers), count)
    taken = iter(layers)
    parts = [set(islice(taken, size + (n < more))) for n in range(count)]
    return [[name for name in names if keys[name] in part] for part in parts]


@final
class GradualUnfreeze(Callback):
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
        groups: A list of regexes, as many as ``at``, searched in parameters' names: a parameter belongs to the first
            that is found, and trains from the start if none is. Or one regex whose first group is a layer's number, as
            ``r"blocks\.(\d+)"``, or None for a timm or Hugging Face model: the layers below the head in as many groups.
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
        >>> callback = GradualUnfreeze([1, 2], groups=["^net.layer4", "^net"], unit="epoch", lr_factor=0.3)
        >>> trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False)

    References:
        Howard and Ruder, ULMFiT, arXiv 1801.06146.
    """

    def __init__(
        self,
        at: Sequence[int | float],
        *,
        groups: str | Sequence[str] | None = None,
        unit: Literal["step", "epoch"] = "step",
        lr_factor: float = 1.0,
    ) -> None:
        _check_times(at)
        if groups is not None and not isinstance(groups, str) and len(groups) != len(at):
            raise ValueError(f"groups must be as many as at, {len(at)}, got {len(groups)}: {list(groups)!r}.")
        for pattern in [groups] if isinstance(groups, str) else groups or []:
            compiled("groups", pattern)
        check_choice("unit", unit, ("step", "epoch"))
        check_range("lr_factor", lr_factor, 0.0)
        if lr_factor == 0:
            raise ValueError(
                "lr_factor must be above 0, got 0: leave a group that is never to train out, and freeze it."
            )
        self.at = at
        self.groups = groups
        self.unit = unit
        self.lr_factor = lr_factor
        self._order: list[list[str]] = []
        self._joined = 0  # groups
        self._restored: set[str] | None = None  # names of what the checkpoint has as frozen
        self._steps: list[float] = []  # of each group, when it joins
        self._norms: list[tuple[_BatchNorm, int]] = []
        self._silenced: list[tuple[_BatchNorm, int]] = []  # those put into eval mode
        self._weights: LocalWeights | None = None  # while a fit runs
        self._undo: list[Callable[[], None]] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not is_fitting(trainer):
            return
        self._leave()
        weights = gradients_held(trainer, pl_module, "GradualUnfreeze")
        if has_comm_state(trainer):
            raise MisconfigurationException(
                "GradualUnfreeze changes what DDP communicates, and a communication hook with a state (PowerSGD, local"
                f" SGD) remembers what it was, got {type(trainer.strategy).__name__} with one: leave that out."
            )
        self._order, self._joined, self._restored, self._norms = [], 0, None, []
        # configure_model has run by then, and neither is the module wrapped nor does it have its optimizers
        self._undo.append(wrap_method(trainer.strategy, "setup", partial(self._set_up, weights)))
        if weights.sharded:
            self._undo.append(wrap_method(trainer.strategy, "load_checkpoint", partial(self._load, trainer)))

    def _set_up(self, weights: LocalWeights, set_up: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        module = weights.module
        try:
            self._order = unfreeze_order(module, self.groups, len(self.at))
        except ValueError as error:
            raise MisconfigurationException(f"GradualUnfreeze: {error}") from error
        self._weights = weights
        self._joined = sum(1 for _ in takewhile(lambda time: time == 0, self.at))
        self._restore()
        self._train(self._names(self._joined), False)
        if not trainable(module):
            raise MisconfigurationException(
                "GradualUnfreeze needs something that trains from the start, got groups that hold every parameter:"
                f" leave the head out of groups={self.groups!r}, or let the first group join at 0."
            )
        undo = wrap_method(trainer.strategy, "setup_optimizers", self._set_up_optimizers)
        try:
            set_up(trainer)
        finally:
            undo()

    def _set_up_optimizers(self, set_up: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        self._train(self._names(self._joined), True)
        try:
            set_up(trainer)
        finally:
            self._train(self._names(self._joined), False)
        named = dict(trainer.lightning_module.named_parameters())
        held = {id(each) for optimizer in trainer.optimizers for g in optimizer.param_groups for each in g["params"]}
        if lost := [name for name in self._names(0) if id(named[name]) not in held]:
            raise MisconfigurationException(
                f"GradualUnfreeze: the optimizer must hold every parameter that is to train, {len(lost)} are in none:"
                f" give it self.parameters(), also those that are frozen at first. {examples(lost)}"
            )
        if self.lr_factor != 1:
            self._split(trainer, named)

    def _split(self, trainer: pl.Trainer, named: dict[str, nn.Parameter]) -> None:
        parts = [([named[n] for n in names], self.lr_factor**k) for k, names in enumerate(self._order, 1)]
        for optimizer in trainer.optimizers:
            schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
            try:
                split_groups(optimizer, [each for each in schedulers if each.optimizer is optimizer], parts)
            except TypeError as error:
                raise MisconfigurationException(f"GradualUnfreeze(lr_factor={self.lr_factor}): {error}") from error

    def _load(self, trainer: pl.Trainer, load: Callable[..., dict[str, Any]], *args: Any, **kw: Any) -> dict[str, Any]:
        """Load, and once more with what trained then: torch leaves out the optimizer's state of what is frozen now."""
        checkpoint = load(*args, **kw)
        if state := checkpoint.get("callbacks", {}).get(self.state_key):
            before = self._joined
            self.load_state_dict(state)
            if self._joined != before:
                for optimizer in trainer.optimizers:
                    optimizer.state.clear()  # a state without entries is what torch fills anew
                return load(*args, **kw)
        return checkpoint

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps = [
            time if self._in_epochs(time) else steps_of(trainer, time, "GradualUnfreeze", "at") for time in self.at
        ]
        stages = {name: stage for stage, names in enumerate(self._order) for name in names}
        self._norms = batchnorms_of(pl_module, stages)  # SyncBatchNorm has replaced them by now
        self._proceed(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._proceed(trainer, pl_module)  # the step changes between accumulation windows only

    def _proceed(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        before = self._joined
        while self._joined < len(self.at) and self._is_due(trainer, self._joined):
            self._join(self._joined + 1)
        strategy = trainer.strategy
        if self._joined > before and isinstance(strategy, DDPStrategy) and strategy.model is not pl_module:
            strategy.model = pl_module
            strategy.configure_ddp()
        for layer, stage in self._norms:
            if stage >= self._joined and layer.training:  # whoever has called train() since
                layer.eval()
                if (layer, stage) not in self._silenced:
                    self._silenced.append((layer, stage))

    def _is_due(self, trainer: pl.Trainer, group: int) -> bool:
        now = trainer.current_epoch if self._in_epochs(self.at[group]) else trainer.global_step
        return now >= self._steps[group]

    def _in_epochs(self, time: int | float) -> bool:
        return self.unit == "epoch" and isinstance(time, int)

    def _join(self, count: int) -> None:
        """Let the first ``count`` groups train."""
        self._train([name for names in self._order[self._joined : count] for name in names], True)
        self._joined = count
        for layer, stage in self._silenced:
            if stage < count:
                layer.train()
        self._silenced = [(layer, stage) for layer, stage in self._silenced if stage >= count]

    def _names(self, first: int) -> list[str]:
        """What belongs to the groups from this one on."""
        return [name for names in self._order[first:] for name in names]

    def _train(self, names: list[str], trains: bool) -> None:
        assert self._weights is not None, "a fit runs"
        self._weights.settle()
        named = dict(self._weights.module.named_parameters())  # a strategy may have replaced what they were
        for name in names:
            named[name].requires_grad_(trains)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self._names(self._joined)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = set(state_dict["frozen"])
        if self._weights is not None:  # shards are restored after the setup
            self._restore()

    def _restore(self) -> None:
        if self._restored is None:
            return
        counts = [n for n in range(len(self.at) + 1) if self._restored == set(self._names(n))]
        if not counts:
            raise MisconfigurationException(
                f"GradualUnfreeze(groups={self.groups!r}) cannot go on where other groups were frozen, got a checkpoint"
                f" with {len(self._restored)} frozen parameters that are not the last of its groups: resume with the"
                " groups of that run."
            )
        self._train(self._names(0), False)
        self._joined = 0
        self._join(counts[0])

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        """Everything trains again."""
        while self._undo:
            self._undo.pop()()
        if self._weights is not None:
            joined = self._joined
            self._join(len(self.at))
            self._weights, self._joined, self._norms = None, joined, []  # a checkpoint may still be saved


def _check_times(at: Sequence[int | float]) -> None:
    if isinstance(at, str) or not isinstance(at, Sequence) or not at:
        raise TypeError(f"at must be a list of times, one for each group, as [1, 2, 0.5], got {at!r}.")
    for place, time in enumerate(at):
        check_duration(f"at[{place}]", time)
    for kind in (int, float):
        times = [time for time in at if isinstance(time, kind)]
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError(f"at must not go back, from the head to the stem, got {list(at)!r}: sort it.")
