"""Selecting parts of a network: one rule for every argument called ``parameters`` or ``modules``.

Such an argument is a pattern or a sequence of patterns. A pattern is a regular expression that is searched in dotted
names, or the name of a class, which selects all of its instances (and their parameters).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tricks.core.checks import check_strings, compile_pattern, some

T = TypeVar("T")
Patterns = str | Sequence[str]


def check_patterns(argument: str, patterns: Patterns | None, *, optional: bool = False) -> None:
    """Raise unless ``patterns`` is a regular expression, a non-empty sequence of them, or None with ``optional``."""
    if optional and patterns is None:
        return
    check_strings(argument, patterns)
    assert patterns is not None, "which is no string"
    for pattern in listed(patterns):
        compile_pattern(argument, pattern)
    if not listed(patterns):
        raise ValueError(f"{argument} must name something, got {patterns!r}: leave it out to select everything.")


def listed(patterns: Patterns) -> list[str]:
    """The patterns as a list."""
    return [patterns] if isinstance(patterns, str) else list(patterns)


def select_modules(module: nn.Module, patterns: Patterns, argument: str = "modules") -> dict[str, nn.Module]:
    """The selected submodules by name, in the order of the network.

    Args:
        module: The network.
        patterns: A pattern or a sequence of them; see the docstring of this file.
        argument: The name of the user's argument, for the error message.

    Raises:
        ValueError: If a pattern selects nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> list(select_modules(model, ["^0", "ReLU"]))
        ['0', '1']
    """
    named = {name: child for name, child in module.named_modules() if name}
    return _selected(named, {name: class_names(child) for name, child in named.items()}, patterns, argument)


def select_parameters(module: nn.Module, patterns: Patterns, argument: str = "parameters") -> dict[str, nn.Parameter]:
    """The selected parameters by name, in the order of the network; a shared one by its first name.

    Args:
        module: The network.
        patterns: A pattern or a sequence of them; see the docstring of this file.
        argument: The name of the user's argument, for the error message.

    Raises:
        ValueError: If a pattern selects nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> list(select_parameters(model, "LayerNorm")), list(select_parameters(model, "bias"))
        (['1.weight', '1.bias'], ['0.bias', '1.bias'])
    """
    classes: dict[str, set[str]] = {}
    for path, owner in module.named_modules():
        inherited = classes.get(path.rpartition(".")[0], set()) if path else set()
        classes[path] = inherited | (class_names(owner) if path else set())
    named = dict(module.named_parameters())
    return _selected(named, {name: classes.get(name.rpartition(".")[0], set()) for name in named}, patterns, argument)


def _selected(
    named: Mapping[str, T], classes: Mapping[str, set[str]], patterns: Patterns, argument: str
) -> dict[str, T]:
    found: set[str] = set()
    for pattern in listed(patterns):
        regex = compile_pattern(argument, pattern)
        hits = {name for name in named if pattern in classes[name] or regex.search(name)}
        if not hits:
            kinds = sorted({kind for names in classes.values() for kind in names})
            raise ValueError(
                f"{argument}: a pattern must be found in a name, or be the name of a class; {pattern!r} is neither."
                f" Names are {some(map(repr, nearest(pattern, named)))};"
                f" classes are {some(nearest(pattern, kinds, 12), 12)}."
            )
        found |= hits
    return {name: value for name, value in named.items() if name in found}


def nearest(pattern: str, names: Iterable[str], most: int = 5) -> list[str]:
    """The names that have the most in common with a pattern, as a whole or in their last parts.

    Example:
        >>> nearest("q_projs", ["layers.0.mlp", "layers.0.q_proj", "layers.0.v_proj"], 2)
        ['layers.0.q_proj', 'layers.0.v_proj']
    """

    def likeness(name: str) -> float:
        parts = name.split(".")
        ends = {".".join(parts[-count:]) for count in (1, 2, len(parts))}
        return max(SequenceMatcher(None, end, pattern).ratio() for end in ends)

    return sorted(names, key=likeness, reverse=True)[:most]


def class_names(module: nn.Module) -> set[str]:
    """The names of a module's classes, base classes included, up to nn.Module."""
    return {kind.__name__ for kind in type(module).__mro__ if kind not in nn.Module.__mro__}


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are not inside another one of them."""
    found = list(modules)
    inside = {inner for outer in found for inner in outer.modules() if inner is not outer}
    return [module for module in found if module not in inside]


# -- the blocks of a network ------------------------------------------------------------------------------------------


def select_blocks(module: nn.Module, modules: int | Patterns | None = None) -> dict[str, nn.Module]:
    """The submodules that are treated as blocks, by name; of nested ones only the outermost.

    Args:
        module: The network.
        modules: Patterns; or a number of parameters, for the innermost submodules with at least so many; or None for
            the repeated blocks, which are the innermost ones where repeated blocks are nested once.

    Raises:
        ValueError: If nothing is found.

    Example:
        >>> layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
        >>> model = nn.Sequential(nn.Embedding(100, 4), layers, nn.Linear(4, 100))
        >>> [list(select_blocks(model, modules)) for modules in (None, 400, ["^0$", "ReLU"])]
        [['1.0', '1.1'], ['0', '2'], ['0', '1.0.1', '1.1.1']]
    """
    inner = {name: child for name, child in module.named_modules() if child is not module and is_called(child)}
    if modules is None:
        found = {block for stage in repeated_blocks(module) for block in [*repeated_blocks(stage)] or [stage]}
    elif isinstance(modules, int):
        large = [child for child in inner.values() if _size(child) >= modules]
        found = {child for child in large if not any(other in large for other in child.modules() if other is not child)}
    else:
        found = set(select_modules(module, modules).values()) & set(inner.values())
    if not found:
        kinds = sorted({type(child).__name__ for child in inner.values()})
        raise ValueError(
            f"there are no {'repeated blocks' if modules is None else 'such blocks'}; name submodules such as"
            f" {', '.join(map(repr, list(inner)[:3]))}, or classes, of {', '.join(kinds)}."
        )
    outer = set(outermost(found))
    return {name: child for name, child in inner.items() if child in outer}


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated blocks of a module, in their order.

    Repeated blocks are two or more modules of one class in one ``ModuleList``, ``ModuleDict`` or ``Sequential``, with
    submodules of their own.
    """
    repeats = _siblings(module) if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) else set()
    for child in module.children():
        if child in repeats:
            yield child
        else:
            yield from repeated_blocks(child)


def _siblings(container: nn.Module) -> set[nn.Module]:
    """The children of a container that are repeated blocks."""
    blocks = [child for child in container.children() if is_called(child) and any(child.children()) and _size(child)]
    classes = [type(block) for block in blocks]
    return {block for block in blocks if classes.count(type(block)) > 1}


def _size(module: nn.Module) -> int:
    """The number of parameters of a module."""
    # Where ZeRO-3 has sharded a parameter, its numel() is 0.
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward pass; a ModuleList has none."""
    # Not type(module).forward: the class of TorchScript modules has a descriptor there that raises.
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def last_norms(module: nn.Module) -> dict[str, nn.Module]:
    """The last of the norms ``bn1``, ``bn2``, ... of each residual block of a ResNet (torchvision's, timm's), by name.

    Example:
        >>> from torchvision.models import resnet18
        >>> list(last_norms(resnet18()))[:2]
        ['layer1.0.bn2', 'layer1.1.bn2']
    """
    found: dict[str, nn.Module] = {}
    for name, block in module.named_modules():
        norms = [child for child, _ in block.named_children() if re.fullmatch(r"bn\d", child)]
        if norms and class_names(block) & {"BasicBlock", "Bottleneck"}:
            path = f"{name}.{max(norms)}".removeprefix(".")
            found[path] = module.get_submodule(path)
    return found


# -- the BatchNorm layers of parameters -------------------------------------------------------------------------------


def batchnorm_stages(model: nn.Module, stages: Mapping[nn.Parameter, int]) -> list[tuple[_BatchNorm, int]]:
    """The BatchNorm layers with the stage of their parameters; a layer without parameters has the stage before it."""
    layers: list[tuple[_BatchNorm, int]] = []
    stage = None
    for module in model.modules():
        if own := list(module.parameters(recurse=False)):
            stage = stages.get(own[0])
        if isinstance(module, _BatchNorm) and stage is not None:
            layers.append((module, stage))
    return layers
