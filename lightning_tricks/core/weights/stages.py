"""Groups of parameters that train in a part of the training only, from the head to the stem."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_tricks.core.checks import examples
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import has_comm_state, is_fitting
from lightning_tricks.core.selection import batchnorm_stages, select_parameters
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.by_engine import local_gradients
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import trainable


def groups_by_pattern(model: nn.Module, patterns: Sequence[str]) -> list[list[str]]:
    r"""The names of the trainable parameters that each pattern selects, without those of earlier patterns.

    Raises:
        ValueError: If a pattern selects no trainable parameter that no earlier one selects, or takes the number of a
            layer, as ``r"blocks\.(\d+)"``: all layers would be one group.
    """
    names = list(trainable(model))
    groups: list[list[str]] = []
    left = dict.fromkeys(names)  # in the order of the model
    for pattern in patterns:
        if re.search(r"\((\?P<\w+>)?(\\d|\[0-9\])", pattern):
            raise ValueError(
                f"parameters: of a sequence each pattern is one group, and {pattern!r} takes the number of a layer, so"
                " that all layers would be in one. Give this pattern alone as a string, or one pattern for each group;"
                r" without parentheses, as \d+, it is one group."
            )
        groups.append([name for name in select_parameters(model, pattern) if name in left])
        left = {name: None for name in left if name not in groups[-1]}
        if not groups[-1]:
            raise ValueError(
                f"parameters: a pattern must select a trainable parameter that no earlier pattern selects,"
                f" {pattern!r} selects none. {examples(names)}"
            )
    return groups


class Stages:
    """Parameter groups ordered from head to stem, the first of which train; parameters outside them always train."""

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


class StagedCallback(Trick):
    """Trains groups of parameters in a part of the training only; a subclass says which groups, and when.

    Frozen groups get no gradients, and their BatchNorm layers are in eval mode. Under DDP the module is wrapped again
    whenever that changes. After training everything is trainable again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stages: Stages | None = None  # while a fit runs
        self._joined_before = 0  # the number of groups that trained when the fit began
        self._frozen: list[str] | None = None  # frozen names of a checkpoint or of the last fit

    @abstractmethod
    def _order(self, model: nn.Module) -> list[list[str]]:
        """The names of the parameters, in groups from the head to the stem; ValueError if they are not found."""

    @abstractmethod
    def _first(self, stages: Stages) -> int:
        """The number of groups, from the head on, that train at first."""

    @abstractmethod
    def _due(self, trainer: L.Trainer, stages: Stages) -> int:
        """The number of groups, from the head on, that are to train now."""

    def _least(self, stages: Stages) -> int:
        """The smallest number of groups that train at any time."""
        return self._first(stages)

    def _optimizers_made(self, trainer: L.Trainer, stages: Stages) -> None:
        """Called after ``configure_optimizers``, which has found everything trainable."""

    def _changed(self, trainer: L.Trainer, stages: Stages) -> None:
        """Called in training when another number of groups has come to train."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        name = type(self).__name__
        weights = local_gradients(trainer, pl_module, name)
        if has_comm_state(trainer):
            raise MisconfigurationException(
                f"{name} changes which gradients DDP reduces, so it conflicts with a communication hook that"
                f" keeps a state (PowerSGD, local SGD), got {type(trainer.strategy).__name__} with one: leave the hook"
                " out."
            )
        self._frozen = None
        # At that point configure_model has run, but the module is not wrapped and has no optimizers.
        self._wrap(trainer.strategy, "setup", partial(self._set_up, weights))
        if weights.sharded:
            self._wrap(trainer.strategy, "load_checkpoint", partial(self._load, trainer))

    def _set_up(self, weights: LocalWeights, set_up: Callable[[L.Trainer], None], trainer: L.Trainer) -> None:
        try:
            stages = self._stages = Stages(weights, self._order(weights.module))
        except ValueError as error:
            raise MisconfigurationException(f"{type(self).__name__}: {error}") from error
        if trainable(weights.module).keys() <= {*stages.names(self._least(stages))}:
            raise MisconfigurationException(
                f"{type(self).__name__} needs parameters that train from the start to the end, got groups with every"
                f" parameter: leave the head out of them, {self.written()}."
            )
        stages.join(self._first(stages))
        self._restore()
        wrapper = partial(self._set_up_optimizers, stages)
        with ExitStack() as undo:
            undo.callback(wrap_method(trainer.strategy, "setup_optimizers", wrapper))
            set_up(trainer)
        stages.hold()

    def _set_up_optimizers(self, stages: Stages, set_up: Callable[[L.Trainer], None], trainer: L.Trainer) -> None:
        stages.train(stages.frozen(), True)
        try:
            set_up(trainer)
        finally:
            stages.train(stages.frozen(), False)
        self._optimizers_made(trainer, stages)

    def _load(self, trainer: L.Trainer, load: Callable[..., dict[str, Any]], *args: Any, **kw: Any) -> dict[str, Any]:
        """Load the checkpoint, and again once its groups are known: torch skips states of frozen parameters."""
        if (stages := self._stages) is None:
            return load(*args, **kw)
        before, least = stages.joined, self._least(stages)
        stages.join(least)  # whatever trains at any time has a state in the checkpoint
        checkpoint = load(*args, **kw)
        if state := checkpoint.get("callbacks", {}).get(self.state_key):
            self.load_state_dict(state)
        else:
            stages.join(before)
        if stages.joined == least:
            return checkpoint
        for optimizer in trainer.optimizers:
            optimizer.state.clear()  # torch makes empty states anew
        return load(*args, **kw)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self._stages is not None, "set with the strategy"
        self._stages.find_norms()
        self._joined_before = self._stages.joined
        self._proceed(trainer, pl_module, self._stages)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Change what trains before the first batch of an epoch, when averages look for trainable weights."""
        assert self._stages is not None, "set with the strategy"
        self._proceed(trainer, pl_module, self._stages)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._stages is not None, "set with the strategy"
        self._proceed(trainer, pl_module, self._stages)  # global_step changes between accumulation windows only

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        if self._stages is not None and not loss.requires_grad and (frozen := self._stages.frozen()):
            raise MisconfigurationException(
                f"{type(self).__name__}: this loss has no gradient, as everything that it depends on is frozen now."
                f" Skip its backward pass while it is, or let a part train, {self.written()}. {examples(frozen)}"
            )

    def _proceed(self, trainer: L.Trainer, pl_module: L.LightningModule, stages: Stages) -> None:
        if (due := self._due(trainer, stages)) != stages.joined:
            stages.join(due)
            self._changed(trainer, stages)
            strategy: Any = trainer.strategy
            if engine_of(trainer) is Engine.DDP and strategy.model is not pl_module:
                strategy.model = pl_module
                strategy.configure_ddp()
        stages.silence()

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
                f"{self.written()} must resume with the groups of the checkpoint, got a"
                f" checkpoint with {len(self._frozen)} frozen parameters that are not the last of its groups: use the"
                " groups of that run."
            )

    @override
    def _close(self) -> None:
        """Make everything trainable again; ``state_dict`` still returns what was frozen, for a later checkpoint."""
        super()._close()
        if self._stages is not None:
            self._frozen = self._stages.frozen()
            self._stages.join(len(self._stages.order))
            self._stages = None
