"""Real text that comes with what is installed: the documentation strings of Python's library and of numpy.

Source files are parsed and never run. Python's are under the PSF License (version 2), numpy's under the 3-clause BSD
License; ``licence`` has the texts' names and their bytes. Each string counts once.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

SHARES = {"val": 0.03, "test": 0.05}  # of the strings; all others train
LICENCES = {"python": "PSF-2.0", "numpy": "BSD-3-Clause"}
LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3"}


def folders() -> dict[str, Path]:
    """Where the sources are; packages are found and not imported."""
    found = find_spec("numpy")
    if found is None or found.origin is None:
        raise SystemExit("numpy is missing. Run: python -m pip install numpy")
    return {"python": Path(sysconfig.get_path("stdlib")), "numpy": Path(found.origin).parent}


def documented(folder: Path) -> Iterator[str]:
    """The documentation strings of all modules, classes and functions in a folder."""
    for path in sorted(folder.rglob("*.py")):
        if LEFT_OUT & {*path.relative_to(folder).parts}:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # of another Python
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        yield from filter(None, (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)))


@cache
def load_documentation(limit: int | None = None) -> dict[str, str]:
    """The texts of "train", "val" and "test", of different strings.

    Args:
        limit: The number of strings of each source; None for all.
    """
    texts = [text for folder in folders().values() for text in [*documented(folder)][:limit]]
    texts = list(dict.fromkeys(texts))
    Random(0).shuffle(texts)
    parts, begin = {}, 0
    for part, share in SHARES.items():
        end = begin + max(1, round(share * len(texts)))
        parts[part], begin = "\n\n".join(texts[begin:end]), end
    return {"train": "\n\n".join(texts[begin:]), **parts}


def described(texts: dict[str, str]) -> dict[str, Any]:
    """The sources, their licences, and the bytes of each part."""
    return {"licences": LICENCES, "bytes": {part: len(text.encode()) for part, text in texts.items()}}


def byte_sequences(text: str, length: int) -> tuple[Tensor, Tensor]:
    """Bytes (N, T) in a row, and those that follow them."""
    return sequences(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long(), length)


def sequences(tokens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Tokens in a row, cut into inputs (N, T) and the tokens that follow them."""
    number = (len(tokens) - 1) // length
    return tokens[: number * length].view(number, length), tokens[1 : number * length + 1].view(number, length)
