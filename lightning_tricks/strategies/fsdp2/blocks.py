"""The submodules of a model that FSDP2 gathers, or activation checkpointing recomputes, one at a time."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.recompute import recompute, require_python
from lightning_tricks.core.selection import Patterns, is_called, listed, repeated_blocks, select_modules

LARGE = 20_000_000  # Parameters: an embedding of 26,000 tokens in 768 dimensions.


def sharding_groups(module: nn.Module, modules: Patterns | None = None, large: int = LARGE) -> list[nn.Module]:
    """List the submodules that get a sharding group of their own; the rest is in the group of the root.

    By default these are the outermost repeated blocks, and outside of them the layers with many parameters. Repeated
    blocks are two or more modules of one class, with submodules of their own, in one ``ModuleList``, ``ModuleDict`` or
    ``Sequential``. A submodule that shares a parameter with the rest of the model (tied weights) gets no group.

    Args:
        module: The model.
        modules: Patterns (see ``core.selection``) that select other submodules than the default ones.
        large: The number of parameters, at least 1, from which a layer outside of the blocks has its own group.

    Returns:
        The submodules, inner ones before outer ones, without those that are sharded already.

    Raises:
        ValueError: If a pattern selects nothing.

    Example:
        >>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        >>> model = nn.Sequential(nn.Embedding(100, 4), layers, nn.Linear(4, 100))
        >>> [type(group).__name__ for group in sharding_groups(model, large=400)]
        ['Sequential', 'Sequential', 'Sequential', 'Embedding', 'Linear']
        >>> len(sharding_groups(model, modules=["Linear"]))
        4
    """
    if modules is None:
        blocks = list(repeated_blocks(module))
        in_blocks = {inner for block in blocks for inner in block.modules()}
        layers = [layer for layer in module.modules() if layer not in in_blocks and _direct_parameters(layer) >= large]
        candidates = [*blocks, *layers]
    else:
        candidates = selected_blocks(module, modules)
    sharded = {inner for outer in module.modules() if isinstance(outer, FSDPModule) for inner in outer.modules()}
    return [
        candidate
        for candidate in candidates
        if candidate is not module and candidate not in sharded and not _shares_parameters(candidate, module)
    ]


def checkpoint_blocks(module: nn.Module, modules: Patterns | None, undo: ExitStack) -> None:
    """Recompute the activations of the repeated blocks, or of the selected ones, in the backward pass.

    Args:
        module: The model.
        modules: Patterns (see ``core.selection``) that select other submodules than the repeated blocks.
        undo: What undoes it.

    Raises:
        MisconfigurationException: If there are no such blocks.
    """
    blocks = list(repeated_blocks(module)) if modules is None else selected_blocks(module, modules)
    if not blocks:
        raise MisconfigurationException(
            "activation_checkpointing=True recomputes repeated blocks, and the model has none. Select submodules with"
            " modules=[...], for example their class names, or remove it."
        )
    for block in blocks:
        require_python(block.modules(), type(block).__name__, "activation_checkpointing=True")
        undo.callback(wrap_method(block, "forward", partial(recompute, block, "full")))


def selected_blocks(module: nn.Module, modules: Patterns) -> list[nn.Module]:
    """The selected submodules that have parameters and a forward pass, inner ones before outer ones.

    Raises:
        ValueError: If a pattern selects no such submodule.
    """
    selected: set[nn.Module] = set()
    for pattern in listed(modules):
        children = select_modules(module, pattern).values()
        blocks = {child for child in children if is_called(child) and any(True for _ in child.parameters())}
        if not blocks:
            raise ValueError(
                f"modules: {pattern!r} selects no submodule with parameters and a forward pass: name other submodules."
            )
        selected |= blocks
    return [child for child in reversed(list(module.modules())) if child in selected]


def _shares_parameters(block: nn.Module, module: nn.Module) -> bool:
    """Whether a module outside of the block has a parameter of the block too."""
    inside = set(block.modules())
    outside = [owner for owner in module.modules() if owner not in inside]
    elsewhere = {id(parameter) for owner in outside for parameter in owner.parameters(recurse=False)}
    return any(id(parameter) in elsewhere for parameter in block.parameters())


def _direct_parameters(layer: nn.Module) -> int:
    """The number of parameters of a layer that has a forward pass, without its submodules'."""
    return sum(parameter.numel() for parameter in layer.parameters(recurse=False)) if is_called(layer) else 0
