"""The tricks that random modules train with: at their no-op limits, at work, and what each needs of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.parameter import is_lazy

import lightning_tricks as lt
from lightning_tricks.core.lightning.patching import wrap_method
from tests.callbacks.test_float8 import NaiveFloat8
from tests.callbacks.test_moe_balance import Experts
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import Enrolment
from tests.fuzz.hooks import FEATURES, act_of
from tests.fuzz.modules import SEVERAL, Spec, suited
from tests.fuzz.parts import DIFFERENTIATES
from tests.fuzz.writes import OWNERS

# -- what stays of a trick of which nothing comes, done by hand -------------------------------------------------------


class Freezes(Callback):
    """Leaves to train what LoRA leaves beside its adapters."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for name, parameter in pl_module.named_parameters():
            if (parameter.is_floating_point() or parameter.is_complex()) and not is_lazy(parameter):
                parameter.requires_grad_(name.startswith("layers.") and not name.startswith("layers.0."))


class Seeded(Callback):
    """Draws anew from here on: LoRA has drawn its adapters."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        L.seed_everything(1, verbose=False)


class Converts(Callback):
    """Puts torchao's own layers where Float8 computes; but for this, theirs are in float8 in eval mode, too."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        before = {*pl_module.modules()}
        NaiveFloat8().begin(pl_module, None)
        for layer in {*pl_module.modules()} - before:
            layer.__class__ = plain_in_eval_mode(type(layer))


@cache
def plain_in_eval_mode(kind: Any) -> Any:
    def forward(layer: Any, x: Any) -> Any:
        return (kind if layer.training else nn.Linear).forward(layer, x)

    return type(kind.__name__, (kind,), {"forward": forward})


class Unscheduled(Callback):
    """Leaves the module's schedules out."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.lr_scheduler_configs = []


class Uncounted(Callback):
    """Sets the counts of the experts to zero, as MoEBalance does, but after each batch."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for layer in pl_module.layers:
            if isinstance(layer, Experts):
                layer.tokens_per_expert.zero_()


class Fails(Callback):
    """Stands before FitsMemory, and has every step run out of memory after its forward and after its backward pass.

    Its batch is then run again whole, so that only what the failed attempts have left could show.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        (trick,) = [callback for callback in trainer.callbacks if isinstance(callback, lt.FitsMemory)]
        trick._shrink = lambda *_: None
        self.failed: set[tuple[str, int]] = set()
        self._undo = [
            wrap_method(owner, name, partial(self._failing, trainer, name))
            for owner, name in ((trainer.strategy, "training_step"), (pl_module, "backward"))
        ]

    def _failing(self, trainer: Any, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, batch = original(*args, **kwargs), trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if torch.is_grad_enabled() and (name, batch) not in self.failed:
            self.failed.add((name, batch))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return output

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        while self._undo:
            self._undo.pop()()


class Sweeps(Callback):
    """Stands for find_lr before the fit."""


# -- tricks -----------------------------------------------------------------------------------------------------------


def limit(*callbacks: Callable[[], Callback]) -> Enrolment:
    """Callbacks of which nothing comes."""
    return Enrolment(callbacks={"off": lambda: [make() for make in callbacks]})


def work(callback: Callable[[], Callback]) -> Enrolment:
    """A callback of which something comes."""
    return Enrolment(callbacks={"on": lambda: [callback()]})


# At their no-op limits. Not here: what users write into a module, e.g. schedules; Compile, which takes seconds; masks;
# a teacher that takes the inputs of one network alone.
TRICKS = {
    **{
        name: trick
        for name, trick in SETTINGS.items()
        if trick.has_limit
        and not (trick.schedule or trick.lean or trick.masks or name in ("Compile", "Distill(module)"))
    },
    # Limits in which the whole machinery runs and nothing comes of it.
    "Float8": limit(lambda: lt.Float8(emulate=True)),
    "HardExampleFilter(0.999)": limit(lambda: lt.HardExampleFilter(0.999)),
    "HardExampleFilter(start=1.0)": limit(lambda: lt.HardExampleFilter(start=1.0)),
    'HardExampleFilter(start=1.0, mode="loss")': limit(lambda: lt.HardExampleFilter(start=1.0, mode="loss")),
    "FitsMemory(fails)": limit(Fails, lt.FitsMemory),
    "LoRA": limit(lambda: lt.LoRA(r"^layers\.0", r=2, alpha=1e-30, train=r"^layers\.[1-9]"), Seeded),
    "LRSchedule(replace=True)": limit(lambda: lt.LRSchedule("cosine", floor=1.0, replace=True)),
    "MoEBalance": limit(lambda: lt.MoEBalance(0.0), Uncounted),
    "Mixup(prob=1e-9)": limit(lambda: lt.Mixup(prob=1e-9)),
    "CutMix(prob=1e-9)": limit(lambda: lt.CutMix(prob=1e-9)),
    "HiddenMixup(prob=1e-9)": limit(lambda: lt.HiddenMixup("layers.1", prob=1e-9)),
    "SequenceLengthWarmup": limit(lambda: lt.SequenceLengthWarmup(0.999, multiple_of=1)),
    "TokenMean": limit(lt.TokenMean),
    "TokenMean(count)": limit(lambda: lt.TokenMean(lambda batch: 1)),
    "find_lr": limit(Sweeps),
}
# Where they change what is trained. Not here: guards, which wait for a bad batch; schedules but for ScheduleFree.
AT_WORK = {
    **{
        name: trick
        for name, trick in SETTINGS.items()
        if (trick.callbacks or trick.sam)
        and not (trick.neutral or trick.spoiled or trick.stops or trick.grows or trick.masks)
        and name != "Distill(module)"
    },
    "GradCacheMixin(chunk=2)": Enrolment(chunk={"on": 2}),
    "LRSchedule(replace=True)": work(lambda: lt.LRSchedule("cosine", warmup=2, replace=True)),
    "ProgressiveResizing(0.5)": work(lambda: lt.ProgressiveResizing(0.5, stop=4, multiple_of=1)),
    "SequenceLengthWarmup(0.5)": work(lambda: lt.SequenceLengthWarmup(0.5, stop=4, multiple_of=2)),
}
# What a module trains like with a trick at its limit, where that is not without it.
LIKE = {
    "Float8": limit(Converts),
    "LoRA": limit(Freezes, Seeded),
    "LRSchedule(replace=True)": limit(Unscheduled),
    "MoEBalance": limit(Uncounted),
}
EXPERTS = {"net": "experts"}  # with a convolution and a wide layer, too
# The features that a description must have for a trick to do something.
NEEDS: dict[str, dict[str, str]] = {
    **dict.fromkeys(["BatchTransform", "ChannelsLast", "CutMix", "ProgressiveResizing"], EXPERTS),
    **dict.fromkeys(["Float8", "MoEBalance"], EXPERTS),
    "NEFTune": {"net": "tokens"},
    "ScheduleFree": {"optimizer": "SGD"},  # whose place its own takes
    "SequenceLengthWarmup(0.5)": {"net": "recurrent"},
}
SCRIPTED = ("scripted with BatchNorm", "traced with BatchNorm")
WRITERS = {*OWNERS, *(feature for feature in FEATURES if not feature.endswith(("draws", "once")))}
# The features that a description is without, beside a trick that rightly trains such a module otherwise.
WITHOUT: dict[str, set[str]] = {
    # Pruning holds the layers whose place torchao's take, which differentiate once.
    "Float8": {"pruning", *DIFFERENTIATES},
    # The mixin has the training step, and that its loss is None is known at the batch.
    "GradCacheMixin": {"training_step(batch)", "training_step(dataloader_iter)", "sometimes None"},
    # Its scoring run scales the rows of an embedding, and a step may never come.
    "HardExampleFilter(0.999)": {"embedding with max_norm"},
    # Its optimizer has adapters, too, which norms sum over and noise is drawn for; frozen weights must not change.
    "LoRA": {"noise on gradients", "LBFGS", "clip", "two optimizers", "embedding with max_norm", "pruning", *WRITERS},
    # Of layers and batches that take eight features.
    "ProgressiveResizing(0.5)": {"frozen", "shared submodule", "tied", "one tensor"},
    "SequenceLengthWarmup(0.5)": {"frozen", "shared submodule", "one tensor"},
    "ScheduleFree": {"two optimizers", "lazy"},  # one takes their place, whose groups need weights that exist
    # Its start is a share of a training that is made longer; that steps go past Lightning is known after the first one.
    "SWA": {*SEVERAL, "past Lightning"},
    # They go on with the random numbers of the first fit.
    "ExactResume": {"resumes", "resumes with other settings"},
    "LabelErrors": {"resumes", "resumes with other settings"},
    "Preemption": {"resumes", "resumes with other settings"},
    "Throughput": {"training_step(dataloader_iter)"},  # whose batches are known at their end
    # Where it does something: the last window of accumulated batches is short.
    "TokenMean": {"accumulate", "accumulation", "again with other settings", "resumes with other settings"},
}
# Where sums have another order; the tricks that are compared so.
TOLERANCES = {"ChannelsLast": 1e-4}
MIXED_IN = ("sam", "chunk", "schedule")  # the parts of a trick that are not callbacks


def together(*parts: tuple[Enrolment, str]) -> Enrolment:
    """Several tricks as one, each at work ("on") or at its limit ("off")."""
    found = {part: [(getattr(trick, part) or {}).get(state) for trick, state in parts] for part in MIXED_IN}
    first = {part: next((each for each in values if each is not None), None) for part, values in found.items()}
    return Enrolment(
        callbacks={"off": lambda: [each for trick, state in parts for each in trick.make_callbacks(state)]},
        **{part: {"off": value} for part, value in first.items() if value is not None},
    )


def kind(name: str) -> str:
    """The name of a trick without its settings."""
    return name.split("(")[0]


def found(table: dict[str, Any], name: str) -> Any:
    """What a table has for a trick with its settings, or for all settings."""
    return table.get(name) or table.get(kind(name)) or {}


def suited_to(spec: Spec, *names: str) -> Spec:
    """The description with what tricks need of a module, and without what they train otherwise."""
    for name in names:
        spec, unfit = replace(spec, **found(NEEDS, name)), {*found(WITHOUT, name)}
        for field in fields(Spec):
            value = getattr(spec, field.name)
            if isinstance(value, tuple):
                spec = replace(spec, **{field.name: tuple(each for each in value if not unfit & {*features(each)})})
            elif unfit & {*features(value)}:
                spec = replace(spec, **{field.name: field.default})
    return suited(spec)


def features(value: Any) -> Iterator[Any]:
    """The names in a field of a description."""
    yield from vars(value).values() if is_dataclass(value) else [value]


def known(spec: Spec, name: str, state: str) -> str:
    """Why a trick does something else with such a module, where that is known; "" if it should not."""
    by_targets = ("Mixup(prob", "CutMix(prob", "HiddenMixup(prob", 'HardExampleFilter(start=1.0, mode="loss")')
    if state == "on":
        by_targets = ("Mixup", "CutMix", "HiddenMixup", 'HardExampleFilter(mode="loss")')
    two = spec.manual == "two optimizers"
    unseen = ("without targets", "NumPy", *(["own Function"] if name == "LabelErrors" else []))
    if name.startswith((*by_targets, "LogitAdjustment", "LabelErrors")) and two and spec.loss in unseen:
        return "that no loss saw the target is known at the end of the batch only, since another loss might follow"
    if name in ("GradualUnfreeze", "LayerFreezing") and two and state == "on":
        return "the loss of an optimizer has no gradient while all of its weights are frozen, as backward says then"
    writes = [hook for hook, act in filter(None, map(act_of, spec.hooks)) if act != "draws"]
    if kind(name) in ("EMA", "SWA", "ScheduleFree") and any("validation" in hook for hook in writes):
        return "what validation writes into weights is written into the averaged ones, which are there meanwhile"
    if name.startswith(("FitsMemory(fails)", "SAM")) and spec.net == "traced" and spec.trainer == "bf16":
        return (
            "torch fuses a traced layer from its second pass on, whose gradients in 16 bits are rounded otherwise then"
        )
    if name.startswith("Distill") and state == "on" and spec.net == "traced with BatchNorm":
        return "torch computes a traced BatchNorm in the mode in which it was traced, whatever the teacher's mode is"
    if name in ("GradualUnfreeze", "LayerFreezing") and state == "on" and spec.net in SCRIPTED:
        return "the statistics of a frozen BatchNorm in TorchScript go on to change, which is not right yet"
    skips = "optimizer_step that steps every other time" in spec.hooks
    if name == "EMA" and skips and "embedding with max_norm" in spec.extras:
        return "the average is one of weights after steps, and a forward pass that no step follows scales the embedding"
    return ""
