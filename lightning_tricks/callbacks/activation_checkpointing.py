"""Activation checkpointing: the activations inside blocks are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Literal, final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from typing_extensions import override

from lightning_tricks.core.blocks import chosen_blocks
from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.replay import ModuleState, random_numbers_of, random_state
from lightning_tricks.core.wrapping import wrap_method

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
    contexts = partial(_contexts, _Start(block), _SELECTIVE if policy == "selective" else _no_contexts)
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
    """What a block started from."""

    @torch.compiler.disable
    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.device = next(block.parameters(), torch.empty(0)).device
        # layers of torch without buffers have nothing that a forward changes
        own = [each for each in block.modules() if each._buffers or not type(each).__module__.startswith("torch.nn.m")]
        self.owners, self.state = own, ModuleState(block, own)
        self.numbers = random_state(self.device)

    @contextmanager
    def again(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Run the block again inside; afterwards state and random numbers are as if it had not run."""
        now = ModuleState(self.block, self.owners)
        self.state.restore()
        try:
            with random_numbers_of(self.numbers, self.device), inner:
                yield
        finally:
            now.restore()


def _contexts(start: _Start, contexts: Callable[[], Contexts]) -> Contexts:
    first, second = contexts()
    return first, start.again(second)


def _no_contexts() -> Contexts:
    return nullcontext(), nullcontext()


@cache
def _kept() -> frozenset[Any]:
    operators = [getattr(torch.ops.aten, name, None) for name in _KEPT]
    return frozenset(each.default for each in operators if each is not None)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)


@final
class ActivationCheckpointing(Callback):
    """Blocks keep only their inputs: activations inside are computed again in the backward pass, gradients are equal.

    For L blocks with activations of A bytes and inputs of I bytes, a step keeps ``L*I + A`` instead of ``L*A`` and runs
    each block's forward twice. Random numbers (torch, Python, NumPy) and the block's state are those of the first run,
    so dropout is the same and BatchNorm statistics are updated once. The module is any: its blocks are wrapped while
    training, under the same names, and are as before when the fit ends or fails. Validation is left alone. It works
    under DDP, FSDP2 and DeepSpeed, and inside code that the module compiles.

    ``policy="selective"`` keeps the results of matrix products, convolutions and attention, and computes again what is
    between them. It keeps more and computes less, which pays where those products are long; torch takes its time to
    sort the operations, unless they are compiled. ``benchmarks/speed.py`` measures both. A layer that writes into such
    a result (an in-place activation right behind a convolution) makes torch raise in the backward pass: make it
    ``inplace=False``, or use "full".

    Args:
        blocks: Names of submodules or of classes ("encoder", "BertLayer"), or a number of parameters, for the innermost
            submodules with at least so many. None for modules of one class that repeat in a ModuleList or Sequential.
        policy: "full" or "selective".

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, if no block is found.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[ActivationCheckpointing()], accelerator="cpu", logger=False)

    References:
        Chen et al., arXiv 1604.06174; for "selective" Korthikanti et al., arXiv 2205.05198.
    """

    def __init__(
        self, blocks: str | int | Sequence[str] | None = None, *, policy: Literal["full", "selective"] = "full"
    ) -> None:
        if isinstance(blocks, int):
            check_count("blocks", blocks)
        elif blocks is not None and not all(isinstance(name, str) for name in blocks):
            raise TypeError(
                f"blocks must be names of submodules or classes, or a number of parameters, got {blocks!r}."
            )
        check_choice("policy", policy, ("full", "selective"))
        self.blocks = blocks
        self.policy = policy
        self._undo: list[Callable[[], None]] = []

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # after configure_model
        blocks = [self.blocks] if isinstance(self.blocks, str) else self.blocks
        try:
            found = chosen_blocks(pl_module, blocks)
        except ValueError as error:
            raise MisconfigurationException(
                f"ActivationCheckpointing(blocks={self.blocks!r}) finds nothing in {type(pl_module).__name__}: {error}"
            ) from None
        torch.compiler.reset()  # code that was compiled before would go on keeping activations
        for block in found.values():
            self._undo.append(wrap_method(block, "forward", partial(recompute, block, self.policy)))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._leave()

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()
