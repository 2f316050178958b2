"""The libraries that hold the arithmetic of adapters and of few bits."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_tricks.core.install import pip_install


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
