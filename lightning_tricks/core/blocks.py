"""Which submodules of a model are its blocks: layers of layers that repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


def chosen_blocks(module: nn.Module, blocks: int | Sequence[str] | None = None) -> dict[str, nn.Module]:
    """The submodules that a user means by ``blocks``, by name; of those within each other the outer ones.

    Args:
        module: The model.
        blocks: Names of submodules or of classes; or a number of parameters, for the innermost submodules with at least
            so many; None for the repeated blocks, and where those are stages of repeated blocks, these.

    Raises:
        ValueError: If nothing is found; lists the classes there are.

    Example:
        >>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
        >>> model = nn.Sequential(nn.Embedding(100, 4), layers, nn.Linear(4, 100))
        >>> [list(chosen_blocks(model, blocks)) for blocks in (None, 400, ["0", "ReLU"])]
        [['1.0', '1.1'], ['0', '2'], ['0', '1.0.1', '1.1.1']]
    """
    inner = {name: each for name, each in module.named_modules() if each is not module and _runs(each)}
    if blocks is None:
        found = {each for stage in repeated_blocks(module) for each in [*repeated_blocks(stage)] or [stage]}
    elif isinstance(blocks, int):
        large = [each for each in inner.values() if _parameters(each) >= blocks]
        found = {each for each in large if not any(other in large for other in each.modules() if other is not each)}
    else:
        named = {each: {name, *(kind.__name__ for kind in type(each).__mro__)} for name, each in inner.items()}
        if unknown := [name for name in blocks if not any(name in names for names in named.values())]:
            raise ValueError(f"no submodule or class of submodules is called {unknown[0]!r}; {_described(inner)}")
        found = {each for each, names in named.items() if names & set(blocks)}
    if not found:
        raise ValueError(f"there are no {'repeated blocks' if blocks is None else 'such blocks'}; {_described(inner)}")
    within = {each for outer in found for each in outer.modules() if each is not outer}
    return {name: each for name, each in inner.items() if each in found - within}


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated blocks of a module, in their order.

    Those are two or more modules of one class with submodules of their own in one ``ModuleList``, ``ModuleDict`` or
    ``Sequential``.
    """
    repeats = _siblings(module) if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) else set()
    for child in module.children():
        if child in repeats:
            yield child
        else:
            yield from repeated_blocks(child)


def _siblings(container: nn.Module) -> set[nn.Module]:
    """The children of a container that are blocks, and of one class with another of them."""
    blocks = [child for child in container.children() if _runs(child) and any(child.children()) and _parameters(child)]
    classes = [type(block) for block in blocks]
    return {block for block in blocks if classes.count(type(block)) > 1}


def _parameters(module: nn.Module) -> int:
    return sum(getattr(each, "ds_numel", each.numel()) for each in module.parameters())  # DeepSpeed's may be away


def _runs(module: nn.Module) -> bool:
    """Whether a module is called; a ModuleList is not."""
    return type(module).forward is not nn.Module.forward


def _described(inner: dict[str, nn.Module]) -> str:
    classes = sorted({type(each).__name__ for each in inner.values()})
    return f"name submodules such as {', '.join(map(repr, list(inner)[:3]))}, or classes, of {', '.join(classes)}."
