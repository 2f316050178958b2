"""Where this package lives and what installs it: the one place that says so to messages, notebooks and README."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REPOSITORY = "https://github.com/lightning-tricks/lightning_tricks"
SOURCE = " @ git+https://github.com/lightning-tricks/lightning_tricks"  # empty as soon as a release is on PyPI


def pip_install(extras: str) -> str:
    """The command that installs the package with some extras.

    >>> pip_install("lora,8bit").removesuffix(f"{SOURCE}'")
    "pip install 'lightning-tricks[lora,8bit]"
    """
    return f"pip install 'lightning-tricks[{extras}]{SOURCE}'"


@contextmanager
def required(what: str, extra: str) -> Iterator[None]:
    """A block that imports optional packages; the error of one that is missing says what needs it, and the extra."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what}: {pip_install(extra)}") from error


def library(name: str, user: str, extra: str) -> Any:
    """A module of an optional library.

    Args:
        name: The module, such as "torchao.quantization".
        user: What needs it, for the error message.
        extra: The extra of this package that installs it.

    Raises:
        ModuleNotFoundError: If the library is missing, with the extra to install.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (package, name):
            raise
        raise ModuleNotFoundError(f"{user} needs {package}: {pip_install(extra)}.") from error
