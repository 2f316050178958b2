"""Optimizer steps inside the backward pass: a weight is stepped as soon as its gradient is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import Engine, engine_of
from lightning_tricks.core.lightning.optimizer_groups import weights_of
from lightning_tricks.core.lightning.trainer import callbacks_of, grad_scaler
from lightning_tricks.core.random_numbers import random_numbers_from
from lightning_tricks.core.trick import Trick

__all__ = ["StepInBackward"]


def step_in_backward(optimizer: Optimizer, loss: Tensor) -> None:
    """Compute gradients as ``loss.backward()``, step every weight when its gradient is complete, and free the gradient.

    The ``optimizer.step()`` that follows finds no gradient, and does what the optimizer does once for all weights.

    Args:
        optimizer: An optimizer that works weight by weight.
        loss: The loss (scalar).

    Raises:
        MisconfigurationException: If the backward pass needs a weight again that it has stepped.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> step_in_backward(optimizer, weight.sum())
        >>> weight.tolist(), weight.grad
        ([0.5, 0.5], None)
    """
    reads, passes = _StaleReads(), list[int]()

    def step(group: dict[str, Any], weight: Tensor) -> None:
        # A backward pass inside another one reaches a weight before the outer pass has added its own share.
        if torch._C._current_graph_task_id() not in passes:
            raise MisconfigurationException(
                "StepInBackward: a second backward pass runs inside the first, as"
                " torch.utils.checkpoint(use_reentrant=True) does, so that a gradient may not be complete: pass"
                " use_reentrant=False, or remove StepInBackward."
            )
        step_weight(optimizer, group, weight)
        reads.stepped.add(weight)

    handles = [loss.register_hook(lambda _: passes.append(torch._C._current_graph_task_id()))]
    for group in optimizer.param_groups:
        trained = [weight for weight in group["params"] if weight.requires_grad]
        handles += [weight.register_post_accumulate_grad_hook(partial(step, group)) for weight in trained]
    try:
        with reads:
            # From the loss itself, torch would leave the mode for as long as the backward pass takes.
            torch.autograd.backward(get_gradient_edge(loss))
    except RuntimeError as error:
        if reads.stepped and "modified by an inplace operation" in str(error):
            raise _stale("a weight") from error
        raise
    finally:
        for handle in handles:
            handle.remove()


class _StaleReads(TorchFunctionMode):
    """Refuses to compute with a weight that was stepped: a block that is recomputed, or a backward formula in Python.

    Values that autograd keeps have versions, which torch compares by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stepped: set[Tensor] = set()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        described = getattr(func, "__name__", "") == "__get__" and not isinstance(result, Tensor)  # .shape, .dtype
        if not described and not self.stepped.isdisjoint(_tensors([*args, *(kwargs or {}).values()])):
            raise _stale(f"a weight, by {getattr(func, '__name__', func)}(),")
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _stale(what: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"StepInBackward: the backward pass uses {what} after it has stepped it, since there is a use of which no"
        " gradient comes (weight.detach(), a recomputed block): the result would be that of the new value. Leave"
        " StepInBackward out, or give that use its gradient."
    )


_MODULE_HOOKS = {
    "backward": "may call backward more than once",
    "configure_gradient_clipping": "would find no gradient to clip",
    "on_after_backward": "would find no gradient",
    "on_before_optimizer_step": "would find no gradient, and weights that are stepped",
    "optimizer_step": "decides on a step that is made by then",
    "optimizer_zero_grad": "may leave gradients where the next ones are added to them",
}
_CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step")


@final
class StepInBackward(Trick):
    """Steps each weight inside the backward pass, once its gradient is there: one gradient in memory at a time.

    With weights of W bytes, of which the largest has w, gradients take ``w`` instead of ``W`` bytes, and all that is
    trained, saved and resumed is bit for bit as without it: the optimizer, its groups, schedules and states are the
    same objects. Weights that are tied or used several times are stepped once, when their gradient is complete, and
    weights without a gradient are left out, as by the optimizer. ``optimizers()`` and torch's optimizers are tried on
    small weights before the first step: those that look at all weights at once (Prodigy, LAMB with its norm of all
    gradients, LBFGS) are refused, as are wrappers of another optimizer (Lookahead).

    An error in the middle of a backward pass leaves some weights stepped: resume from a checkpoint. A checkpoint that a
    signal handler saves there is saved after the batch.

    Raises:
        MisconfigurationException: Before the first step where gradients are needed together or later (gradient
            clipping, accumulation, a GradScaler, hooks that look at gradients, other tricks that change or check them),
            with several processes, in manual optimization, and for an optimizer that does not work weight by weight.
            In the backward pass before a weight would be used again with its new value.

    Example:
        >>> trainer = L.Trainer(callbacks=[StepInBackward()], accelerator="cpu", logger=False)

    References:
        Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", ACL 2024,
        https://arxiv.org/abs/2306.09782
    """

    conflicts = (
        Conflict(
            ("accumulate_grad_batches", "GradientAccumulationScheduler", "BatchSizeWarmup"),
            "a weight is stepped by the gradient of one batch, and none is kept to add the next one to",
        ),
        Conflict(
            ("GradientCallback", "SkipNonFinite", "RewindOnSpike", "TerminateOnNonFinite"),
            "weights are stepped and gradients are freed before the other trick can look at them",
        ),
        Conflict(("SAMHooks",), "SAM needs the gradients of all weights before the first is stepped"),
        Conflict(("StepInBackward",), "the second one would find no gradients"),
        Conflict(
            ("ModelCheckpoint", "OnExceptionCheckpoint"),
            "an error in the backward pass leaves some weights stepped and others not, which would be saved",
            "Save after batches, as ModelCheckpoint does with every_n_train_steps",
            lambda trick, other: getattr(other, "save_on_exception", True),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._tried: Optimizer | None = None  # the optimizer that was found to work weight by weight
        self._begun: int | None = None  # the number of steps before the one that the last backward pass makes
        self._postponed: list[Callable[[], None]] = []

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        _require_stock_step(trainer, pl_module)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        _require_no_hooks(trainer, pl_module)
        self._wrap(pl_module, "backward", partial(self._backward, trainer))
        self._wrap(trainer, "save_checkpoint", partial(self._save, trainer))
        self._undo.callback(vars(self).update, _tried=None, _begun=None, _postponed=[])

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        while self._postponed:
            self._postponed.pop(0)()

    def _save(self, trainer: L.Trainer, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, after the batch if a signal handler asks while weights are stepped and not yet counted."""
        if trainer.global_step == self._begun:
            self._postponed.append(partial(original, *args, **kwargs))
        else:
            original(*args, **kwargs)

    def _backward(self, trainer: L.Trainer, original: Callable[..., None], loss: Tensor) -> None:
        (optimizer,) = trainer.optimizers
        if optimizer is not self._tried:  # only now has every callback prepared it
            require_weight_by_weight(optimizer)
            self._tried = optimizer
        self._begun = trainer.global_step
        step_in_backward(optimizer, loss)


def _require_stock_step(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise where the Trainer needs gradients together, or has them from several processes."""
    name = type(module).__name__
    if not module.automatic_optimization:
        rule, remedy = f"works in automatic optimization, got {name} with automatic_optimization=False", "Change that"
    elif len(trainer.optimizers) != 1:
        rule, remedy = f"needs one optimizer, got {len(trainer.optimizers)}", f"Return one from {name}"
    elif engine_of(trainer) is not Engine.SINGLE or trainer.world_size > 1:
        strategy = type(trainer.strategy).__name__
        rule, remedy = f"works on one device, got {strategy}, which joins gradients", 'Pass strategy="auto", devices=1'
    elif trainer.gradient_clip_val:
        rule = f"never has gradients together to clip, got gradient_clip_val={trainer.gradient_clip_val}"
        remedy = "Remove that"
    elif grad_scaler(trainer):
        rule = f"cannot unscale gradients or skip steps, got precision={trainer.precision!r}"
        remedy = "Pass precision='bf16-mixed'"
    else:
        return
    raise MisconfigurationException(f"StepInBackward {rule}. {remedy}, or remove StepInBackward.")


def _require_no_hooks(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise for hooks of the user's that would see no gradients, or change when weights are stepped."""
    owners: list[tuple[Any, type, Any]] = [(module, L.LightningModule, _MODULE_HOOKS)]
    others = [callback for callback in callbacks_of(trainer, Callback) if not isinstance(callback, Trick)]
    owners += [(callback, Callback, _CALLBACK_HOOKS) for callback in others]  # tricks are in the table of conflicts
    for owner, base, hooks in owners:
        for hook in hooks:
            method = getattr(owner, hook)
            if getattr(method, "__func__", method) is not getattr(base, hook):
                raise MisconfigurationException(
                    f"StepInBackward steps weights inside backward(): {type(owner).__name__}.{hook}"
                    f" {_MODULE_HOOKS[hook]}. Remove {hook} or StepInBackward."
                )


def step_weight(optimizer: Optimizer, group: dict[str, Any], weight: Tensor) -> None:
    """Step one weight by its gradient, and free the gradient.

    What the optimizer writes into the group, such as a count of steps, is dropped: it belongs to the step of all.

    Args:
        optimizer: The optimizer of the weight.
        group: The weight's group in ``optimizer.param_groups``.
        weight: A weight with a gradient.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [weight]}]
    try:
        _bare_step(optimizer)()
    finally:
        optimizer.param_groups = groups
    weight.grad = None
    increment_version(weight)  # not every library's kernels do; torch then refuses to use the value it had before


def _bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's step without the hooks and the count that belong to the step of all weights."""
    step = type(optimizer).step
    return partial(step.__wrapped__ if hasattr(step, "hooked") else step, optimizer)  # type: ignore[attr-defined]


def require_weight_by_weight(optimizer: Optimizer) -> None:
    """Raise unless an optimizer does the same weight by weight, as a trial on small weights shows.

    An optimizer of the same class and groups steps two small weights a group, together and one by one, three times.
    All weights and states must be equal. The last gradient of a weight is infinite, so that any limit on a norm of all
    gradients shows.

    Raises:
        MisconfigurationException: If the optimizer does not, or cannot be tried.

    Example:
        >>> require_weight_by_weight(torch.optim.AdamW([torch.ones(4)]))
    """
    kind = type(optimizer).__name__
    remedy = "Use another optimizer, such as AdamW, or remove StepInBackward."
    try:
        together, singly = _seeded_trial(optimizer, singly=False), _seeded_trial(optimizer, singly=True)
    except Exception as error:  # whatever the optimizer's own code raises
        raise MisconfigurationException(
            f"StepInBackward tries an optimizer on small weights, which {kind} does not allow"
            f" ({type(error).__name__}: {error}). {remedy}"
        ) from error
    if not _same(together, singly):
        raise MisconfigurationException(
            f"StepInBackward steps one weight at a time, which for {kind} is not the same as all of them together."
            f" {remedy}"
        )


def _seeded_trial(optimizer: Optimizer, *, singly: bool) -> Any:
    with random_numbers_from(0, weights_of(optimizer)[0].device):  # an optimizer may draw some, too
        return _trial(optimizer, singly=singly)


def _trial(optimizer: Optimizer, *, singly: bool) -> Any:
    """The weights and the states of a small optimizer after three steps."""
    groups = [{**_settings(group), "params": _small(group["params"])} for group in optimizer.param_groups]
    small = type(optimizer)([group for group in groups if group["params"]])  # type: ignore[call-arg]
    given, own = _attributes(optimizer), _attributes(small)
    if unlike := [name for name in given if name[0] != "_" and given[name] != own.get(name)]:
        raise ValueError(f"its groups do not hold {', '.join(unlike)}")
    if _by_position(optimizer):
        raise ValueError("it has settings for single weights")

    def closure(number: int) -> Tensor:
        for group in small.param_groups[::-1]:
            for place, weight in reversed([*enumerate(group["params"])]):
                weight.grad = torch.randn(weight.shape, device=weight.device).to(weight.dtype)
                if number == 2 and place:
                    weight.grad.fill_(torch.inf)
                if singly:
                    step_weight(small, group, weight)
        return torch.zeros((), device=small.param_groups[0]["params"][0].device)

    for number in range(3):
        _bare_step(small)(partial(closure, number))
    return [[group["params"] for group in small.param_groups], small.state_dict(), _attributes(small)]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}


def _small(weights: list[Tensor]) -> list[Tensor]:
    """Two weights like the first and the last of a group that can train, with at most eight entries in a dimension."""
    numbers = [weight for weight in weights if weight.is_floating_point() or weight.is_complex()]
    return [
        torch.randn([min(size, 8) for size in weight.shape], device=weight.device).to(weight.dtype).requires_grad_()
        for weight in (numbers[:1] + numbers[-1:])
    ]


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside its groups and states, such as a setting or a count."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}


def _by_position(optimizer: Any) -> bool:
    """Whether bitsandbytes has settings for weights by their positions in the groups."""
    manager = getattr(optimizer, "mng", None)
    return bool(manager and (manager.index2config or manager.module_weight_config_triple))


def _same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors, numbers and objects are equal bit for bit; NaN equals NaN."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is type(other) and hasattr(one, "__dict__"):  # GaLore has an object for each projection
        return _same(vars(one), vars(other))
    return bool(one == other or one != one)
