"""A block whose activations are recomputed in the backward pass, with the same state and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import cache, partial
from itertools import count
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_tricks.core.replay.rerun import Start, run_again

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT = (  # names, since not every version of torch has all of these operations
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_mm"),
    *("_scaled_dot_product_attention_math", "_flash_attention_forward", "_efficient_attention_forward"),
)


def recompute(
    block: nn.Module, policy: Literal["full", "selective"], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``forward(*args, **kwargs)`` of a block; its activations are recomputed in the backward pass.

    The second run starts from the random numbers and the state (buffers, attributes) of the first, and restores the
    state at its end, so BatchNorm statistics are updated once. Without gradients this is the forward pass alone.

    Args:
        block: The module whose state the forward pass may change.
        policy: "full" to recompute everything, "selective" to keep matrix products, convolutions and attention.
        forward: The block's forward method.
        args: Positional arguments of ``forward``.
        kwargs: Keyword arguments of ``forward``.

    Example:
        >>> layer, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(8, 4)
        >>> recompute(layer, "full", layer.forward, x).sum().backward()
        >>> int(layer[1].num_batches_tracked)
        1
    """
    return _in_eager(block, policy, forward, args, kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)


def require_python(parts: Iterable[nn.Module], name: str, asked: str) -> None:
    """Raise if one of the parts of a block is a TorchScript module, of which torch does not see what it computes.

    Args:
        parts: The modules.
        name: The name of the block.
        asked: What the user has written to have its activations recomputed.

    Raises:
        MisconfigurationException: If one is.
    """
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise MisconfigurationException(
            f"{asked} works on modules in Python, and torch.jit has compiled {name} or a part of it:"
            " name other modules, or use the module that was compiled."
        )


@partial(torch.compiler.disable, recursive=False)  # code that is compiled inside the block stays compiled
def _in_eager(block: nn.Module, policy: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    contexts = partial(_contexts, block, _SELECTIVE if policy == "selective" else _no_contexts)
    forward = _with_caches_of_now(forward, [*args, *kwargs.values()])
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


# Where the graph breaks in the block, the compiler calls the original function. A condition on is_compiling() would
# then choose the checkpoint that does not restore the state.
@torch.compiler.substitute_in_graph(_in_eager)
def _in_graph(block: nn.Module, policy: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The checkpoint in compiled code, where the compiler restores state and random numbers."""
    if policy == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_SELECTIVE, **kwargs)


def _with_caches_of_now(forward: Callable[..., Any], values: list[Any]) -> Callable[..., Any]:
    """The forward pass, to which every run after the first passes the caches of keys and values as they are now.

    A forward pass appends to them. They are those of transformers: a causal model makes one in training, too, and
    prefix tuning fills it.
    """
    before = {id(value): _copied(value) for value in values if _is_cache(value)}
    runs = count()

    def run(*args: Any, **kwargs: Any) -> Any:
        if next(runs) > 0 and before:
            args = tuple(_copied(before.get(id(value), value)) for value in args)
            kwargs = {name: _copied(before.get(id(value), value)) for name, value in kwargs.items()}
        return forward(*args, **kwargs)

    return run


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _copied(value: Any) -> Any:
    """A copy of a cache with the same tensors, to which it adds others by itself; anything else as it is."""
    if not _is_cache(value):
        return value
    made = copy(value)
    for name, part in vars(value).items():
        parts = [_copied(each) for each in part] if isinstance(part, list) else _copied(part)
        setattr(made, name, dict(part) if isinstance(part, dict) else parts)
    return made


class _Recomputed:
    """A context in which a block runs again from the state and random numbers that its first run started from."""

    @torch.compiler.disable
    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner
        with _naming():
            self.start = Start.here(block)

    @contextmanager
    def first_run(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """The context of the first run, after which the block must be as a second one finds it."""
        with self.start.state.watching(), inner:
            yield

    def __enter__(self) -> None:  # called more than once with retain_graph
        with _naming(), ExitStack() as stack:
            # Other modules have run since, which may share a file or a closure with this one.
            again = stack.enter_context(run_again(self.start, at_once=False))
            stack.enter_context(again.running())
            stack.enter_context(self.inner)
            self._leave = stack.pop_all()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # torch may end a recomputation by an exception of its own, which is no error of the block.
        if error is not None and type(error).__module__ == checkpoint.__module__:
            kind = error = trace = None
        with _naming():
            self._leave.__exit__(kind, error, trace)


@contextmanager
def _naming() -> Iterator[None]:
    """Say in an error about the state of a block who runs it a second time."""
    try:
        yield
    except MisconfigurationException as error:
        message = f"ActivationCheckpointing (or activation_checkpointing of a preset) runs a block twice: {error}"
        raise MisconfigurationException(message) from None


def _contexts(block: nn.Module, contexts: Callable[[], Contexts]) -> Contexts:
    first, second = contexts()
    recomputed = _Recomputed(block, second)
    return recomputed.first_run(first), recomputed


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


@cache
def _kept() -> frozenset[Any]:
    operators = [getattr(torch.ops.aten, name, None) for name in _KEPT]
    return frozenset(operator.default for operator in operators if operator is not None)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
