"""Which submodules of a model are gathered and freed, and run again, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.replay.recompute import recompute
from lightning_tricks.core.selection import Patterns, is_called, listed, repeated_blocks, select_modules

LARGE = 20_000_000  # parameters: an embedding of 26,000 tokens in 768 dimensions


def sharding_groups(module: nn.Module, modules: Patterns | None = None, large: int = LARGE) -> list[nn.Module]:
    """The submodules that get a group of their own; everything else is in the group of the module itself.

    Those are the repeated blocks, which are two or more modules of one class with submodules of their own in one
    ``ModuleList``, ``ModuleDict`` or ``Sequential``, the outermost ones; and outside of them the layers with many
    parameters. A submodule that shares a parameter with the rest of the model (tied weights) gets none.

    Args:
        module: The model.
        modules: Patterns (see ``core.selection``) that select the submodules in the place of all that.
        large: Parameters from which on a layer outside of the blocks has a group of its own, at least 1.

    Returns:
        The submodules, each before those that it is in. What is sharded already, and what is in it, is left out.

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
        repeated = list(repeated_blocks(module))
        inside = {each for block in repeated for each in block.modules()}
        layers = [each for each in module.modules() if each not in inside and _own_parameters(each) >= large]
        found = [*repeated, *layers]
    else:
        found = selected_blocks(module, modules)
    sharded = {inner for outer in module.modules() if isinstance(outer, FSDPModule) for inner in outer.modules()}
    return [each for each in found if each not in sharded and each is not module and not _shares(each, module)]


def checkpoint_blocks(module: nn.Module, modules: Patterns | None = None) -> list[Callable[[], None]]:
    """Compute the activations of the repeated blocks, or of those selected, again in the backward pass.

    Returns:
        Functions that undo it.

    Raises:
        MisconfigurationException: If there are no such blocks.
    """
    blocks = list(repeated_blocks(module)) if modules is None else selected_blocks(module, modules)
    if not blocks:
        raise MisconfigurationException(
            "activation_checkpointing=True runs blocks again, and finds no repeated ones: pass modules=[...], their"
            " class names, or leave it out."
        )
    return [wrap_method(block, "forward", partial(recompute, block, "full")) for block in blocks]


def selected_blocks(module: nn.Module, modules: Patterns) -> list[nn.Module]:
    """The selected submodules that have parameters and a forward pass, inner ones before those that they are in.

    Raises:
        ValueError: If a pattern selects no such submodule.
    """
    found: set[nn.Module] = set()
    for pattern in listed(modules):
        children = select_modules(module, pattern).values()
        blocks = {child for child in children if is_called(child) and any(True for _ in child.parameters())}
        if not blocks:
            raise ValueError(
                f"modules: {pattern!r} selects no submodule with parameters and a forward pass: name other submodules."
            )
        found |= blocks
    return [child for child in reversed(list(module.modules())) if child in found]


def _shares(block: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of the block is a parameter elsewhere too."""
    inside = set(block.modules())
    elsewhere = {id(p) for each in module.modules() if each not in inside for p in _direct(each)}
    return any(id(p) in elsewhere for p in block.parameters())


def _direct(module: nn.Module) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False)


def _own_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in _direct(module)) if is_called(module) else 0
