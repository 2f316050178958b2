"""What SAM needs of a Trainer: checks, recorded steps, checkpoints with unperturbed weights, a logged norm."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import TORCH, Engine, require_engine
from lightning_tricks.core.lightning.step_watch import holds_parameters
from lightning_tricks.core.lightning.trainer import is_fitting, log_every_n_steps, takes_dataloader_iter
from lightning_tricks.core.report import Row, settings
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.by_engine import local_weights
from lightning_tricks.core.weights.tensors import copy_, hidden_from_autograd
from lightning_tricks.modules.sam.engine import SAMEngine
from lightning_tricks.modules.sam.rules import SAM, selected_names


class SAMHooks(Trick):
    """Checks the Trainer and records its training steps; the half of SAM that mixin and callback have in common."""

    sam: SAM
    name: ClassVar[str] = "SAM"  # for error messages
    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(("static_graph",), "DDP's static graph allows no second run of a step", "Remove static_graph"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._engine: SAMEngine | None = None
        self._has_trained = False

    @override
    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer) or not self.is_active(trainer):
            return
        _check(trainer, pl_module, self.sam, self.name)
        engine = SAMEngine(pl_module, self.sam, local_weights(trainer, pl_module, self.name))
        self._engine, self._has_trained = engine, False
        self._undo.callback(setattr, self, "_engine", None)
        if pl_module.automatic_optimization:
            full = self.sam.micro_batch_size is None
            engine.recorder.start(trainer, pl_module, partial(_perturbs, trainer, self.sam), gradients=full)
            self._undo.callback(engine.recorder.stop)
        else:
            check = register_optimizer_step_pre_hook(partial(self._before_step_by_hand, pl_module))
            self._undo.callback(check.remove)
        self._wrap(trainer, "save_checkpoint", partial(_save, engine))
        self._install(engine, pl_module)

    @abstractmethod
    def _install(self, engine: SAMEngine, pl_module: Any) -> None:
        """Have the module's backward passes go through the engine, until this trick is closed."""

    @override
    def given(self) -> Row:
        return "SAM", settings(self.sam)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._engine is None:
            return
        for name, weight in pl_module.named_parameters():
            if weight.requires_grad and weight.dtype not in (torch.float32, torch.float64):
                raise MisconfigurationException(
                    "SAM needs real weights in fp32, since 16-bit ones round its perturbation away;"
                    f" {type(pl_module).__name__}.{name} is {weight.dtype}. Use precision='bf16-mixed' or '16-mixed';"
                    " for complex weights remove SAM."
                )
        if (patterns := self._engine.sam.parameters) is not None:
            try:
                selected_names(pl_module, patterns)
            except ValueError as error:
                raise MisconfigurationException(f"SAM(parameters={patterns!r}): {error}") from None

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self._engine is not None and not pl_module.automatic_optimization:
            self._engine.schedules.begin_batch()

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._engine is not None and self._engine.recorder.step is not None:
            raise MisconfigurationException(
                f"{type(pl_module).__name__}.backward must call super().backward(loss): SAM works inside it."
            )

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._has_trained = True
        if self._engine is not None:
            self._engine.schedules.check_batch()
        norm = None if self._engine is None else self._engine.norm
        if norm is not None:
            log_every_n_steps(trainer, lambda: {"tricks/sam_grad_norm": norm})

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._engine is not None and not pl_module.automatic_optimization:
            self._check_step(self._engine, pl_module, optimizer)

    def _before_step_by_hand(
        self, pl_module: L.LightningModule, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> None:
        """Check the steps of any optimizer of torch's, also of one that Lightning does not know."""
        # Lightning steps with a closure, which may call SAM, and on_before_optimizer_step comes after it.
        if self._engine is not None and len(args) + len(kwargs) == 1 and holds_parameters(optimizer, pl_module):
            self._check_step(self._engine, pl_module, optimizer)

    def _check_step(self, engine: SAMEngine, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not engine.called and not _calls_sam(pl_module):
            raise _never_called(pl_module)
        engine.steps.before_step(optimizer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._engine is None or pl_module.automatic_optimization:
            return
        self._engine.schedules.check_batch()
        if self._has_trained and not self._engine.called:
            raise _never_called(pl_module)


class MixinHooks(SAMHooks):
    """The hooks that ``SAMMixin`` adds to its Trainer."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    @property
    @override
    def sam(self) -> SAM:  # type: ignore[override]
        return self.module.sam

    @override
    def is_active(self, trainer: L.Trainer) -> bool:
        return trainer.lightning_module is self.module  # Lightning keeps the callbacks that an earlier module brought

    @override
    def written(self) -> str:
        return f"{type(self.module).__name__} with {self.sam}"

    @override
    def _install(self, engine: SAMEngine, pl_module: Any) -> None:
        pl_module._sam = engine
        self._undo.callback(setattr, pl_module, "_sam", None)


def _calls_sam(module: L.LightningModule) -> bool:
    """Whether code of a module, of what it holds, or a function that they call, calls SAM, maybe in a later epoch."""
    kinds = {owner for held in (module, *vars(module).values(), *module.modules()) for owner in type(held).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("lightning", "torch")]
    functions = [value for kind in own for value in vars(kind).values() if inspect.isfunction(value)]
    functions = [inspect.unwrap(function) for function in functions]
    called = [function.__globals__.get(name) for function in functions for name in _names(function.__code__)]
    functions += [function for function in called if inspect.isfunction(function)]
    return any({"sam_backward", "sam_step"} & _names(function.__code__) for function in functions)


def _names(code: CodeType) -> set[str]:
    """The names that a function uses, those of functions inside it included."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*inner)


def _never_called(pl_module: L.LightningModule) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(pl_module).__name__} optimizes manually and never called self.sam_backward(closure) or"
        " self.sam_step(closure): call one of them in training_step, or remove SAMMixin."
    )


def _perturbs(trainer: L.Trainer, sam: SAM) -> bool:
    """Whether the optimizer step that this batch belongs to is one with a perturbation."""
    return trainer.global_step % sam.every_n_steps == 0


def _save(engine: SAMEngine, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Save a checkpoint with the module's own weights, also when it is asked for at perturbed ones."""
    if engine.perturbed is None:
        return original(*args, **kwargs)
    weights, before = engine.perturbed
    moved = [weight.detach().clone() for weight in weights]
    with hidden_from_autograd(weights):
        try:
            copy_(weights, before)
            return original(*args, **kwargs)
        finally:
            copy_(weights, moved)


def _check(trainer: L.Trainer, pl_module: Any, sam: SAM, trick: str) -> None:
    name = type(pl_module).__name__
    if not isinstance(sam, SAM):
        raise MisconfigurationException(f"{name}.sam must be a SAM(rho=...), got {sam!r}.")
    if pl_module.automatic_optimization:
        if takes_dataloader_iter(pl_module):
            raise MisconfigurationException(f"SAM needs the batch: {name}.training_step must not take dataloader_iter.")
    elif sam.every_n_steps > 1 or sam.micro_batch_size is not None:
        raise MisconfigurationException(
            f"With automatic_optimization=False {name} decides itself which steps and samples are perturbed, got {sam}:"
            " leave out every_n_steps and micro_batch_size, and call manual_backward where SAM is not wanted."
        )
    engine = require_engine(trainer, trick, *TORCH, why="where gradients and optimizers are torch's own")
    if engine is Engine.FSDP2 and not (pl_module.automatic_optimization and sam.micro_batch_size is None):
        raise MisconfigurationException(
            "Under ModelParallelStrategy SAM has one perturbation for the batches of all devices and works inside"
            f" automatic optimization, got automatic_optimization={pl_module.automatic_optimization} and {sam}: leave"
            " out micro_batch_size, or use another strategy."
        )
