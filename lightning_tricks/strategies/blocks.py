"""Which submodules of a model are gathered and freed, and run again, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_tricks.core.blocks import repeated_blocks
from lightning_tricks.core.recompute import recompute
from lightning_tricks.core.wrapping import wrap_method

LARGE = 20_000_000  # parameters: an embedding of 26,000 tokens in 768 dimensions


def sharding_groups(module: nn.Module, blocks: Sequence[str] | None = None, large: int = LARGE) -> list[nn.Module]:
    """The submodules that get a group of their own; everything else is in the group of the module itself.

    Those are the repeated blocks, which are two or more modules of one class with submodules of their own in one
    ``ModuleList``, ``ModuleDict`` or ``Sequential``, the outermost ones; and outside of them the layers with many
    parameters. A submodule that shares a parameter with the rest of the model (tied weights) gets none.

    Args:
        module: The model.
        blocks: Class names to take in the place of all that; inner ones come before those that they are in.
        large: Parameters from which on a layer outside of the blocks has a group of its own, at least 1.

    Returns:
        The submodules, each before those that it is in. What is sharded already, and what is in it, is left out.

    Raises:
        ValueError: If no submodule has one of the names; lists the classes there are.

    Example:
        >>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
        >>> model = nn.Sequential(nn.Embedding(100, 4), layers, nn.Linear(4, 100))
        >>> [type(group).__name__ for group in sharding_groups(model, large=400)]
        ['Sequential', 'Sequential', 'Sequential', 'Embedding', 'Linear']
        >>> len(sharding_groups(model, blocks=["Linear"]))
        4
    """
    if blocks is None:
        repeated = list(repeated_blocks(module))
        inside = {each for block in repeated for each in block.modules()}
        layers = [each for each in module.modules() if each not in inside and _own_parameters(each) >= large]
        found = [*repeated, *layers]
    else:
        found = named_blocks(module, blocks)
    sharded = {inner for outer in module.modules() if isinstance(outer, FSDPModule) for inner in outer.modules()}
    return [each for each in found if each not in sharded and each is not module and not _shares(each, module)]


def run_again(module: nn.Module, names: Sequence[str] | None = None) -> list[Callable[[], None]]:
    """Have the repeated blocks, or those named, run again in the backward pass, which saves what they compute.

    Returns:
        Functions that undo it.

    Raises:
        MisconfigurationException: If there are no such blocks.
    """
    blocks = list(repeated_blocks(module)) if names is None else named_blocks(module, names)
    if not blocks:
        raise MisconfigurationException(
            "activation_checkpointing=True runs blocks again, and finds no repeated ones: pass blocks=[...], their"
            " class names, or leave it out."
        )
    return [wrap_method(block, "forward", partial(recompute, block, "full")) for block in blocks]


def named_blocks(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules with parameters whose class has one of the names, inner ones before those that they are in.

    Raises:
        ValueError: If no submodule has one of the names; lists the classes there are.
    """
    inner = [each for each in reversed(list(module.modules())) if each is not module and _runs(each) and _trained(each)]
    classes = sorted({_class_name(each) for each in inner})
    if unknown := sorted(set(names) - set(classes)):
        raise ValueError(f"blocks={list(names)!r}: no submodule is a {', '.join(unknown)}; there are {classes}.")
    return [each for each in inner if _class_name(each) in names]


def _class_name(module: nn.Module) -> str:
    """The name that the user knows; ``fully_shard`` makes a class of its own and the user's."""
    return (type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)).__name__


def _shares(block: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of the block is a parameter elsewhere too."""
    inside = set(block.modules())
    elsewhere = {id(p) for each in module.modules() if each not in inside for p in _direct(each)}
    return any(id(p) in elsewhere for p in block.parameters())


def _direct(module: nn.Module) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False)


def _own_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in _direct(module)) if _runs(module) else 0


def _trained(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _runs(module: nn.Module) -> bool:
    """Whether a module is called; a ModuleList is not."""
    return type(module).forward is not nn.Module.forward
