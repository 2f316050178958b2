"""Suggestions for the misspelt names that Lightning and jsonargparse complain about."""

from __future__ import annotations

import importlib
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator

import lightning as L
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_tricks_cli.nearest import did_you_mean


def near_names(message: str, parsers: Iterable[ArgumentParser]) -> str:
    """A question to append to a message, with the name that was probably meant; or nothing.

    Args:
        message: The error of jsonargparse or of the Trainer.
        parsers: The parsers whose arguments may have been meant.
    """
    kinds = (
        (r"unrecognized arguments: (--[\w.]+)", lambda found: [f"--{flag}" for flag in flags(parsers)]),
        (r"does not accept option '([\w.]+)'", lambda found: flags(parsers)),
        (r"Expected a dot import path string: (\w+)", lambda found: classes()),
        (r"module '([\w.]+)' has no attribute '(\w+)'", lambda found: dir(importlib.import_module(found[1]))),
        (r"class_path '([\w.]+)': Option '(\w+)' is not accepted", lambda found: arguments(found[1])),
        (r"invalid strategy name: `strategy='(\w+)'`", lambda found: StrategyRegistry.available_strategies()),
    )
    for pattern, names in kinds:
        if found := re.search(pattern, message):
            question = did_you_mean(found[found.re.groups], names(found))
            return question if message.endswith(".") or not question else f".{question}"
    return ""


def flags(parsers: Iterable[ArgumentParser]) -> list[str]:
    """The arguments of parsers, without the dashes."""
    return [flag for parser in parsers for flag in re.findall(r"--([\w.]+)", parser.format_help())]


def classes() -> list[str]:
    """The short names that a configuration may have: callbacks, modules, data modules, strategies."""
    bases: tuple[type, ...] = (L.Callback, L.LightningModule, L.LightningDataModule, Strategy)
    found = (kind for base in bases for kind in subclasses(base))
    return [kind.__name__ for kind in found if not kind.__name__.startswith("_")]


def subclasses(base: type) -> Iterator[type]:
    """All subclasses of a class, also of subclasses."""
    children: list[type] = base.__subclasses__()
    for kind in children:
        yield from (kind, *subclasses(kind))


def arguments(class_path: str) -> list[str]:
    """The names of the arguments of a class and of its bases, or of a function."""
    module, _, name = class_path.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    called = [base.__init__ for base in inspect.getmro(thing)] if inspect.isclass(thing) else [thing]  # type: ignore[misc]
    return [argument for each in called for argument in inspect.signature(each).parameters]
