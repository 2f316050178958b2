"""What an entry of ``SETTINGS`` is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lightning_tricks as lt
from tests.callbacks.test_moe_balance import with_experts
from tests.nets import Net
from tests.reference import tricks as naive_forms
from tests.reference.loop import Both, Naive
from tests.reference.tricks import spoil

LAST_GOOD = "last_good.ckpt"
NEEDS = ("images", "masks", "grows", "convolutions", "experts", "wide", "tokens")  # of a network


@dataclass(frozen=True)
class Enrolment:
    """A trick that does something (``on``) and the same trick where it must change nothing (``off``), if it can.

    Args:
        callbacks: Callbacks of the trick, made by a function of "on" or "off".
        sam: SAM, by the same key.
        schedule: Factory for ``configure_optimizers``, by the same key.
        lean: Whether the head hands on its inputs instead of its logits.
        images: Whether it needs images.
        masks: Whether the targets of these are masks.
        grows: Whether inputs are smaller at first: the network fills what is missing.
        by_batches: Whether it treats each batch apart, so that two batches are not as one of twice the size.
        by_numbers: Whether it needs the numbers of the samples, which a loader with a state keeps to itself. It resumes
            exactly with any other.
        windows: Whether it does something only where gradients are accumulated.
        convolutions: Whether it needs convolutions.
        experts: Whether it needs a mixture of experts.
        wide: Whether it needs a layer with 16 inputs and outputs.
        tokens: Whether it needs an embedding of tokens.
        chunk: The samples in a chunk of GradCacheMixin, by the same key.
        yaml: What a user adds to a LightningCLI configuration for it; None for a function, which YAML does not call.
        neutral: Whether trained weights are those without it: it saves memory or time, or only looks.
        spoiled: Whether it waits for a bad batch: where it is on, a sample is not finite in the last epoch.
        stops: Whether it ends the fit at a bad batch: where it is on, the last epoch begins with one, unless the fit is
            one that goes on from what the trick has left.
        refused: The regimes (of ``REGIMES``) in which it raises an error by name before the first optimizer step.
        twin: The entry that stands for it where a fit costs much; what is its own is tested where fits are cheap.
        refuses: Names of entries with which it raises an error that is no conflict of two classes, and what that says.
        unseen: Names of entries beside which it cannot be told who changed a batch, so that no plain loop has both.
        rounded: Names of entries beside which the last bit decides to which level a weight is rounded after some steps,
            so that only an epoch is compared with a plain loop.
        ordered: Names of entries with which the order of the callbacks matters, as docs/conflicts.md says.
        no_client: Why ``make test-clients`` does not try it in the models of other projects; empty if it does.
        naive: Its naive form for the plain loop, made by a function of the batches and of a ``Seen``, which has what
            the callback made of each batch. None for a trick that is ``neutral``, whose naive form is the plain loop.
    """

    callbacks: dict[str, Callable[[], list[Callback]]] | None = None
    sam: dict[str, lt.SAM] | None = None
    schedule: dict[str, Callable[..., Any]] | None = None
    lean: bool = False
    images: bool = False
    masks: bool = False
    grows: bool = False
    by_batches: bool = False
    by_numbers: bool = False
    windows: bool = False
    convolutions: bool = False
    experts: bool = False
    wide: bool = False
    tokens: bool = False
    chunk: dict[str, int] | None = None
    yaml: dict[str, Any] | None = None
    neutral: bool = False
    spoiled: bool = False
    stops: bool = False
    refused: tuple[str, ...] = ()
    twin: str | None = None
    refuses: dict[str, str] = field(default_factory=dict, hash=False)
    unseen: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    ordered: tuple[str, ...] = ()
    no_client: str = ""
    naive: Callable[[Any, Any], Naive] | None = None

    def plain(self, base: type[Net]) -> type[Net]:
        """``base`` with what the trick needs to be there."""
        made_of = {"convolutions": convolve, "tokens": embed, "experts": with_experts, "wide": widen}
        for needed, make in made_of.items():
            base = made(base, make) if getattr(self, needed) else base
        if self.images or self.grows:
            base = seeing(base, filled if self.grows else lambda x: x.flatten(1))
        if self.images:  # rows and columns; the transfer hook makes them, behind which batch tricks work
            base = type(base)("Net", (base,), {"on_after_batch_transfer": as_images})
        return masking(base) if self.masks else base

    def module(self, base: type[Net], state: str) -> type[Net]:
        """The same with the trick's mixin or schedule."""
        plain, body = self.plain(base), self.spoils() if state == "on" else {}
        plain = made(plain, lean) if self.lean else plain
        mixins: list[type] = []
        if self.sam is not None:
            mixins, body["sam"] = [lt.SAMMixin], self.sam[state]
        if self.schedule is not None and state in self.schedule:
            factory = self.schedule[state]
            body["configure_optimizers"] = lambda module: factory(base.configure_optimizers(module), module)
        if self.chunk is not None:
            mixins, body = [*mixins, lt.GradCacheMixin], {**body, **in_chunks(self.chunk[state])}
        return type(base)("Net", (*mixins, plain), body)

    def spoils(self) -> dict[str, Any]:
        """What a module has beside that where the trick is on."""
        hook = spoil_last_epoch if self.spoiled else spoil_first_batch if self.stops else None
        return {"on_before_batch_transfer": hook} if hook else {}

    def make_callbacks(self, state: str) -> list[Callback]:
        return self.callbacks[state]() if self.callbacks and state in self.callbacks else []

    @property
    def has_limit(self) -> bool:
        """Whether there are settings with which it changes nothing."""
        return all("off" in states for states in (self.callbacks, self.sam, self.schedule, self.chunk) if states)

    def form(self, batches: Any, seen: Any) -> Naive:
        """Its naive form for the plain loop."""
        return Naive() if self.naive is None else self.naive(batches, seen)

    def bare(self) -> Enrolment:
        """The same network without the trick."""
        return Enrolment(**{need: getattr(self, need) for need in NEEDS})


def public_name(row: str) -> str:
    """The public name that a row of the matrix is about."""
    return row.split("(")[0]


def together(one: Enrolment, other: Enrolment) -> Enrolment:
    """Both tricks in a fit, where they are on; the optimizer of ``one`` has the schedule of ``other``."""

    def scheduled(optimizer: Any, module: Any) -> Any:
        for trick in (one, other):
            optimizer = trick.schedule["on"](optimizer, module) if trick.schedule else optimizer
        return optimizer

    either = ("sam", "lean", "chunk", "spoiled", "stops", "by_numbers", *NEEDS)
    return Enrolment(
        callbacks={"on": lambda: [*one.make_callbacks("on"), *other.make_callbacks("on")]},
        schedule={"on": scheduled} if one.schedule or other.schedule else None,
        naive=lambda batches, seen: Both(one.form(batches, seen), other.form(batches, seen)),
        **{name: getattr(one, name) or getattr(other, name) for name in either},
    )


def seeing(base: type[Net], shown: Callable[[Tensor], Tensor]) -> type[Net]:
    """``base`` with a function of its inputs before it."""
    return type(base)("Net", (base,), {"forward": lambda module, x: base.forward(module, shown(x))})


def as_images(module: Any, batch: Any, _: int) -> Any:
    return batch[0].unflatten(1, (2, 4)), batch[1]


def masking(base: type[Net]) -> type[Net]:
    """``base`` for images whose target is a mask: logits are multiplied with the pixels."""
    body = {
        "on_after_batch_transfer": as_masks,
        "forward": lambda module, x: base.forward(module, x)[..., None, None] * x[:, None],
    }
    return type(base)("Net", (base,), body)


def as_masks(module: Any, batch: Any, _: int) -> Any:
    images, labels = as_images(module, batch, _)
    return images, ((images > 0) ^ (labels[:, None, None] > 0)).long()


def made(base: type[Net], make: Callable[[type[Net], Any], None]) -> type[Net]:
    """``base`` whose layers are made by a function of it and the module."""
    return type(base)("Net", (base,), {"__init__": lambda module: make(base, module)})


def in_chunks(chunk: int) -> dict[str, Any]:
    """What a module says to GradCacheMixin: its logits are the embeddings, which the labels go with."""
    return {
        "chunk": chunk,
        "embed": lambda module, batch: (module(batch[0]), batch[1]),
        "contrast": lambda module, logits, y: F.cross_entropy(logits, y),
    }


def schedule(factory: Callable[..., Any], **off: float) -> Enrolment:
    """A curve, which never falls where it is off; all curves are steps of the same ``CurveLR``."""
    twin = None if factory is lt.cosine else "cosine"
    states = {"on": factory, "off": partial(factory, floor=1.0, **off)}
    return Enrolment(schedule=states, twin=twin, naive=scheduled(factory.__name__))


def scheduled(name: str) -> Callable[[Any, Any], Naive]:
    return lambda batches, seen: naive_forms.Scheduled(naive_forms.CURVES[name])


def stepped(optimizer: Any, module: Any = None) -> Any:
    """The schedule that a module ships."""
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def spoil_last_epoch(module: Any, batch: Any, _: int) -> Any:
    """A hook of a module."""
    run = module.trainer
    return spoil(batch) if run.training and run.current_epoch == run.max_epochs - 1 else batch


def spoil_first_batch(module: Any, batch: Any, _: int) -> Any:
    """A hook of a module."""
    run = module.trainer
    bad = run.training and run.current_epoch == run.max_epochs - 1 and Path(run.ckpt_path or "").name != LAST_GOOD
    return spoil(batch, 0) if bad else batch


def filled(x: Tensor) -> Tensor:
    """Eight features: sequences with zeros behind them, and images of 2 x 4 pixels by the nearest ones."""
    return F.pad(x, (0, 8 - x.shape[1])) if x.ndim == 2 else F.interpolate(x[:, None], (2, 4)).flatten(1)


def convolve(base: type[Net], module: Net) -> None:
    """Have convolutions in place of the first layer."""
    base.__init__(module)
    norms = [nn.BatchNorm2d(8)] if any(isinstance(layer, nn.BatchNorm1d) for layer in module.layers) else []
    first = [nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 8, 3, padding=1)]
    module.layers = nn.Sequential(*first, *norms, nn.Tanh(), nn.Flatten(), nn.Linear(64, 2))


def lean(base: type[Net], module: Net) -> None:
    """Compute the loss without logits."""
    base.__init__(module)
    lt.lean_loss(module.layers[-1])


def widen(base: type[Net], module: Net) -> None:
    """Have another layer before the last."""
    base.__init__(module)
    *layers, last = module.layers
    module.layers = nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), last)


class Words(nn.Module):
    """Adds the embeddings of tokens to features, each of which is one of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x > 0).long()).sum(2)


def embed(base: type[Net], module: Net) -> None:
    """Have embeddings of tokens before the last layer."""
    base.__init__(module)
    module.layers.insert(len(module.layers) - 1, Words())


def neutral(
    callback: Callable[[], Callback],
    yaml: Any,
    *refused: str,
    net: str | None = None,
    **others: Any,
) -> Enrolment:
    model = {"model": {"class_path": f"tests.conformance.yaml_nets.{net}"}} if net else {}
    return Enrolment(
        callbacks={"on": lambda: [callback()], "off": lambda: [callback()]},
        neutral=True,
        yaml={"trainer": {"callbacks": [yaml]}, **model},
        refused=refused,
        **others,
    )


def guard(callback: Callable[[], Callback], yaml: Any, *refused: str, **others: Any) -> Enrolment:
    return replace(neutral(callback, yaml, *refused, net="SpoiledNet", **others), neutral=False, spoiled=True)


def terminator(callback: Callable[[], Callback], yaml: Any) -> Enrolment:
    return replace(neutral(callback, yaml, net="StoppedNet"), stops=True)
