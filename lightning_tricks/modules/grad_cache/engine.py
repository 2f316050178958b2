"""A contrastive step in chunks, and its gradients; apart from the mixin, whose hooks say when one begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.linalg import vector_norm

from lightning_tricks.core.batches.cutting import count_samples, naming_single_samples, select_samples
from lightning_tricks.core.batches.paths import described
from lightning_tricks.core.checks import some
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import extremes, scaled, unsynced
from lightning_tricks.core.replay.graph import naming_reentrant_checkpoints, nodes_of
from lightning_tricks.core.replay.own_batch import copy_containers, forbid_writes
from lightning_tricks.core.replay.rerun import Start, replaying, run_again
from lightning_tricks.core.replay.trial import WithoutGradients
from lightning_tricks.core.weights.gradients import require_dense


@dataclass
class _CachedStep:
    """The first pass of a step: its chunks, what they started from, and the loss of their embeddings."""

    chunks: list[tuple[Any, slice]]  # batches, and their places among the samples
    start: Start
    embeddings: list[Tensor]  # (N, d) of the whole batch; floating-point ones are leaves of the loss
    loss: Tensor
    returned: Tensor  # what ``training_step`` returns


class GradCache:
    """Runs the training steps of a module whose batch has more samples than a chunk.

    Args:
        module: The module in a fit.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.trainer: L.Trainer = module.trainer
        self.name = f"GradCacheMixin(chunk={module.chunk})"
        self.in_chunks = False  # whether the present step is cut
        self._shards = engine_of(self.trainer) is Engine.FSDP2
        self._step: _CachedStep | None = None
        self._run: Callable[..., Any] = lambda *_: None  # runs a training step with a batch, under autocast and DDP
        self._checked: set[str] = set()  # what was looked at once, which is enough
        self._without_gradients = WithoutGradients()
        self._watching = ExitStack()  # what ends with the present training step

    @property
    def pending(self) -> bool:
        """Whether a step waits for its backward pass."""
        return self._step is not None

    # -- the first pass -----------------------------------------------------------------------------------------------

    def training_step(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a training step, which reaches ``first_pass`` if its batch has to be cut."""
        self._step = None
        if not (torch.is_grad_enabled() and self._cuts(batch)):
            return original(batch, *args, **kwargs)
        self._run, self.in_chunks = partial(_run, original, args, kwargs), True
        try:
            # DDP must not expect a backward pass of this forward pass; FSDP2 must.
            with ExitStack() as self._watching, forbid_writes(self.module, (batch, args, kwargs)):
                self._watching.enter_context(torch.set_grad_enabled(self._shards))
                output = original(batch, *args, **kwargs)
        finally:
            self.in_chunks = False
        loss = output.get("loss") if isinstance(output, dict) else output
        if output is not None and (self._step is None or loss is not self._step.returned):
            self._step = None
            raise MisconfigurationException(
                f"{type(self.module).__name__}.training_step must return the loss of super().training_step(batch,"
                " batch_idx) as it is, since GradCacheMixin takes its gradient in chunks: put all that the loss is made"
                " of into contrast."
            )
        if output is None:
            self._step = None
        return output

    def first_pass(self, batch: Any) -> Tensor:
        """The loss of a batch whose embeddings have no graph."""
        if self._step is not None:
            raise MisconfigurationException(
                f"{type(self.module).__name__}.training_step calls that of GradCacheMixin twice for a batch: call it"
                " once, with all of the samples."
            )
        samples = self.samples(batch)
        number = max(1, math.ceil(samples / self.module.chunk))
        places = [slice(samples * n // number, samples * (n + 1) // number) for n in range(number)]  # of similar sizes
        remedy = "give it one entry per sample, or embed the whole batch at once"
        chunks = [(select_samples(batch, place, samples, self.name, remedy=remedy), place) for place in places]
        start = Start.here(self.module, self.module.device)
        before = _attributes(self.module)

        def embed(gradients: bool) -> list[tuple[Tensor, ...]]:
            with torch.set_grad_enabled(gradients):
                return [tuple(x.detach() for x in self._embed(chunk, place)) for chunk, place in chunks]

        self._watching.enter_context(start.state.watching())  # also contrast, and what training_step does after it
        parts = self._without_gradients(self.module, embed, start.set_back)
        if (path := start.state.written()) is not None:
            raise MisconfigurationException(
                f"{type(self.module).__name__}.embed writes into {path}, and {self.name} runs it once for every chunk:"
                " write into it before or after super().training_step(batch, batch_idx), or in on_train_batch_end."
            )
        embeddings = [torch.cat(several) for several in zip(*parts, strict=True)]
        for embedding in embeddings:
            embedding.requires_grad_(_has_gradient(embedding))
        held = {name: value for name, value in _attributes(self.module).items() if before.get(name) is not value}
        with torch.enable_grad(), _marked(held.values()):
            loss = self.module.contrast(*embeddings)
            self._check_attributes(loss, held)
            self.check_loss(loss, embeddings)
        # A leaf, which DDP hands on as it is; it requires gradients, since others ask a loss whether it has some.
        returned = loss if self._shards else loss.detach().requires_grad_()
        self._step = _CachedStep(chunks, start, embeddings, loss, returned)
        return returned

    def _embed(self, chunk: Any, place: slice) -> tuple[Tensor, ...]:
        rule = f"{self.name} gives {type(self.module).__name__} a chunk of one sample"
        with naming_single_samples(rule, "choose a larger chunk"):
            embeddings = self.module.embed(copy_containers(chunk))
        return check_embeddings(self.module, embeddings, place.stop - place.start)

    def check_loss(self, loss: Any, embeddings: list[Tensor]) -> None:
        """Raise unless ``contrast`` has made a loss of the embeddings; looks once at the graph."""
        name = type(self.module).__name__
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise MisconfigurationException(
                f"{name}.contrast must return the loss, a tensor with one entry, got {found}."
            )
        if "loss" not in self._checked and not _depends(loss, embeddings):
            raise MisconfigurationException(
                f"The loss that {name}.contrast returns depends on none of the embeddings, so that embed would not be"
                " trained: compute it from the arguments of contrast, without detach() or no_grad()."
            )
        self._checked.add("loss")

    def _check_attributes(self, loss: Any, held: dict[str, Tensor]) -> None:
        """Raise if ``contrast`` reads what ``embed`` has set: that of the last chunk, without a graph."""
        read = [name for name, value in held.items() if isinstance(loss, Tensor) and _depends(loss, [value])]
        if read:
            raise MisconfigurationException(
                f"{type(self.module).__name__}.contrast reads {some(read)}, which embed sets: in chunks it is that of"
                " the last chunk, and has no gradient. Return it from embed, with a row for each sample."
            )

    def _cuts(self, batch: Any) -> bool:
        """Whether this step is cut into chunks; if one rank cuts its batch, all do, as DDP goes through them alike."""
        chunks = max(1, math.ceil(self.samples(batch) / self.module.chunk))
        if not (self._shards or any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules())):
            return chunks > 1 or self.trainer.world_size > 1  # asking the others would wait for the device
        least, most = extremes(self.trainer, chunks)
        if least == most:
            return most > 1
        cause = "FSDP2 gathers weights" if self._shards else "SyncBatchNorm meets the other ranks"
        raise MisconfigurationException(
            f"{self.name} cuts the batches of this step into {least} chunks on one rank and {most} on another, and"
            f" {cause} in every chunk: give the ranks equal batches (drop_last=True), or choose a larger chunk."
        )

    def samples(self, batch: Any) -> int:
        """The number of samples in a batch.

        Raises:
            MisconfigurationException: If its tensors have different numbers of entries.
        """
        try:
            return count_samples(batch, self.name)
        except MisconfigurationException as error:
            raise MisconfigurationException(
                f"{self.name} cuts batches into chunks, and needs tensors with one entry per sample, got a batch with"
                f" {described(batch)}: give every part of the batch one entry per sample."
            ) from error

    # -- the second pass ----------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, descend: Callable[[Tensor], None]) -> None:
        """Add the gradient of the step to ``.grad``.

        Args:
            loss: The loss of the step, divided and scaled by Lightning.
            descend: Accumulates the gradient of a loss in ``.grad``.
        """
        step, self._step = self._step, None
        if step is None:
            descend(loss)  # a step that was not cut
            return
        gradients, of_contrast = self._gradients(step, descend)
        with run_again(step.start) as again, again.running(), replaying():
            for chunk, place in step.chunks:
                # DDP reduces all of .grad in one pass: every chunk's share of it must be there by then.
                last = place is step.chunks[-1][1]
                with nullcontext() if last else unsynced(self.trainer):
                    part = partial(self._surrogate, step, gradients, place, of_contrast if last else {})
                    self._descend(part, chunk, descend)
        self._checked.add("replay")

    def _gradients(
        self, step: _CachedStep, descend: Callable[[Tensor], None]
    ) -> tuple[list[Tensor | None], dict[Tensor, Tensor]]:
        """The gradients of the embeddings, and of the parameters in ``contrast``, unless those are in ``.grad``."""
        loss = scaled(self.trainer, step.loss)
        leaves = [embedding for embedding in step.embeddings if embedding.requires_grad]
        # FSDP2 reduces gradients in the hooks of a backward pass, which torch.autograd.grad does not run.
        if self._shards:
            descend(loss)
            return [embedding.grad for embedding in step.embeddings], {}
        weights = [weight for weight in self.module.parameters() if weight.requires_grad]
        with naming_reentrant_checkpoints(loss, "GradCacheMixin"):
            found = torch.autograd.grad(loss, [*leaves, *weights], allow_unused=True)
        by_leaf = dict(zip(leaves, found, strict=False))
        pairs = zip(weights, found[len(leaves) :], strict=True)
        of_contrast = {weight: gradient for weight, gradient in pairs if gradient is not None}
        require_dense(self.module, list(of_contrast.items()), "GradCacheMixin")
        return [by_leaf.get(embedding) for embedding in step.embeddings], of_contrast

    def _descend(self, part: Callable[[Any], Tensor], chunk: Any, descend: Callable[[Tensor], None]) -> None:
        """Run a chunk as a training step, under autocast and DDP, and add its gradient."""
        undo = wrap_method(self.module, "training_step", lambda _, chunk, *__, **___: part(chunk))
        try:
            surrogate = self._run(chunk)
        finally:
            undo()
        if surrogate.requires_grad:  # not where embed is frozen
            descend(surrogate)

    def _surrogate(
        self,
        step: _CachedStep,
        gradients: list[Tensor | None],
        place: slice,
        of_contrast: dict[Tensor, Tensor],
        chunk: Any,
    ) -> Tensor:
        """A number whose gradient is that of the loss with respect to the weights, through the samples of a chunk.

        ``sum(embedding * gradient)``, in fp32 so that no gradient is rounded; likewise for the weights in ``contrast``.
        Of complex numbers it is the real part, with the conjugate of the gradient.
        """
        embeddings = self._embed(chunk, place)
        if "replay" not in self._checked:
            self._check_replay(embeddings, [embedding[place] for embedding in step.embeddings])
        pairs = list(of_contrast.items())
        for embedding, gradient in zip(embeddings, gradients, strict=True):
            if gradient is not None and embedding.requires_grad:
                pairs.append((embedding, gradient[place]))
        total = torch.zeros((), device=self.module.device)
        for x, gradient in pairs:
            wide = torch.promote_types(x.dtype, torch.float32)
            total = total + (x.to(wide) * gradient.to(wide).conj()).real.sum()
        return total

    def _check_replay(self, embeddings: tuple[Tensor, ...], before: list[Tensor]) -> None:
        for now, then in zip(embeddings, before, strict=True):
            if _has_gradient(now) and vector_norm((now - then).detach()) > 0.01 * vector_norm(then.detach()):
                raise MisconfigurationException(
                    f"{type(self.module).__name__}.embed gives other embeddings in its second run on the same samples,"
                    " random numbers and module state, so that GradCacheMixin would take the gradient of another loss:"
                    " draw random numbers from torch, NumPy or Python, and leave compiled layers with dropout out."
                )


def _run(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> Any:
    return original(batch, *args, **kwargs)


def check_embeddings(module: Any, embeddings: Any, samples: int) -> tuple[Tensor, ...]:
    """What ``embed`` has returned for so many samples, if it is embeddings of them.

    Raises:
        MisconfigurationException: If ``embed`` has returned anything else.
    """
    rule = (
        f"{type(module).__name__}.embed must return a tuple of tensors with a row for each of its {samples} samples,"
        " embeddings (N, d) and such as labels (N,)"
    )
    if not isinstance(embeddings, tuple | list) or not all(isinstance(x, Tensor) for x in embeddings):
        kinds = [type(x).__name__ for x in embeddings] if isinstance(embeddings, tuple | list) else embeddings
        found = f"a tensor {tuple(kinds.shape)}" if isinstance(kinds, Tensor) else f"{kinds!r}"
        raise MisconfigurationException(f"{rule}, got {found}: return (x,) for a single one.")
    if any(x.shape[:1] != (samples,) or (_has_gradient(x) and x.ndim < 2) for x in embeddings) or not any(
        map(_has_gradient, embeddings)
    ):
        raise MisconfigurationException(f"{rule}, got {described(embeddings) or 'no tensor'}.")
    return tuple(embeddings)


def _depends(loss: Tensor, embeddings: list[Tensor]) -> bool:
    """Whether a loss depends on an embedding, if any embedding is trained."""
    trained = [embedding for embedding in embeddings if embedding.requires_grad]
    nodes = {embedding.grad_fn for embedding in trained} - {None}
    return not trained or any(
        node in nodes or any(getattr(node, "variable", None) is embedding for embedding in trained)
        for node in nodes_of(loss)
    )


def _has_gradient(x: Tensor) -> bool:
    """Whether a tensor is of numbers that have gradients."""
    return x.is_floating_point() or x.is_complex()


def _attributes(module: torch.nn.Module) -> dict[str, Tensor]:
    """The floating-point tensors in attributes of a module and its submodules, by name."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if isinstance(value, Tensor) and _has_gradient(value)
    }


@contextmanager
def _marked(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which tensors without a graph require gradients, so that a loss shows whether it depends on them."""
    marked = [tensor for tensor in tensors if not tensor.requires_grad]
    try:
        for tensor in marked:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in marked:
            tensor.requires_grad_(False)
