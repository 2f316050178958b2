"""Steps that run out of memory are run again in micro-batches, which are kept for the rest of the training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.batches.cutting import count_samples, micro_batches, naming_single_samples
from lightning_tricks.core.batches.form import require_no_attributes
from lightning_tricks.core.batches.paths import TARGETS, described, find, get, put, spelled
from lightning_tricks.core.checks import check_count
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import UNSHARDED, Engine, engine_of, require_engine
from lightning_tricks.core.lightning.trainer import (
    callbacks_of,
    has_comm_state,
    is_fitting,
    log_every_n_steps,
    scaled,
    takes_dataloader_iter,
    unsynced,
)
from lightning_tricks.core.mixed_targets.divisors import Count, Divisors, as_count, pass_count
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan, counted_targets
from lightning_tricks.core.mixed_targets.target import MixedTarget, mixed_target, plain_tensor, returned_loss
from lightning_tricks.core.out_of_memory import free_memory_of, out_of_memory
from lightning_tricks.core.replay.graph import nodes_of
from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.own_batch import noting_writes, with_own_batch
from lightning_tricks.core.replay.rerun import Start, is_replaying, replaying
from lightning_tricks.core.trick import Trick
from lightning_tricks.core.weights.gradients import GradientsBefore

__all__ = ["FitsMemory"]

T = TypeVar("T")
_PASS_COUNT = (
    f"{pass_count('FitsMemory')} A contrastive loss compares the samples of a batch with one another, so that the loss"
    " of a part is no part of it: use GradCacheMixin there."
)
_LOG = list(inspect.signature(L.LightningModule.log).parameters)[1:]  # the names of its arguments


def mean_of_parts(values: Sequence[Any], counts: Sequence[Tensor]) -> Tensor:
    """The mean of a batch from those of its parts, ``sum_i(n_i * x_i) / sum_i(n_i)``.

    Args:
        values: The means of the parts x_i, numbers or tensors of one shape.
        counts: What each is the mean of, n_i, at least 0. A part with none of them does not count, though its mean is
            NaN.

    Example:
        >>> mean_of_parts([1.0, 4.0, float("nan")], [torch.tensor(2.0), torch.tensor(1.0), torch.tensor(0.0)])
        tensor(2.)
    """
    n = torch.stack(list(counts))
    x = torch.stack([torch.as_tensor(value, dtype=n.dtype, device=n.device).detach() for value in values], -1)
    return torch.where(n > 0, x * n, 0.0).sum(-1) / n.sum()


def _tensors(values: Sequence[Any], counts: Sequence[Tensor]) -> list[Tensor]:
    return [torch.as_tensor(value, device=counts[0].device) for value in values]


_REDUCTIONS: dict[str, Callable[[Sequence[Any], Sequence[Tensor]], Any]] = {
    "mean": mean_of_parts,
    "sum": lambda values, counts: sum(values),
    "max": lambda values, counts: torch.stack(_tensors(values, counts)).amax(0),
    "min": lambda values, counts: torch.stack(_tensors(values, counts)).amin(0),
}


@dataclass
class _Step:
    """A training step: how to run it, and what it started from."""

    run: partial[Any]
    start: Start
    exchanges_buffers: Any  # whether the next forward pass of DDP does so
    forward: ModuleState | None = None  # what the forward pass has left, if hooks run before the backward pass


@dataclass
class _Part:
    """The forward pass of a part of a batch, or of all of it."""

    output: Any  # what training_step has returned
    logs: list[dict[str, Any]]  # the arguments of its calls of log
    count: Tensor  # how many targets its loss is the mean of
    share: float  # of the samples


@dataclass
class _Forward:
    """All of a batch but the backward pass of its last part."""

    output: Any  # what training_step would return for the whole batch
    logs: list[dict[str, Any]]
    loss: Tensor | None  # of the last part, weighted; None where there is nothing to train on
    gradients: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # of the other parts, by weight
    factor: Tensor | None = None  # of the gradients, once it is known how many targets all parts have


@final
class FitsMemory(Trick):
    """Runs a training step again in micro-batches when it runs out of memory, and keeps their size for the next steps.

    The batch is cut into parts of half as many samples, and again until a part fits. The gradient is that of the whole
    batch, ``g = sum_i(n_i * g_i) / sum_i(n_i)``, where g_i is that of a part whose loss is the mean over n_i targets.
    Clipping, accumulation, schedules, averages, mixing and the GradScaler are those of the whole batch. A batch that
    is not larger than a part runs as without this trick, bit for bit. The size is in the checkpoint.

    What the failed attempt has done is undone: gradients (those of earlier batches of the window stay), random numbers,
    metrics, buffers and attributes of the module. What it has logged is dropped. A run that has run out of memory is
    thereby bit for bit the same as one that was cut from that step on. Values that the parts log become those of the
    batch, by their ``reduce_fx``; a metric object has seen every sample once.

    Targets are counted where the training step computes its loss from the targets of the batch, as by ``TokenMean``:
    losses of ``torch.nn.functional`` that are means, or a ``mean()`` of their losses of entries. For any other loss
    pass ``count``. BatchNorm normalizes each part by itself, which a warning says.

    Under DDP all ranks cut when one of them has to: they exchange one number after the forward and after the backward
    pass, on the host. A rank that fails while gradients are averaged adds zeros for the rest, so that none waits for
    it, and all undo the pass.

    Args:
        minimum: The smallest number of samples of a part, at least 1.
        count: Function of the batch that returns the number of targets that its loss is the mean of, at least 0; None
            to count those of the loss.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At setup, in manual optimization, for strategies that shard, and where ranks meet
            inside a step (SyncBatchNorm, ``all_gather``). When a batch has to be cut: if it cannot be, if the targets
            of the loss cannot be counted, or if the step does what cannot be undone.
        torch.OutOfMemoryError: If a part of ``minimum`` samples, or the optimizer's step, does not fit.

    Example:
        >>> trainer = L.Trainer(callbacks=[FitsMemory()], accelerator="cpu", logger=False)
    """

    conflicts = (
        Conflict(("SAMHooks",), "SAM runs a full batch twice", "Use SAM(micro_batch_size=...), or remove one of them"),
        Conflict(("GradCacheHooks",), "GradCacheMixin cuts every batch", "Choose a smaller chunk, remove FitsMemory"),
        Conflict(
            ("StepInBackward",),
            "a weight is stepped by the gradient of one part, before the others have added theirs",
            "Remove one of them",
        ),
        Conflict(
            ("HiddenMixup", "LabelErrors"),
            "the samples of a full batch are mixed or compared inside the step, which may run for parts of it",
            "Remove one of them",
        ),
        Conflict(
            ("HardExampleFilter",),
            "the samples of a full batch are compared, but a step may run for parts of it",
            'Remove one of them, or use mode="prune"',
            lambda trick, other: other.mode == "loss",
        ),
        Conflict(
            ("TokenMean",),
            "both weigh a part of a batch by its targets",
            "Use smaller batches and more of them in accumulate_grad_batches, or remove TokenMean",
        ),
        Conflict(
            ("Distill",),
            "a part counts as the targets of its loss, and the distance to the teacher is a mean over others",
            "Pass count=, or remove one of them",
            lambda trick, other: trick.count is None,
        ),
        Conflict(("static_graph",), "DDP's static graph allows no second run of a step", "Remove static_graph"),
        Conflict(("FitsMemory",), "both would run a failed step again", "Remove one of them"),
    )

    def __init__(self, *, minimum: int = 1, count: Count | None = None) -> None:
        check_count("minimum", minimum)
        if count is not None and not callable(count):
            raise TypeError(f"count must be a function of the batch or None, got {count!r}.")
        super().__init__()
        self.minimum, self.count = minimum, count
        self.size: int | None = None  # the largest number of samples of a part; None as long as whole batches fit
        self._trainer: Any = None
        self._group: Any = None  # of the ranks, for numbers on the host; None for one rank
        self._forget()

    def _forget(self) -> None:
        self._logs: list[dict[str, Any]] | None = None  # the calls of log of the step that runs now
        self._pending: tuple[_Step, _Forward] | None = None  # what waits for its backward pass
        self._stepping = False  # whether the optimizer has its gradients

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        _check(trainer, pl_module)
        self.size, self._trainer = None, trainer
        self._forget()
        self._undo.callback(self._forget)
        self._undo.callback(setattr, self, "_trainer", None)
        if trainer.world_size > 1:
            self._join_ranks()
            self._wrap(pl_module, "all_gather", _refuse_all_gather)
        self._wrap(trainer.strategy, "training_step", self._training_step)
        self._wrap(trainer.strategy, "optimizer_step", self._optimizer_step)
        self._wrap(pl_module, "backward", self._backward)
        self._wrap(pl_module, "log", self._log)

    def _join_ranks(self) -> None:
        """Have a group in which ranks exchange numbers without their devices, which are busy with the step."""
        self._undo.callback(setattr, self, "_group", None)
        if dist.get_backend() == "gloo":
            self._group = dist.group.WORLD
            return
        self._group = dist.new_group(backend="gloo")
        self._undo.callback(dist.destroy_process_group, self._group)

    # -- the hooks of a step ------------------------------------------------------------------------------------------

    def _training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step, in parts if need be; the last part is left without its backward pass."""
        self._pending = None
        if not torch.is_grad_enabled():  # a trial, or statistics that are read anew
            return original(*args, **kwargs)
        module = self._trainer.lightning_module
        model = self._trainer.strategy.model
        exchanges = getattr(model, "require_forward_param_sync", None)
        step = _Step(partial(original, *args, **kwargs), Start.here(module, module.device), exchanges)
        forward = self._forward_that_fits(step, first=True)
        for call in forward.logs:
            module.log(call.pop("name"), call.pop("value"), **call)
        if forward.loss is not None:
            if _runs_before_backward(self._trainer):
                step.forward = ModuleState(module, compared=True)
            self._pending = step, forward
        return forward.output

    def _backward(self, original: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add the gradient of the batch to ``.grad``; ``loss`` has its value alone, so that others hold no graph."""
        if self._pending is None:  # a part, whose other parts follow
            original(loss, *args, **kwargs)
            return
        (step, forward), self._pending = self._pending, None
        descend = partial(_call_with, original, args, kwargs)
        changed, step.forward = step.forward and _changed(step.forward, self._trainer.lightning_module), None
        while True:
            kept = GradientsBefore(self._weights())
            if self._attempt(step, partial(self._descend, forward, kept, descend)):
                return
            if changed:
                raise MisconfigurationException(
                    f"FitsMemory sets the module back when memory has run out in a backward pass, and {changed} is"
                    " changed by a hook before it (on_before_zero_grad, on_before_backward): change it in"
                    " on_train_batch_start or on_train_batch_end."
                )
            kept.restore()
            with replaying():
                forward = self._forward_that_fits(step, first=False)

    def _optimizer_step(
        self, original: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step, and say of an error that no smaller batch can help."""

        def with_gradients() -> Any:
            self._stepping = False
            result = closure()
            self._stepping = True
            return result

        try:
            return original(optimizer, with_gradients, *args, **kwargs)
        except Exception as error:
            if not (self._stepping and out_of_memory(error)):
                raise
            raise torch.OutOfMemoryError(
                f"FitsMemory: memory ran out in the step of {type(optimizer).__name__}, which needs as much for a batch"
                " of any size. Use an 8-bit optimizer, LoRA, StepInBackward or a sharded strategy (suggest_strategy)."
            ) from error
        finally:
            self._stepping = False

    def _log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Keep what a step logs until it has fitted."""
        if is_replaying():
            return
        if self._logs is None:
            original(*args, **kwargs)
            return
        call = {**dict(zip(_LOG, args, strict=False)), **kwargs}
        if isinstance(value := call["value"], Tensor):
            call["value"] = plain_tensor(value).detach().clone()  # the step may write into it
        self._logs.append(call)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if (size := self.size) is not None:
            log_every_n_steps(trainer, lambda: {"tricks/micro_batch_size": float(size)})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.size = state_dict["size"]

    # -- attempts -----------------------------------------------------------------------------------------------------

    def _attempt(self, step: _Step, work: Callable[[], T]) -> T | None:
        """What ``work`` returns; None if a rank ran out of memory in it, after which the step can be run anew."""
        result, failed = None, None
        module = self._trainer.lightning_module
        try:
            with step.start.state.watching(), noting_writes(module, (step.run.args, step.run.keywords)) as refuse:
                result = work()
        except Exception as error:
            if not out_of_memory(error):
                raise
            free_memory_of(error)
            failed = error.with_traceback(None)
        if not self._largest(int(failed is not None)):
            return result
        result = None  # of a rank that has not failed, with its activations
        refuse()
        step.start.state.refuse_writes()
        step.start.state.refuse_counts()
        step.start.set_back()
        if step.exchanges_buffers is not None:
            self._trainer.strategy.model.require_forward_param_sync = step.exchanges_buffers
        self._shrink(step, failed)
        return None

    def _shrink(self, step: _Step, failed: Exception | None) -> None:
        """Halve the size of the parts, on all ranks."""
        samples = self._largest(count_samples(step.run.args[0], "FitsMemory"))
        tried = min(self.size or samples, samples)
        if tried <= self.minimum:
            raise torch.OutOfMemoryError(
                f"FitsMemory(minimum={self.minimum}): {'another rank' if failed is None else 'this rank'} ran out of"
                f" memory with {tried} of the {samples} samples of a batch, and no smaller part is allowed. Recompute"
                " activations (ActivationCheckpointing), use a preset of 16 bits or a sharded one, or a lower minimum."
            ) from failed
        self.size = max(self.minimum, (tried + 1) // 2)
        norms = sum(isinstance(m, _BatchNorm) and m.training for m in self._trainer.lightning_module.modules())
        rank_zero_warn(
            f"FitsMemory: a {'batch' if tried == samples else 'part'} of {tried} samples did not fit into memory:"
            f" training goes on in parts of {self.size}."
            + (f" {norms} BatchNorm layers normalize each part by itself, as in smaller batches." if norms else "")
        )

    def _forward_that_fits(self, step: _Step, *, first: bool) -> _Forward:
        while True:
            if (forward := self._attempt(step, partial(self._forward, step, first))) is not None:
                return forward

    def _largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self._group is None:
            return number
        dist.all_reduce(found := torch.tensor(number, device="cpu"), dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def _weights(self) -> list[nn.Parameter]:
        return [weight for weight in self._trainer.lightning_module.parameters() if weight.requires_grad]

    # -- the forward pass ---------------------------------------------------------------------------------------------

    def _forward(self, step: _Step, first: bool) -> _Forward:
        """Run a step, or its parts, with the backward pass of all parts but the last.

        Args:
            step: The step.
            first: Whether Lightning has yet to set gradients to zero, if the batch is the first of a window.
        """
        batch = step.run.args[0]
        if self.size is None or count_samples(batch, "FitsMemory") <= self.size:
            with unsynced(self._trainer):
                output, logs = self._logging(with_own_batch(step.run))
            loss = returned_loss(_loss_in(output))
            if not isinstance(loss, Tensor):
                return _Forward(output, logs, None)
            return _Forward(_with_loss(output, loss.detach().requires_grad_()), logs, loss)
        if first and self._begins_window() and not _sees_zero_grad(self._trainer):
            self._trainer.optimizers[0].zero_grad()  # as Lightning will, before memory is needed for the parts'
        kept = GradientsBefore(self._weights())
        kept.set_aside()
        try:
            return self._in_parts(step, self.size)
        finally:
            kept.restore()

    def _begins_window(self) -> bool:
        return self._trainer.fit_loop.batch_idx % self._trainer.accumulate_grad_batches == 0

    def _in_parts(self, step: _Step, size: int) -> _Forward:
        cut = micro_batches(step.run, size, "FitsMemory", "remove FitsMemory, and use a smaller batch")
        parts: list[_Part] = []
        rule = f"FitsMemory gives {type(self._trainer.lightning_module).__name__} a part of one sample"
        for number, (share, run) in enumerate(cut, 1):
            with unsynced(self._trainer):
                with naming_single_samples(rule, "choose a batch size that no half of which is odd, or another norm"):
                    part = self._part(run, share)
                if number == 1:  # about as many targets as the batch has, so that weights are about the shares
                    unit = part.count / share
                    unit = torch.where(unit > 0, unit, 1.0)
                loss = _loss_in(part.output) * (part.count / unit)
                parts.append(part)
                if number < len(cut):
                    self._trainer.lightning_module.backward(scaled(self._trainer, loss))
                    part.output = _without_graph(part.output)
                    del loss
        counts = [part.count for part in parts]
        total = torch.stack(counts).sum()
        factor = torch.where(total > 0, unit / total, 1.0)
        output = _joined([part.output for part in parts], counts, [part.share for part in parts])
        gradients: list[tuple[Tensor, Tensor]]
        gradients = [(weight, weight.grad) for weight in self._weights() if weight.grad is not None]
        return _Forward(output, _joined_logs(parts), loss * factor, gradients, factor)

    def _part(self, run: partial[Any], share: float) -> _Part:
        """Run a part of a batch, and count the targets of its loss."""
        module = self._trainer.lightning_module
        batch, plan = (run.args[0], None) if self.count else _planned(run.args[0])
        output, logs = self._logging(with_own_batch(partial(run.func, batch, *run.args[1:], **run.keywords)))
        if not isinstance(loss := returned_loss(_loss_in(output)), Tensor):
            raise MisconfigurationException(
                f"FitsMemory needs a loss of every part of a batch, got {loss!r} from"
                f" {type(module).__name__}.training_step: return one, or remove FitsMemory."
            )
        if plan is None:
            assert self.count is not None, "or there is a plan"
            count = as_count(self.count(batch), loss.device)
        else:
            count = as_count(counted_targets(plan, "FitsMemory", type(module)), loss.device)
            plan.divisors = None
        return _Part(_with_loss(output, loss), logs, count, share)

    def _logging(self, run: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
        """What a step returns, and what it logs."""
        logs: list[dict[str, Any]] = []
        self._logs = logs
        try:
            return run(), logs
        finally:
            self._logs = None

    # -- the backward pass --------------------------------------------------------------------------------------------

    def _descend(self, forward: _Forward, kept: GradientsBefore, descend: Callable[[Tensor], None]) -> bool:
        """Add the gradients of all parts to ``.grad``; those of the last one by its backward pass."""
        loss, forward.loss = forward.loss, None
        assert loss is not None, "a forward pass is used once"
        averages = self._averages_gradients()
        done: set[Tensor] = set()
        hooks = [w.register_post_accumulate_grad_hook(done.add) for w in self._weights()] if averages else []
        try:
            with kept.copying():
                _add(forward.gradients, forward.factor)
                if averages:  # only now, since ranks may drop what DDP has prepared for in a forward pass
                    prepare_for_backward(self._trainer.strategy.model, loss)
                try:
                    descend(scaled(self._trainer, loss))
                except Exception as error:
                    if averages and out_of_memory(error):
                        used = {node.variable for node in nodes_of(loss) if hasattr(node, "variable")}
                        del loss
                        free_memory_of(error)
                        _add_zeros(used - done)
                    raise
        finally:
            for hook in hooks:
                hook.remove()
        return True

    def _averages_gradients(self) -> bool:
        """Whether DDP averages gradients over ranks in a backward pass now."""
        return engine_of(self._trainer) is Engine.DDP and self._trainer.strategy.model.require_backward_grad_sync


def _add_zeros(weights: set[Tensor]) -> None:
    """Take part in what the other ranks wait for: the average of the gradients that this rank does not have."""
    if weights:
        torch.stack([(weight * 0).sum().float() for weight in weights]).sum().backward()


def _call_with(original: Callable[..., None], args: Any, kwargs: dict[str, Any], loss: Tensor) -> None:
    original(loss, *args, **kwargs)


def _loss_in(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _with_loss(output: Any, loss: Tensor) -> Any:
    """What a step returns, with another loss."""
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss


def _without_graph(output: Any) -> Any:
    """What a step returns, without what its backward pass has kept."""
    if isinstance(output, Mapping):
        return {name: _without_graph(value) for name, value in output.items()}
    return output.detach() if isinstance(output, Tensor) else output


def _joined(outputs: list[Any], counts: list[Tensor], shares: list[float]) -> Any:
    """What a step would return for the whole batch, without a graph.

    Numbers are means, and tensors with an entry for each sample are joined. Of all else the last part's is returned.
    """
    loss = mean_of_parts([_loss_in(output) for output in outputs], counts).requires_grad_()
    if not isinstance(outputs[0], Mapping):
        return loss
    joined = {name: _joined_values([output.get(name) for output in outputs], counts, shares) for name in outputs[-1]}
    return {**joined, "loss": loss}


def _joined_values(values: list[Any], counts: list[Tensor], shares: list[float]) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values[-1]
    values = [plain_tensor(value).detach() for value in values]
    if all(value.ndim == 0 and value.is_floating_point() for value in values):
        return mean_of_parts(values, counts)
    lengths = [len(value) if value.ndim else 0 for value in values]
    by_sample = all(abs(length - share * sum(lengths)) < 0.5 for length, share in zip(lengths, shares, strict=True))
    return torch.cat(values) if min(lengths) and by_sample else values[-1]


def _joined_logs(parts: list[_Part]) -> list[dict[str, Any]]:
    """The calls of log for the whole batch, in the order of their names."""
    by_name: dict[str, list[tuple[dict[str, Any], Tensor]]] = {}
    for part in parts:
        for call in part.logs:
            by_name.setdefault(call["name"], []).append((call, part.count))
    return [_joined_call([call for call, _ in calls], [n for _, n in calls]) for calls in by_name.values()]


def _joined_call(calls: list[dict[str, Any]], counts: list[Tensor]) -> dict[str, Any]:
    call = dict(calls[-1])
    if isinstance(call["value"], int | float | Tensor):  # a metric has seen all parts
        how = call.get("reduce_fx", "mean")
        reduce = _REDUCTIONS.get(getattr(how, "__name__", how).removeprefix("a"))
        if reduce is None:
            raise MisconfigurationException(
                f"FitsMemory joins what the parts of a batch log, got reduce_fx={how!r} for {call['name']!r}: use"
                f" {', '.join(map(repr, _REDUCTIONS))}, or log a metric object."
            )
        call["value"] = reduce([each["value"] for each in calls], counts)
    if call.get("batch_size") is not None:
        call["batch_size"] = sum(each["batch_size"] for each in calls)
    return call


def _planned(batch: Any) -> tuple[Any, LossPlan]:
    """A batch whose targets count by how many of them the means of losses are divided, and the plan that knows it."""
    paths = find(batch, TARGETS, 1)
    if not paths:
        raise MisconfigurationException(
            f"FitsMemory finds no targets in the batch, which has {described(batch)}. {_PASS_COUNT}"
        )
    plans = [get(batch, path).plan for path in paths if isinstance(get(batch, path), MixedTarget)]
    plan = plans[0] if plans else LossPlan()
    if not plans:
        plan.only_looks, plan.tricks = True, "FitsMemory"
    for path in paths:
        if not isinstance(target := get(batch, path), MixedTarget):
            require_no_attributes(target, spelled(path), "FitsMemory")
            batch = put(batch, path, mixed_target([target], plan))
    plan.divisors, plan.remedy = Divisors(-100), _PASS_COUNT
    return batch, plan


def _add(gradients: list[tuple[Tensor, Tensor]], factor: Tensor | None) -> None:
    """Add gradients, times a factor, to those of weights, in new tensors; the list is emptied."""
    while gradients:
        assert factor is not None, "known with the gradients"
        weight, gradient = gradients.pop()
        gradient = gradient * factor
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


def _sees_zero_grad(trainer: L.Trainer) -> bool:
    """Whether code of the user's runs when gradients are set to zero, which it may look at or keep."""
    module = trainer.lightning_module
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return any(is_overridden(hook, module) for hook in hooks) or any(
        is_overridden("on_before_zero_grad", callback, Callback) for callback in callbacks_of(trainer, Callback)
    )


def _changed(state: ModuleState, module: L.LightningModule) -> str | None:
    """What is not as it was in the training step, but for the name of the hook that runs."""
    name = module._current_fx_name
    module._current_fx_name = "training_step"
    try:
        return state.changed()
    finally:
        module._current_fx_name = name


def _runs_before_backward(trainer: L.Trainer) -> bool:
    """Whether code of the user's runs between forward and backward pass, which may change the module."""
    callbacks = [callback for callback in callbacks_of(trainer, Callback) if not isinstance(callback, Trick)]
    hooks = ("on_before_zero_grad", "on_before_backward")
    return any(is_overridden(hook, trainer.lightning_module) for hook in (*hooks, "optimizer_zero_grad")) or any(
        is_overridden(hook, callback, Callback) for hook in hooks for callback in callbacks
    )


def _refuse_all_gather(*_: Any, **__: Any) -> None:
    raise MisconfigurationException(
        "FitsMemory cannot work with all_gather in training_step, where ranks would wait for one that has run out of"
        f" memory. {_PASS_COUNT}"
    )


def _check(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise for what cannot be cut, or where ranks wait for one another inside a step."""
    name = type(module).__name__
    why = "where no rank waits for another inside a step"
    require_engine(trainer, "FitsMemory", *UNSHARDED, why=why)
    if not module.automatic_optimization:
        rule = f"runs a step again in automatic optimization, got {name} with automatic_optimization=False"
        remedy = "Cut the batch in training_step"
    elif takes_dataloader_iter(module):
        rule, remedy = f"needs the batch, got {name}.training_step(dataloader_iter)", "Take the batch as the argument"
    elif has_comm_state(trainer):
        rule = f"undoes averages of gradients, got {type(trainer.strategy).__name__} with a communication hook that"
        rule, remedy = f"{rule} has a state (PowerSGD, local SGD)", "Leave the hook out"
    elif trainer.world_size > 1 and any(getattr(layer, "sparse", False) for layer in module.modules()):
        rule, remedy = f"averages dense gradients, got a layer of {name} with sparse=True", "Leave that out"
    elif trainer.world_size > 1 and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        rule, remedy = f"lets no ranks meet inside a step, got SyncBatchNorm in {name}", "Leave out sync_batchnorm"
    elif trainer.world_size > 1 and any(getattr(layer, "dist_sync_on_step", False) for layer in module.modules()):
        rule = f"lets no ranks meet inside a step, got a metric with dist_sync_on_step=True in {name}"
        remedy = "Leave that out"
    else:
        return
    raise MisconfigurationException(f"FitsMemory {rule}. {remedy}, or remove FitsMemory.")
