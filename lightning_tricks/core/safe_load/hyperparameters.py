"""Hyperparameters of a checkpoint: values for a constructor, and never the names of code that is run with them.

``load_from_checkpoint`` calls what ``_instantiator`` names, in Lightning 2.6.0 anything that can be imported. That of
LightningCLI calls what a dictionary names by ``class_path`` if the argument has no type.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

KEYS = ("hyper_parameters", "hparams", "module_arguments")  # the latter two were Lightning's before 0.9
OF_MODULE = ("_instantiator", "_class_path")
OF_CLI = ("lightning.pytorch.cli.instantiate_module", "pytorch_lightning.cli.instantiate_module")


def require_values(checkpoint: Mapping[str, Any], source: object, given: Collection[str] = ()) -> dict[str, Any]:
    """Raise if the hyperparameters of a checkpoint name code.

    Args:
        checkpoint: What was loaded from a file.
        source: The file, for error messages.
        given: Names of arguments that the caller passes in place of those hyperparameters.

    Returns:
        Arguments for ``load_from_checkpoint``, by which it runs nothing that the file names.

    Raises:
        ValueError: If the hyperparameters name code, or are no dictionary.
    """
    refuse_instantiator(checkpoint, source)
    parts = {key: checkpoint[key] for key in KEYS if key in checkpoint}
    if wrong := [key for key, part in parts.items() if not isinstance(part, Mapping)]:
        raise ValueError(f"{source}: its {wrong[0]} must be a dictionary, got {type(parts[wrong[0]]).__name__}.")
    values = {name: value for part in parts.values() for name, value in part.items()}
    left = {name: value for name, value in values.items() if name not in (*given, *OF_MODULE)}
    if found := next(code_in(left), None):
        raise ValueError(
            f"{source}: its hyperparameter {found} names a class, which would run code, and hyperparameters are values"
            f" here: pass {found.split('.')[0]}= yourself."
        )
    if not (named := [name for name in OF_MODULE if name in values]):
        return {}
    if left:
        raise ValueError(
            f"{source}: its hyperparameter {named[0]} names {values[named[0]]!r}, which would run code (LightningCLI"
            f" saves it): pass all arguments of the module yourself, {', '.join(f'{name}=' for name in left)}."
        )
    return {"_instantiator": None}


def refuse_instantiator(checkpoint: Mapping[str, Any], source: object) -> None:
    """Raise if the hyperparameters name a function to call that is not the one that LightningCLI saves."""
    for part in (checkpoint.get(key) for key in KEYS):
        named = part.get("_instantiator") if isinstance(part, Mapping) else None
        if named is not None and named not in OF_CLI:
            raise ValueError(
                f"{source}: its hyperparameter _instantiator names {str(named)[:60]!r}, which would run code and is not"
                " what Lightning saves: use another checkpoint."
            )


def code_in(values: Any) -> Iterator[str]:
    """The places in nested values that name code, as ``network.class_path``.

    Example:
        >>> list(code_in({"lr": 0.1, "parts": [{"class_path": "os.system", "init_args": {}}]}))
        ['parts.0.class_path']
    """
    left, seen = [("", values)], set()
    while left:
        place, value = left.pop()
        if id(value) in seen or not isinstance(value, Mapping | list | tuple | set | frozenset):
            continue
        seen.add(id(value))  # a crafted value may hold itself
        items = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
        yield from (f"{place}{name}" for name, _ in items if name in (*OF_MODULE, "class_path"))
        left += [(f"{place}{name}.", part) for name, part in items]
