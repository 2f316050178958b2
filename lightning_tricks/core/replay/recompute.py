"""A block whose activations are computed again in the backward pass, and which nothing else tells from another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_tricks.core.replay.module_state import ModuleState
from lightning_tricks.core.replay.random_numbers import random_numbers_of, random_state

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT = (  # by name, since not every version of torch has all of them
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "linear", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_mm"),
    *("_scaled_dot_product_attention_math", "_flash_attention_forward", "_efficient_attention_forward"),
)


def recompute(
    block: nn.Module, policy: Literal["full", "selective"], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``forward(*args, **kwargs)`` of a block, whose activations are computed again in the backward pass.

    The second run starts from the random numbers and the state (buffers, attributes) of the first, and afterwards the
    state is as it was before it: BatchNorm statistics are updated once. Without gradients it is the forward alone.

    Args:
        block: Whose state the forward may change.
        policy: "full" computes all again, "selective" all but matrix products, convolutions and attention.
        forward: What the block computes.
        args: Of the forward.
        kwargs: Of the forward.

    Example:
        >>> layer, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), torch.randn(8, 4)
        >>> recompute(layer, "full", layer.forward, x).sum().backward()
        >>> int(layer[1].num_batches_tracked)
        1
    """
    return _in_eager(block, policy, forward, args, kwargs) if torch.is_grad_enabled() else forward(*args, **kwargs)


@partial(torch.compiler.disable, recursive=False)  # what is compiled within the block stays so
def _in_eager(block: nn.Module, policy: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    contexts = partial(_contexts, block, _SELECTIVE if policy == "selective" else _no_contexts)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


# Where the graph breaks in the block, the compiler calls the original. A condition on is_compiling() would then leave
# the block with a checkpoint that forgets its state.
@torch.compiler.substitute_in_graph(_in_eager)
def _in_graph(block: nn.Module, policy: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The compiler takes care of state and random numbers."""
    if policy == "full":
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_SELECTIVE, **kwargs)


class _Start:
    """What a block started from. Inside, it runs again; afterwards state and numbers are as if it had not."""

    @torch.compiler.disable
    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self.block, self.inner = block, inner
        self.device = next(block.parameters(), torch.empty(0)).device
        # layers of torch without buffers have nothing that a forward changes
        own = [each for each in block.modules() if each._buffers or not type(each).__module__.startswith("torch.nn.m")]
        self.owners, self.state = own, ModuleState(block, own)
        self.numbers = random_state(self.device)

    def __enter__(self) -> None:  # more than once with retain_graph
        with ExitStack() as stack:
            stack.callback(ModuleState(self.block, self.owners).restore)
            self.state.restore()
            stack.enter_context(random_numbers_of(self.numbers, self.device))
            stack.enter_context(self.inner)
            self._leave = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._leave.__exit__(*error)


def _contexts(block: nn.Module, contexts: Callable[[], Contexts]) -> Contexts:
    first, second = contexts()
    return first, _Start(block, second)


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


@cache
def _kept() -> frozenset[Any]:
    operators = [getattr(torch.ops.aten, name, None) for name in _KEPT]
    return frozenset(each.default for each in operators if each is not None)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)
