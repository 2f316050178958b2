"""Random LightningModules, with their batches, callbacks and Trainer: each is built from a description.

A description names features out of the tables below, and prints as the call that makes it again. All that a module
remembers reaches its loss, and what it logs. So what a trick forgets to restore, or does twice, changes the weights.
"""

from __future__ import annotations

import dataclasses
import random
import types
import zlib
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import numpy as np
import pytorch_lightning
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader
from torchmetrics import Accuracy, MetricCollection

from tests.fuzz import labels, padded
from tests.fuzz.batches import BATCHES, NOT_MOVED, Batch, FrozenPair, Opaque, OwnDict
from tests.fuzz.hooks import (
    ACTS,
    BEFORE_STEPS,
    FEATURES,
    OF_THE_DATA,
    OF_THE_MODULE,
    act_of,
    acting,
    after,
    draw_weights,
)
from tests.fuzz.labels import Second
from tests.fuzz.layers import ASKED_FOR, CLASSES, IN_PYTHON, NETS, OF_IMAGES, OF_SEQUENCES
from tests.fuzz.losses import LOSSES
from tests.fuzz.migrations import MIGRATIONS, Migration, part_of
from tests.fuzz.padded import Padded
from tests.fuzz.parts import DIFFERENTIATES, EXTRAS
from tests.fuzz.states import KINDS, MOMENTS, PLACES, UNCOPIED, State, told
from tests.fuzz.writes import MOMENTS as OF_WRITES
from tests.fuzz.writes import OWNERS, SPELLINGS, Write
from tests.nets import Stream

SAMPLES, SIZE = 12, 4  # of the data, of a batch


@dataclass(frozen=True, repr=False)
class Spec:
    """A module and what is around it, every field a name of one of the tables below.

    Args:
        net: The layers, of ``NETS``.
        batch: The structure of its batches, of ``BATCHES``.
        loss: Of ``LOSSES``.
        optimizer: Of ``OPTIMIZERS``.
        manual: How it optimizes by hand, of ``MANUAL``; "" for automatic optimization.
        states: What it remembers.
        writes: What it writes by itself.
        extras: Odd parameters, buffers and submodules, of ``EXTRAS``.
        hooks: Methods that it overrides, of ``HOOKS``, and what is done in others, of ``hooks.FEATURES``.
        second: A second label, or None; the batch then has its structure.
        padded: A loss over padded sequences, or None; in place of ``batch`` and ``loss``.
        data: Where its batches come from, of ``DATA``.
        in_data: Hooks of the LightningDataModule in which something is drawn and counted, of ``hooks.OF_THE_DATA``.
        migration: How its class has changed since it saved the checkpoint that it resumes, of ``MIGRATIONS``, or "".
        callbacks: Of ``CALLBACKS``, beside it.
        trainer: Settings of the Trainer, of ``TRAINERS``.
        seed: Of its weights and data.
    """

    net: str = "linear"
    batch: str = "tuple"
    loss: str = "cross entropy"
    optimizer: str = "SGD"
    manual: str = ""
    states: tuple[State, ...] = ()
    writes: tuple[Write, ...] = ()
    extras: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    second: Second | None = None
    padded: Padded | None = None
    data: str = "loader"
    in_data: tuple[str, ...] = ()
    migration: str = ""
    callbacks: tuple[str, ...] = ()
    trainer: str = "plain"
    seed: int = 0

    def __repr__(self) -> str:
        pairs = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        return f"Spec({', '.join(f'{name}={value!r}' for name, value, default in pairs if value != default)})"


# -- batches ----------------------------------------------------------------------------------------------------------


def samples(spec: Spec) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all samples."""
    generator = torch.Generator().manual_seed(spec.seed)
    shape = (1, 2, 4) if spec.net in OF_IMAGES else (8,)
    x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.double if spec.net == "double" else torch.float)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def form_of(spec: Spec) -> Batch:
    """How a batch is made of inputs and targets, and how it is read: inputs, targets and, maybe, others."""
    held = spec.second or spec.padded
    return BATCHES[spec.batch] if held is None else (held.batch, held.read)


def loader(spec: Spec, spoiled: bool = False) -> DataLoader[Any]:
    """Batches of the structure, in the same order in every epoch; in a spoiled one a sample is not finite."""
    x, y = samples(spec)
    if spoiled:
        x[SIZE + 1] = torch.nan
    make = form_of(spec)[0]
    if spec.data == "stream":
        parts = [range(first, first + SIZE) for first in range(0, SAMPLES, SIZE)]
        return DataLoader(Stream([make(x[ids], y[ids]) for ids in parts]), batch_size=None)
    return DataLoader(range(SAMPLES), SIZE, collate_fn=lambda ids: make(x[ids], y[ids]))


# -- optimizers -------------------------------------------------------------------------------------------------------


class OwnOptimizer(torch.optim.Optimizer):
    """Plain gradient descent, written by a user."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.data -= group["lr"] * weight.grad
        return loss


def _trained(module: Any) -> list[nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad]


def _sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(_trained(module), lr=0.1, momentum=0.9)


def _groups(module: Any) -> Any:
    head, body = list(module.layers[-1].parameters()), []
    body = [weight for weight in _trained(module) if not any(weight is each for each in head)]
    return torch.optim.AdamW([{"params": head, "lr": 0.1}, {"params": body, "lr": 0.01}])


def _scheduled(interval: str) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        optimizer = _sgd(module)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    return make


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": _sgd,
    "Adam": lambda module: torch.optim.Adam(_trained(module), lr=0.05),
    "groups": _groups,
    "step schedule": _scheduled("step"),
    "epoch schedule": _scheduled("epoch"),
    "LBFGS": lambda module: torch.optim.LBFGS(_trained(module), lr=0.1, max_iter=2),
    "own": lambda module: OwnOptimizer(_trained(module)),
    "tuple of lists": lambda module: ([optimizer := _sgd(module)], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]),
    "none": lambda module: None,
}


# -- overridden methods -----------------------------------------------------------------------------------------------

Super = L.LightningModule  # whose methods the overriding ones call


def _step_past(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    closure()
    optimizer.optimizer.step() if hasattr(optimizer, "optimizer") else type(optimizer).step(optimizer)


def _step(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure)


def _every_other(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    if batch_idx % 2 == 0:
        Super.optimizer_step(self, epoch, batch_idx, optimizer, closure)
    else:
        closure()


def _backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    Super.backward(self, loss * 1.5, *args, **kwargs)


def _noisy(self: Any, optimizer: Any) -> None:
    for weight in _trained(self):
        if weight.grad is not None and weight.grad.layout == torch.strided:
            weight.grad += 1e-3 * torch.randn_like(weight.grad)


def _scaled_gradients(self: Any) -> None:
    for weight in _trained(self):
        if weight.grad is not None:
            weight.grad.mul_(0.9)


def _clip(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    given = [weight for weight in _trained(self) if weight.grad is not None]
    if given and not any(weight.grad.is_sparse or weight.grad.is_complex() for weight in given):
        torch.nn.utils.clip_grad_value_(given, 0.1)


def _left_out(self: Any, batch: Any, batch_idx: int) -> int | None:
    return -1 if self.current_epoch == 1 and batch_idx == 1 else None


def _moved(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
    return (
        batch
        if isinstance(batch, FrozenPair | OwnDict | UserDict | types.MappingProxyType)
        else move_data_to_device(batch, device)
    )


def _read_early(self: Any, batch: Any, dataloader_idx: int) -> Any:
    if self.spec.second or self.spec.padded:
        return batch
    x, y = BATCHES[self.spec.batch][1](batch)
    return BATCHES[self.spec.batch][0](x + 0.1 * torch.randn_like(x), y)


def _own_state(self: Any, *args: Any, **kwargs: Any) -> Any:
    return {**Super.state_dict(self, *args, **kwargs), "version": torch.tensor(1)}


def _drop_version(self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    return Super.load_state_dict(
        self, {name: each for name, each in state.items() if name != "version"}, *args, **kwargs
    )


def _save(self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["extra"] = {"classes": CLASSES, "kind": Opaque}
    self.saved = getattr(self, "saved", 0) + 1


def _follow(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    """A teacher that follows the student, as in self-distillation."""
    if isinstance(getattr(self, "teacher", None), nn.Module):
        with torch.no_grad():
            self.teacher.bias.lerp_(self.layers[-1].bias.detach().float(), 0.5)


def _of_iterator(self: Any, dataloader_iter: Any) -> Any:
    batch, batch_idx, _ = next(dataloader_iter)
    return Generated.training_step(self, batch, batch_idx)


def _frozen_at_start(self: Any) -> None:
    self.layers[-1].bias.requires_grad_(self.current_epoch > 0)


HOOKS: dict[str, dict[str, Callable[..., Any]]] = {
    "optimizer_step": {"optimizer_step": _step},
    "optimizer_step past Lightning": {"optimizer_step": _step_past},
    "optimizer_step that steps every other time": {"optimizer_step": _every_other},
    "lr_scheduler_step": {"lr_scheduler_step": lambda self, scheduler, metric: scheduler.step()},
    "backward": {"backward": _backward},
    "backward of torch": {"backward": lambda self, loss, *args, **kwargs: loss.backward()},
    "noise on gradients": {"on_before_optimizer_step": _noisy},
    "scaled gradients": {"on_after_backward": _scaled_gradients},
    "configure_gradient_clipping": {"configure_gradient_clipping": _clip},
    "a batch left out": {"on_train_batch_start": _left_out},
    "transfer_batch_to_device": {"transfer_batch_to_device": _moved},
    "on_before_batch_transfer": {"on_before_batch_transfer": _read_early},
    "on_after_batch_transfer": {"on_after_batch_transfer": _read_early},
    "state_dict": {"state_dict": _own_state, "load_state_dict": _drop_version},
    "on_save_checkpoint": {"on_save_checkpoint": _save},
    "teacher": {"on_train_batch_end": _follow},
    "training_step(dataloader_iter)": {"training_step": _of_iterator},
    "training_step(batch)": {"training_step": lambda self, batch: Generated.training_step(self, batch, 0)},
    "configure_callbacks": {"configure_callbacks": lambda self: [Brought()]},
    "one configure_callbacks": {"configure_callbacks": lambda self: Brought()},
    "frozen at start": {"on_train_epoch_start": _frozen_at_start},
    "zero_grad to zeros": {
        "optimizer_zero_grad": lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False)
    },
}


# -- manual optimization ----------------------------------------------------------------------------------------------

Optimize = Callable[[Any, Callable[[], Any]], Any]  # of the module, and what computes the loss


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, dict) else output


def _by_hand(module: Any, compute: Callable[[], Any]) -> Any:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    output = compute()
    if output is not None:
        module.manual_backward(_loss(output))
        optimizer.step()
    return output


def _by_closure(module: Any, compute: Callable[[], Any]) -> None:
    optimizer = module.optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = _loss(compute())
        module.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


def _both(module: Any, compute: Callable[[], Any]) -> None:
    for optimizer in module.optimizers():
        module.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        module.manual_backward(_loss(compute()))
        optimizer.step()
        module.untoggle_optimizer(optimizer)


def _past(module: Any, compute: Callable[[], Any]) -> None:
    optimizer = module.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    _loss(compute()).backward()
    optimizer.step()


def _by_sam(module: Any, compute: Callable[[], Any]) -> None:
    """As users of the mixin write it; without it, the plain twin."""
    if not hasattr(module, "sam_backward"):
        _by_hand(module, compute)
        return
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.sam_backward(lambda: _loss(compute()))
    optimizer.step()


def _two(module: Any) -> list[torch.optim.Optimizer]:
    head = list(module.layers[-1].parameters())
    body = [weight for weight in _trained(module) if not any(weight is each for each in head)]
    return [torch.optim.SGD(head, lr=0.1), torch.optim.Adam(body, lr=0.01)]


MANUAL: dict[str, Optimize] = {
    "one optimizer": _by_hand,
    "closure": _by_closure,
    "two optimizers": _both,
    "past Lightning": _past,
    "sam_backward": _by_sam,
}


# -- callbacks and Trainers -------------------------------------------------------------------------------------------


class Planned(Exception):
    """What a callback of a user raises, and must arrive as it is."""


class Seen(Callback):
    """Notes its hooks, and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx, trainer.global_step))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(("optimizer", trainer.global_step))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = _loss(outputs)
        self.seen.append(("end", batch_idx, trainer.global_step, None if loss is None else float(loss)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append("end")


class Counts(Seen):
    """Is given to the Trainer."""


class Brought(Seen):
    """Comes with the module, where Lightning lets a subclass take the place of its base."""


class OldKey(Seen):
    """Has a class for its key, as Lightning itself had once."""

    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": len(self.seen)}


class Foreign(pytorch_lightning.Callback):
    """A callback of the package's other name."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.global_step)


class Raises(Callback):
    """Fails in mid-fit."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            raise Planned("of a user")


class Renames(Callback):
    """Gives a weight another name in mid-fit."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0:
            parametrize.register_parametrization(pl_module.layers[-1], "weight", nn.Identity())


class Draws(Callback):
    """Draws random numbers beside the module."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        torch.rand(1), random.random(), np.random.rand()


def _stop() -> Any:
    return pytorch_lightning.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9, check_on_train_epoch_end=True)


def _step_saved() -> Any:
    return LambdaCallback(on_train_batch_end=lambda trainer, module, *_: trainer.callback_metrics.get("loss"))


CALLBACKS: dict[str, Callable[[], Any]] = {
    "counts": Counts,
    "old key": OldKey,
    "foreign": Foreign,
    "foreign early stopping": _stop,
    "raises": Raises,
    "renames": Renames,
    "draws": Draws,
    "lambda": _step_saved,
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3, verbose=0),
    "accumulation": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
    "checkpoint": lambda: ModelCheckpoint(every_n_train_steps=2, save_weights_only=True),
}

TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.5},
    "steps": {"max_epochs": 3, "max_steps": 5},
    "bf16": {"precision": "bf16-mixed"},
    "few batches": {"limit_train_batches": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "validates": {},
    "validates amid epochs": {"val_check_interval": 2},
    "validates and ends amid an epoch": {"val_check_interval": 1, "max_steps": 2},
    "again": {},
    "again with other settings": {},
    "resumes": {},
    "resumes with other settings": {},
}
VALIDATES = ("validates", "validates amid epochs", "validates and ends amid an epoch")
SEVERAL = ("again", "again with other settings", "resumes", "resumes with other settings")  # fits


# -- where batches come from ------------------------------------------------------------------------------------------


class Data(L.LightningDataModule):
    """The loaders of a description; hooks draw numbers and count, and what they count changes the batches."""

    spec: Spec

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def note(self, hook: str) -> None:
        self.seen[hook] = self.seen.get(hook, 0) + 1
        torch.rand(1), random.random(), np.random.rand()

    def train_dataloader(self) -> Any:
        return loader(self.spec)

    def val_dataloader(self) -> Any:
        return loader(self.spec) if self.spec.trainer in VALIDATES else []


def _noting(hook: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.note(hook)
        if hook == "load_state_dict":
            return None
        made = getattr(L.LightningDataModule, hook)(self, *args, **kwargs)
        if hook.endswith("_batch_transfer") and type(made) in (tuple, list) and isinstance(made[0], Tensor):
            return type(made)([made[0] * (1 + 0.01 * self.seen[hook]), *made[1:]])
        return made

    return method


def data_of(spec: Spec) -> Data:
    """The LightningDataModule of a description."""
    kind: Any = type("Data", (Data,), {"spec": spec, **{hook: _noting(hook) for hook in spec.in_data}})
    return kind()


DATA = ("loader", "datamodule", "of the module", "stream")


# -- the module -------------------------------------------------------------------------------------------------------


class Generated(L.LightningModule):
    """A module as its description says; a subclass has the description, and the methods that are overridden."""

    spec: Spec
    is_old = False  # whether its class has not yet changed as the migration says
    in_python = False  # whether it has no TorchScript
    is_drawn = False  # whether its weights are those that hooks draw once

    def __init__(self) -> None:
        super().__init__()
        spec = self.spec
        self.automatic_optimization = not spec.manual
        self.layers = (IN_PYTHON if self.in_python else NETS)[spec.net]()
        self.accuracy = MetricCollection({"accuracy": Accuracy("multiclass", num_classes=CLASSES)})
        for name in spec.extras:
            EXTRAS[name][0](self)
        if spec.second is not None:
            spec.second.make(self)
        if spec.migration:
            MIGRATIONS[spec.migration].make(self, self.is_old)
        for write in spec.writes:
            write.make(self)
        for place, state in enumerate(spec.states):
            setattr(self._owner(state), f"state{place}", state.make())
        if self.is_drawn:
            draw_weights(self)
        moments = {state.moment for state in spec.states}
        if "forward hook" in moments:
            self.layers.register_forward_hook(lambda *_: self.change("forward hook"))
        if "backward hook" in moments:
            self.layers[-1].register_full_backward_hook(lambda *_: self.change("backward hook"))
        if "gradient hook" in moments:
            self.layers[-1].bias.register_hook(lambda _: self.change("gradient hook"))
        if "accumulation hook" in moments:
            self.layers[-1].bias.register_post_accumulate_grad_hook(lambda _: self.change("accumulation hook"))

    def _owner(self, state: State) -> Any:
        return self.layers[-1] if state.place == "layer" else self

    def change(self, moment: str) -> None:
        """Change the states that change now, and write the weights that are written now."""
        for write in self.spec.writes:
            if write.moment == moment:
                write.change(self)
        for place, state in enumerate(self.spec.states):
            if state.moment == moment:
                owner, name = self._owner(state), f"state{place}"
                setattr(owner, name, state.changed(getattr(owner, name), self.trainer.global_step + 1))

    def written_by_hand(self) -> list[Any]:
        """The weights that it writes by itself, besides those of an embedding."""
        acts = any(act != "draws" for _, act in filter(None, map(act_of, self.spec.hooks)))
        own = [pair[0] for write in self.spec.writes for pair in OWNERS[write.owner].pairs(self)]
        return [*own, *(self.layers[-1].parameters() if acts else ())]

    def memory(self) -> list[Any]:
        """All that the module remembers, in plain Python."""
        states = [getattr(self._owner(state), f"state{place}") for place, state in enumerate(self.spec.states)]
        return [told(state) for state in states]

    def forward(self, x: Tensor) -> Tensor:
        self.change("forward")
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.compute(batch)
        output = MANUAL[self.spec.manual](self, lambda: self.compute(batch))
        return _loss(output) if self.spec.manual == "one optimizer" else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, *_ = form_of(self.spec)[1](batch)
        if self.spec.net in OF_IMAGES and x.ndim == 2:
            x = x.reshape(len(x), 1, 2, 4)
        z = self.layers(x).flatten(0, -2)
        self.log("val_loss", F.cross_entropy(z, y.flatten()), batch_size=len(x))

    def compute(self, batch: Any) -> Any:
        """What the step returns in automatic optimization."""
        return self.contrast(*self.embed(batch))

    def embed(self, batch: Any) -> tuple[Tensor, ...]:
        """The logits, inputs, targets and others; with ``contrast`` what GradCacheMixin asks for."""
        self.change("step")
        x, *others = form_of(self.spec)[1](batch)
        if self.spec.net in OF_IMAGES and x.ndim == 2:
            x = x.reshape(len(x), 1, 2, 4)
        return self(x).to(x.dtype), x, *others

    def losses(self, logits: Tensor, y: Tensor, *others: Tensor) -> Any:
        """What is computed from the targets: a loss, or a dictionary with it."""
        if self.spec.padded is not None:
            return self.spec.padded.of(logits, y, *others)
        output = LOSSES[self.spec.loss](self, logits, y)
        if self.spec.second is None or output is None:
            return output
        loss = _loss(output) + self.spec.second.term(self, logits, *others)
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def contrast(self, logits: Tensor, x: Tensor, y: Tensor, *others: Tensor) -> Any:
        """The loss, or a dictionary with it."""
        output = self.losses(logits, y, *others)
        if output is None:
            return None
        self.accuracy.update(logits.detach().flatten(0, -2), y.flatten())
        extra = sum(EXTRAS[name][1](self, x) for name in self.spec.extras)
        extra = extra + sum(write.term(self, x) for write in self.spec.writes)
        if self.spec.migration:
            extra = extra + 0.1 * part_of(self)(logits.float()).square().mean()
        self.log("loss", _loss(output).detach(), on_step=True, on_epoch=True, batch_size=len(y))
        self.log_dict(self.accuracy, on_epoch=True, on_step=False, batch_size=len(y))
        self.change("log")
        factor = 1 + zlib.crc32(repr(self.memory()).encode()) / 2**33 if self.spec.states else 1
        loss = (_loss(output) + extra) * factor if isinstance(extra, Tensor) else _loss(output) * factor
        return {**output, "loss": loss} if isinstance(output, dict) else loss

    def configure_optimizers(self) -> Any:
        return _two(self) if self.spec.manual == "two optimizers" else OPTIMIZERS[self.spec.optimizer](self)


def module_of(spec: Spec, **attributes: Any) -> type[Generated]:
    """The class of the module."""
    body: dict[str, Any] = {"spec": spec, **attributes}
    if spec.batch in NOT_MOVED and form_of(spec) is BATCHES[spec.batch]:
        body["transfer_batch_to_device"] = _moved
    if spec.data == "of the module":
        body |= {"train_dataloader": lambda self: loader(spec)}
        body |= {"val_dataloader": lambda self: loader(spec)} if spec.trainer in VALIDATES else {}
    for name in spec.hooks:
        body |= HOOKS.get(name, {})
    if spec.migration and not attributes.get("is_old"):
        body |= MIGRATIONS[spec.migration].body
    kind: Any = type("Overriding", (Generated,), body)
    for hook, act in filter(None, map(act_of, spec.hooks)):
        kind = after(kind, hook, ACTS[act])
    moments = {each.moment for each in (*spec.states, *spec.writes)} & {*OF_THE_MODULE}
    for name in sorted(moments):
        kind = after(kind, name, lambda module, name=name: module.change(name))
    return type("Net", (kind,), {})


# -- random descriptions ----------------------------------------------------------------------------------------------


def _mostly(first: str, others: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(first), st.sampled_from(sorted({*others} - {first})))


def _few(table: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(list(table)), max_size=3, unique=True).map(tuple)


def _one_or_two(each: st.SearchStrategy[Any], **unique: Any) -> st.SearchStrategy[Any]:
    return st.lists(each, min_size=1, max_size=2, **unique).map(tuple)


def _writes() -> st.SearchStrategy[tuple[Write, ...]]:
    each = st.builds(
        Write,
        st.sampled_from(sorted(OWNERS)),
        st.sampled_from(sorted(SPELLINGS)),
        _mostly("step", OF_WRITES),
        st.booleans(),
        st.sampled_from([1, 1, 3]),
    )
    return _one_or_two(each, unique_by=lambda write: write.owner)


def _second() -> st.SearchStrategy[Second]:
    return st.builds(
        Second,
        st.sampled_from([*labels.PICKS, *labels.USES, *labels.SEEN]),
        st.sampled_from(sorted(labels.STRUCTURES)),
        _mostly("likelihood", labels.LOSSES),
        _mostly("mean", labels.REDUCTIONS),
        _mostly("int64", labels.DTYPES),
        st.booleans(),
        st.sampled_from(["nothing", "first", "first", "both"]),
    )


def _with(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(fields)


# What a module may have beside the rest, each drawn by itself: a dictionary of fields of ``Spec``.
DIMENSIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "writes": _with(writes=_writes()),
    "hooks": _with(hooks=_one_or_two(st.sampled_from(FEATURES)), trainer=_mostly("plain", TRAINERS)),
    "first weights": _with(hooks=st.sampled_from(BEFORE_STEPS).map(lambda hook: (acting("draws weights once", hook),))),
    "validation": _with(trainer=st.sampled_from(VALIDATES), data=_mostly("loader", DATA)),
    "data": _with(data=st.sampled_from(DATA), in_data=_one_or_two(st.sampled_from(OF_THE_DATA), unique=True)),
    "labels": _with(second=_second(), net=st.sampled_from(sorted({*NETS} - {"double", *ASKED_FOR}))),
    "classes of tensors": st.one_of(
        _with(batch=st.sampled_from(["columns", "unit", "columns beside"])),
        _with(
            states=_one_or_two(
                st.builds(
                    State,
                    st.sampled_from([kind for kind in KINDS if "columns" in kind or "unit" in kind]),
                    _mostly("attribute", PLACES),
                    _mostly("step", MOMENTS),
                )
            )
        ),
    ),
    "TorchScript": _with(net=st.sampled_from(sorted(IN_PYTHON))),
    "slopes": _with(extras=_one_or_two(st.sampled_from(DIFFERENTIATES), unique=True)),
    "migrations": _with(
        migration=st.sampled_from(sorted(MIGRATIONS)),
        trainer=st.sampled_from(["resumes", "resumes with other settings"]),
    ),
    "padding": _with(
        padded=st.builds(Padded, st.sampled_from(sorted(padded.LOSSES)), st.sampled_from(sorted(padded.STRUCTURES))),
        net=st.sampled_from(OF_SEQUENCES),
    ),
    "second fits": _with(
        trainer=st.sampled_from(["again", "again with other settings", "resumes", "resumes with other settings"])
    ),
}


@st.composite
def specs(draw: st.DrawFn, *dimensions: str) -> Spec:
    """A description, with all of these dimensions; features that do not suit each other are left out."""
    states = st.builds(State, st.sampled_from(sorted(KINDS)), _mostly("attribute", PLACES), _mostly("step", MOMENTS))
    spec = Spec(
        net=draw(st.sampled_from([name for name in NETS if name not in ASKED_FOR])),
        batch=draw(_mostly("tuple", BATCHES)),
        loss=draw(st.sampled_from(list(LOSSES))),
        optimizer=draw(_mostly("SGD", OPTIMIZERS)),
        manual=draw(st.one_of(st.just(""), st.just(""), st.just(""), st.sampled_from(sorted(MANUAL)))),
        states=tuple(draw(st.lists(states, max_size=3))),
        extras=draw(_few(EXTRAS)),
        hooks=draw(_few(HOOKS)),
        callbacks=draw(_few(CALLBACKS)),
        trainer=draw(_mostly("plain", TRAINERS)),
        seed=draw(st.integers(0, 9)),
    )
    more = draw(st.lists(st.sampled_from(sorted(DIMENSIONS)), min_size=1, max_size=2, unique=True))
    for dimension in (*(name for name in more if name not in dimensions), *dimensions):
        for name, value in draw(DIMENSIONS[dimension]).items():
            whole = isinstance(value, tuple) and name != "writes"
            spec = replace(spec, **{name: (*getattr(spec, name), *value) if whole else value})
    return suited(spec)


def suited(spec: Spec) -> Spec:
    """The description without what Lightning or torch refuse themselves, so that every module trains without tricks."""
    without: set[str] = set()
    if spec.manual:
        without |= {"accumulation"}
        if spec.trainer in ("accumulate", "clip"):
            spec = replace(spec, trainer="plain")
        if spec.optimizer == "none" or (spec.optimizer == "LBFGS" and spec.manual != "closure"):
            spec = replace(spec, optimizer="SGD")
    if spec.optimizer == "LBFGS":  # which needs Lightning's closure, and a loss from it, and calls it several times
        unfit = ("optimizer_step past Lightning", "training_step(dataloader_iter)")
        spec = replace(spec, hooks=tuple(name for name in spec.hooks if name not in unfit))
        spec = replace(spec, loss="cross entropy") if spec.loss == "sometimes None" else spec
    if spec.batch == "dict that is emptied" and (spec.manual or spec.optimizer == "LBFGS"):  # it is read twice
        spec = replace(spec, batch="dict")
    if spec.batch == "TensorDict" and spec.data == "stream":  # torch would convert it as a mapping, by rows
        spec = replace(spec, batch="dict")
    if spec.padded is not None:
        fits = spec.net in OF_SEQUENCES
        spec = replace(spec, second=None, padded=spec.padded if fits else None)
        without |= {"frozen", "shared submodule"}  # of eight features
    if spec.net == "double":
        spec = replace(spec, second=None)
    if "load_state_dict" in MIGRATIONS.get(spec.migration, Migration()).body:
        spec = replace(spec, hooks=tuple(name for name in spec.hooks if name != "state_dict"))
    if spec.writes:  # of weights that stay, in layers that have them
        without |= {"pruning", "renames"}
        encoders = spec.net == "lazy" or spec.net in IN_PYTHON  # whose copies have no leaves
        spec = replace(spec, writes=tuple(w for w in spec.writes if not (encoders and w.owner == "momentum encoder")))
    if any(name.endswith("loads weights") for name in spec.hooks):
        without |= {"pruning"}
    if any(state.kind in UNCOPIED for state in spec.states):  # pruning copies the module, in each fit
        without |= {"pruning"}
    if "renames" in spec.callbacks or spec.net == "lazy" or spec.net in IN_PYTHON:  # pruning needs weights that stay
        without |= {"pruning"}
    if spec.trainer in ("accumulate", *SEVERAL):
        without |= {"accumulation"}
    if spec.trainer in SEVERAL:  # a checkpoint with a buffer that a new module does not have yet
        without |= {"buffer made late"}
    if (
        spec.optimizer in ("Adam", "groups", "LBFGS", "own")
        or spec.manual == "two optimizers"
        or spec.trainer == "clip"
    ):
        without |= {"sparse embedding"}
    callbacks = tuple(name for name in spec.callbacks if name not in without)
    if spec.trainer.startswith("resumes") and "old key" not in callbacks:  # which only a checkpoint shows
        callbacks += ("old key",)
    return replace(spec, callbacks=callbacks, extras=tuple(name for name in spec.extras if name not in without))
