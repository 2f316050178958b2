"""Distillation: the module's outputs, or those of its layers, are drawn to the ones of a teacher on the same batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, final

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_tricks.core.averaging.teaching import Call, TeachingCallback
from lightning_tricks.core.checks import check_range, check_type, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.trainer import callbacks_of, is_fitting, log_every_n_steps
from lightning_tricks.core.mixed_targets.target import returned_loss
from lightning_tricks.core.replay.data_watch import versions
from lightning_tricks.core.replay.graph import find_graph_node, reentrant_checkpoint
from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.core.selection import check_patterns, listed, outermost, select_modules

__all__ = ["Distill", "distillation_loss"]

Features = str | Sequence[str] | Mapping[str, str]
Versions = list[Any]  # of tensors
_Seen = dict[str, list[tuple[Tensor, Versions]]]  # outputs, with the versions of each


def distillation_loss(
    student: Tensor, teacher: Tensor, *, temperature: float = 2.0, mask: Tensor | None = None, dim: int = -1
) -> Tensor:
    """The distance of predicted classes: ``T**2 * KL(softmax(teacher / T) || softmax(student / T))``.

    T is the temperature. The loss is computed in fp32, and is the mean over all samples, tokens or pixels. The factor
    ``T**2`` keeps its gradients as large as those of a cross-entropy.

    Args:
        student: Logits of the student, with at least two classes along ``dim``.
        teacher: Logits of the teacher, of the same shape; gradients do not flow into them. A class at -inf, which is
            masked out, adds nothing.
        temperature: T, above 0, at most 1e6; a larger one counts the unlikely classes for more.
        mask: Which samples, tokens or pixels count, other than 0, of the shape of the logits without ``dim``; None for
            all.
        dim: The dimension of the classes.

    Returns:
        The loss, a scalar; 0 if none counts.

    Raises:
        TypeError: For a temperature that is no number, and a dimension that is no integer.
        ValueError: For a temperature out of range, or tensors whose shapes do not go together.

    Example:
        >>> distillation_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, -2.0]]))
        tensor(1.3113)

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531.
    """
    _check_temperature(temperature)
    check_type("dim", dim, int)
    if not -student.ndim <= dim < student.ndim:
        raise ValueError(f"dim must be a dimension of the logits, {tuple(student.shape)}, got {dim}.")
    if student.shape != teacher.shape or student.shape[dim] < 2:
        raise ValueError(
            f"student and teacher must be logits of one shape, of at least two classes along dim={dim}, got"
            f" {tuple(student.shape)} and {tuple(teacher.shape)}."
        )
    mine = F.log_softmax(student.float() / temperature, dim)
    theirs = F.log_softmax(teacher.detach().float() / temperature, dim)
    divergences = F.kl_div(mine, theirs, reduction="none", log_target=True)
    distances = temperature**2 * divergences.masked_fill(theirs == -torch.inf, 0.0).sum(dim)  # as 0 * log(0) is 0
    if mask is None:
        return distances.mean()
    if mask.shape != distances.shape:
        raise ValueError(
            f"mask must have the shape of the logits without dim={dim}, {tuple(distances.shape)}, got"
            f" {tuple(mask.shape)}."
        )
    counts = mask != 0
    return distances.masked_fill(~counts, 0.0).sum() / counts.sum().clamp(min=1)


def _check_temperature(temperature: float) -> None:
    check_range("temperature", temperature, 0.0, 1e6)
    if temperature == 0:
        raise ValueError(f"temperature must be above 0, got {temperature!r}.")


class _Called(NamedTuple):
    """A call in a training step: whose, what it returned, and the versions of what it was given and has returned."""

    name: str
    call: Call
    output: Any
    inputs: Versions
    outputs: Versions


@final
class Distill(TeachingCallback):
    """Trains on a teacher's outputs as well: ``loss + weight * T**2 * KL(softmax(z_t / T) || softmax(z_s / T))``.

    z_s are the logits that the module's training step computes, z_t those of the teacher for the same inputs, in eval
    mode and without gradients, and T is the temperature. The training step is not changed. The teacher is called with
    the inputs of ``self(...)``, or else of the only part that the training step calls, such as ``self.model(...)``; of
    several calls in a step the mean is taken. An output is a tensor of logits, or has them as ``logits``, as models of
    transformers do: (B, C), (B, L, C) with the classes last, or (B, C, H, W). Tokens that an ``attention_mask`` of the
    call leaves out do not count; those of a decoder are in its ``decoder_attention_mask``.

    The teacher is another module, of which only the outputs must fit, or a ``Teacher``: an average of the module, which
    makes it a mean teacher, or with ``decay=1`` a copy of it as training begins. The teacher's weights are neither in
    ``parameters()`` nor in the ``state_dict`` nor in an optimizer. Another module is on every device in full, and goes
    back where it was when the fit ends. A ``Teacher`` that is itself among the callbacks is shared.

    With ``features`` the outputs of layers are compared, by their mean squared error, and logits are not. Two of these
    callbacks do both. ``tricks/distill_loss`` is the loss of the last batch before it is weighted.

    Args:
        teacher: A module, or ``Teacher(decay=...)``.
        weight: The factor of the distance, at least 0; 0 only logs it.
        temperature: T, above 0; None for the mean squared error of outputs that are no logits, as for regression.
        features: Regular expressions searched in the names of the layers that are compared, or names of classes, in the
            module and the teacher alike; of nested ones the outermost. A dictionary where names differ, from those of
            the module to those of the teacher.
        student: The name of the part of the module whose inputs the teacher gets and whose outputs are compared; None
            to find it.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, in manual optimization and for an average under DeepSpeed; at fit start,
            for layers that are not there; in the first step, if it is not clear which call the teacher should repeat,
            or if what is compared differs in shape.

    Example:
        >>> big = nn.Linear(8, 2)
        >>> trainer = L.Trainer(callbacks=[Distill(big, weight=0.5)], accelerator="cpu", logger=False)

    References:
        Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531; Romero et al., FitNets, arXiv
        1412.6550.
    """

    conflicts = (
        Conflict(
            ("GradCacheHooks",),
            "the module computes its embeddings in chunks, which are put together without the teacher's",
            "Remove one of them, or compute distillation_loss in contrast, with self.teacher of Teacher()",
        ),
        Conflict(
            ("TokenMean",),
            "a batch counts as the targets of its loss, and the distance to the teacher is a mean over others",
        ),
        Conflict(
            ("HiddenMixup",),
            "the student's hidden representations are mixed, and those of another module are not",
            "Use Mixup, or a Teacher, which is mixed alike",
            lambda trick, other: trick.module is not None,
        ),
        Conflict(
            ("tensor_parallel",),
            "outputs may be in shards, and softmax needs all classes",
            "Shard by data_parallel alone",
        ),
    )

    def __init__(
        self,
        teacher: nn.Module | TeachingCallback,
        *,
        weight: float = 1.0,
        temperature: float | None = 2.0,
        features: Features | None = None,
        student: str | None = None,
    ) -> None:
        check_type("teacher", teacher, nn.Module, TeachingCallback)
        if isinstance(teacher, Distill):
            raise TypeError(f"teacher must be a module or a Teacher, got {teacher.written()}.")
        check_range("weight", weight, 0.0)
        if temperature is not None:
            _check_temperature(temperature)
        if features is not None:
            check_patterns("features", [*features, *features.values()] if isinstance(features, Mapping) else features)
        check_type("student", student, str, type(None))
        if isinstance(teacher, TeachingCallback):
            super().__init__(teacher.decay, teacher.module)
        else:
            super().__init__(1.0, teacher)
        self.teacher, self.weight, self.temperature = teacher, weight, temperature
        self.features, self.student = features, student
        self._source: TeachingCallback = self  # whose teacher it is
        self._forget()

    @override
    def teacher_written(self) -> str:
        return super().teacher_written() if self.module is not None else f"Teacher({super().teacher_written()})"

    def _forget(self) -> None:
        self._part: str | None = self.student  # the name of the part whose calls the teacher repeats, once it is known
        self._calls: list[_Called] | None = None  # those of the present step
        self._inputs: dict[str, Versions] = {}  # those of the inputs of a call, by the name of the part
        self._seen: _Seen | None = None  # outputs of layers, by their names in the module
        self._ungraded: set[str] = set()  # the parts and layers that the present step has called without gradients
        self._value: Tensor | None = None  # the distance in the last batch

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        listed = self.teacher in callbacks_of(trainer, TeachingCallback)
        self._source = self.teacher if listed and isinstance(self.teacher, TeachingCallback) else self
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                f"{self.written()} adds to the loss that the training step returns, got"
                f" {type(pl_module).__name__}.automatic_optimization=False: put Teacher() among the callbacks, and add"
                " distillation_loss(logits, self.teacher(x)) to your own loss."
            )
        self._forget()
        self._wrap(pl_module, "training_step", partial(self._step, pl_module))

    @override
    def _begin_anew(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._source is self:
            super()._begin_anew(trainer, pl_module)
        else:
            self._average = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        torch.compiler.reset()  # code that was compiled without the hooks would not call them
        for name, part in self._parts(pl_module).items():  # which exist only after configure_model
            before = part.register_forward_pre_hook(partial(self._entered, name), with_kwargs=True)
            after = part.register_forward_hook(partial(self._left, name), with_kwargs=True)
            self._undo.callback(before.remove)
            self._undo.callback(after.remove)
        for name, layer in self._layers(pl_module):
            self._undo.callback(layer.register_forward_hook(partial(self._passed, name)).remove)

    def _parts(self, module: L.LightningModule) -> dict[str, nn.Module]:
        """The parts whose call the teacher may repeat, by name: the module, and its children with weights."""
        if self.student is None:  # torch.jit calls no hooks
            children = {name: m for name, m in module.named_children() if not isinstance(m, torch.jit.ScriptModule)}
            return {"": module, **{name: m for name, m in children.items() if any(True for _ in m.parameters())}}
        parts = dict(module.named_modules())
        if self.student not in parts:
            raise MisconfigurationException(
                f"{self.written()}: {type(module).__name__} has no part {self.student!r}; it has"
                f" {some([name for name in parts if name], 12)}."
            )
        return {self.student: parts[self.student]}

    def _layers(self, module: L.LightningModule) -> Iterator[tuple[str, nn.Module]]:
        """The layers that are compared, of both; each with its name in the module.

        Raises:
            MisconfigurationException: If a pattern selects nothing, or not as many in both.
        """
        for mine, theirs in _pairs(self.features) if self.features is not None else ():
            layers = self._selected(module, mine)
            yield from layers.items()
            if self.module is None:
                continue
            others = self._selected(self.module, theirs)
            if len(layers) != len(others):
                raise MisconfigurationException(
                    f"{self.written()}: features={self.features!r} must select as many layers in both, got"
                    f" {some(layers)} in {type(module).__name__} and {some(others)} in {type(self.module).__name__}."
                )
            yield from zip(layers, others.values(), strict=True)

    def _selected(self, module: nn.Module, pattern: str) -> dict[str, nn.Module]:
        try:
            found = select_modules(module, pattern, "features")
        except ValueError as error:
            raise MisconfigurationException(f"{self.written()}, in {type(module).__name__}: {error}") from None
        outer = outermost(found.values())
        return {name: layer for name, layer in found.items() if layer in outer}

    @torch.compiler.disable
    def _entered(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        if self._calls is not None and self._part in (None, name):
            self._inputs[name] = versions(_tensors((args, kwargs)))

    @torch.compiler.disable
    def _left(self, name: str, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A call without gradients, as for a metric, is none of the loss.
        if self._calls is None or self._part not in (None, name):
            return
        if not torch.is_grad_enabled():
            self._ungraded.add(name)
        else:
            call, written = Call(part, args, kwargs), versions(_tensors(output))
            self._calls.append(_Called(name, call, output, self._inputs[name], written))

    @torch.compiler.disable
    def _passed(self, name: str, layer: nn.Module, args: Any, output: Any) -> None:
        if self._seen is None:
            return
        if self._calls is not None and not torch.is_grad_enabled():  # the teacher has none
            self._ungraded.add(name)
        else:
            first = output[0] if isinstance(output, tuple | list) and output else output
            if not isinstance(first, Tensor):
                raise MisconfigurationException(
                    f"{self.written()} compares tensors, got {type(output).__name__} from {name}: name other layers in"
                    " features=."
                )
            self._seen.setdefault(name, []).append((first, versions(_tensors(first))))

    def _step(self, module: L.LightningModule, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, and add the distance to what the teacher says in its place."""
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)  # a trial
        seen: _Seen = {}
        self._calls, self._seen, self._ungraded = [], seen, set()
        try:
            output = original(*args, **kwargs)
            calls = self._calls
        finally:
            self._calls = self._seen = None
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        loss = returned_loss(loss)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return output  # a batch that is skipped
        compared = {called.name for called in calls} if self.features is None else seen.keys()
        hidden = self._ungraded and not (compared if self.features is None else self._ungraded <= compared)
        if hidden and find_graph_node(loss, "CheckpointFunctionBackward".__eq__):
            raise reentrant_checkpoint(self.written())
        distance = self._distance(module, self._of_student(module, calls), seen)
        if not is_replaying():
            self._value = distance.detach()
        if self.weight:
            loss = loss + self.weight * distance
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    def _of_student(self, module: L.LightningModule, calls: Sequence[_Called]) -> list[_Called]:
        """The calls that the teacher repeats.

        Raises:
            MisconfigurationException: If there is none, it is not clear which are meant, or what they were given or
                have returned was written to since.
        """
        names = list(dict.fromkeys(called.name for called in calls))
        if "" in names:
            names = [""]
        if len(names) != 1:
            kind = type(module).__name__
            what = f"calls {some([f'self.{name}' for name in names])}" if names else "calls neither itself nor a part"
            asked = f", as student={self.student!r} says" if self.student is not None else ""
            raise MisconfigurationException(
                f"{self.written()} does not know whose outputs the teacher's are compared with: {kind}.training_step"
                f" {what}{asked}. Name the part that computes them in student=, or call self(...)."
            )
        self._part = names[0]
        found = [called for called in calls if called.name == self._part]
        for called in found:
            given = versions(_tensors((called.call.args, called.call.kwargs)))
            if (given, versions(_tensors(called.output))) != (called.inputs, called.outputs):
                raise MisconfigurationException(
                    f"{self.written()}: {type(module).__name__}.training_step writes into the inputs or outputs of"
                    f" self{self._part and '.' + self._part}(...), so that the teacher would see others: make new"
                    " tensors there, as by inplace=False."
                )
        return found

    def _distance(self, module: L.LightningModule, calls: Sequence[_Called], seen: _Seen) -> Tensor:
        """The mean distance over the calls of a step, or over layers."""
        self._seen = theirs = _Seen()
        try:
            answers = self._source.answers(module, [called.call for called in calls])
        finally:
            self._seen = None
        if self.features is None:
            distances = [
                self._of_outputs(self._logits(called.output), self._logits(answer), called)
                for called, answer in zip(calls, answers, strict=True)
            ]
        else:
            distances = [distance for name in seen for distance in self._of_layer(name, seen, theirs)]
        if not distances:
            raise MisconfigurationException(
                f"{self.written()} did nothing: {type(module).__name__}.training_step calls none of the layers that"
                f" features={self.features!r} selects."
            )
        return torch.stack(distances).mean()

    def _of_outputs(self, mine: Tensor, theirs: Tensor, called: _Called) -> Tensor:
        self._require_alike("outputs", mine, theirs)
        if self.temperature is None:
            return F.mse_loss(mine.float(), theirs.float())
        dim = 1 if mine.ndim > 3 else -1
        if mine.ndim < 2 or mine.shape[dim] < 2:
            raise MisconfigurationException(
                f"{self.written()} compares logits of at least two classes, got outputs {tuple(mine.shape)}: pass"
                " temperature=None for their mean squared error."
            )
        mask = self._mask(called, mine.shape[:-1])
        return distillation_loss(mine, theirs, temperature=self.temperature, mask=mask, dim=dim)

    def _mask(self, called: _Called, shape: torch.Size) -> Tensor | None:
        """The mask of the tokens whose logits a call has returned, by position or by name; None if it was given none.

        Raises:
            MisconfigurationException: If the mask may be the encoder's, and the logits the decoder's.
        """
        part = called.call.part
        names = inspect.signature(part.forward).parameters
        given = {**dict(zip(names, called.call.args, strict=False)), **called.call.kwargs}
        # An encoder and a decoder have tokens of their own, and the logits are those of the decoder.
        decodes = hasattr(called.output, "encoder_last_hidden_state")
        decodes |= any(name.startswith("decoder_") for name, value in given.items() if value is not None)
        mask = given.get("decoder_attention_mask" if decodes else "attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != shape:
            return None
        kinds: set[Any] = set(map(type, part.modules()))
        if not decodes and any(map(_has_decoder, kinds)):
            raise MisconfigurationException(
                f"{self.written()} does not know whether attention_mask is of the tokens whose logits"
                f" {type(part).__name__} returns, or of those of its encoder: name the part that has encoder and"
                " decoder in student=, or let it return the whole output of that part, whose logits are found."
            )
        return mask

    def _of_layer(self, name: str, seen: _Seen, answers: _Seen) -> Iterator[Tensor]:
        mine, theirs = seen[name], answers.get(name, [])
        if len(mine) != len(theirs):
            raise MisconfigurationException(
                f"{self.written()} compares the outputs of {name}, which the student calls {len(mine)} times in a step,"
                f" and the teacher {len(theirs)} times: name other layers in features=."
            )
        if any(versions(_tensors(output)) != before for output, before in (*mine, *theirs)):
            raise MisconfigurationException(
                f"{self.written()}: the outputs of {name} are written to by what follows, as by an activation with"
                " inplace=True: name that layer in features=, or let it make new tensors."
            )
        for (one, _), (other, _) in zip(mine, theirs, strict=True):
            self._require_alike(f"outputs of {name}", one, other)
            yield F.mse_loss(one.float(), other.float())

    def _require_alike(self, what: str, mine: Tensor, theirs: Tensor) -> None:
        if mine.shape != theirs.shape:
            raise MisconfigurationException(
                f"{self.written()}: {what} must have the same shape, got {tuple(mine.shape)} from the student and"
                f" {tuple(theirs.shape)} from the teacher. Put a layer in between that makes them alike, as a part of"
                " one of the modules."
            )

    def _logits(self, output: Any) -> Tensor:
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
        if not isinstance(found, Tensor):
            raise MisconfigurationException(
                f"{self.written()} compares outputs that are tensors, or have them as logits, got"
                f" {type(output).__name__}: name the part that returns such in student=, or layers in features=."
            )
        return found

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        value = self._value
        if value is not None:
            log_every_n_steps(trainer, lambda: {"tricks/distill_loss": value})

    @property
    @override
    def state_key(self) -> str:
        return f"{super().state_key}, features={self.features!r}, student={self.student!r}"


def _pairs(features: Features) -> list[tuple[str, str]]:
    """The patterns of layers in the module and in the teacher."""
    if isinstance(features, Mapping):
        return list(features.items())
    return [(pattern, pattern) for pattern in listed(features)]


@cache
def _has_decoder(kind: Any) -> bool:
    """Whether modules of a class, or of one that it is made of, take what transformers gives to a decoder."""
    own = (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base))
    return any("decoder_input_ids" in inspect.signature(forward).parameters for forward in own)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_inference()]
