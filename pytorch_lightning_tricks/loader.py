"""Loads the source files of ``lightning_tricks`` a second time, with Lightning's other names in their imports.

``lightning`` and ``pytorch_lightning`` are copies of each other, and the classes of one are not those of the other. So
``pytorch_lightning_tricks.callbacks.ema`` is ``lightning_tricks/callbacks/ema.py`` with the names of ``RENAMED``
exchanged in its imports and strings. Tracebacks, debuggers and ``inspect`` show the one file and its lines.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parent.name
SOURCE = Path(__file__).parents[1] / "lightning_tricks"
RENAMED = {
    "import lightning as L": "import pytorch_lightning as L",  # "lightning" alone names many things
    "lightning.pytorch": "pytorch_lightning",
    "lightning.fabric": "lightning_fabric",
    "lightning_tricks": "pytorch_lightning_tricks",
}
_EXCHANGED = RENAMED | {new: old for old, new in RENAMED.items()}
_NAMES = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, _EXCHANGED))})(?![\w\[-])")


def rename(text: str) -> str:
    """A text with the names of both packages exchanged, where they stand alone or begin a dotted name."""
    return _NAMES.sub(lambda found: _EXCHANGED[found[0]], text)


class Rename(ast.NodeTransformer):
    """Exchanges the names in imports and strings; whatever is imported keeps the name that the file has for it."""

    def visit_Import(self, node: ast.Import) -> ast.Import:
        """``import lightning as L``."""
        for alias in node.names:
            old, alias.name = alias.name, "pytorch_lightning" if alias.name == "lightning" else rename(alias.name)
            if alias.name != old and alias.asname is None and "." not in old:
                alias.asname = old
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        """``from lightning.pytorch.callbacks import Callback``."""
        node.module = rename(node.module or "")
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Docstrings, messages, and names of modules that are looked for."""
        if isinstance(node.value, str):
            node.value = rename(node.value)
        return node


class RenamingLoader(SourceFileLoader):
    """Compiles a source file with the names exchanged, and keeps its bytecode apart from that of the file itself."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        """Compile the renamed syntax tree, which has the lines and columns of the file."""
        return compile(Rename().visit(ast.parse(data)), path, "exec", dont_inherit=True, optimize=_optimize)

    def path_stats(self, path: Any) -> dict[str, Any]:
        """Let bytecode expire with this file, too."""
        stats = dict(super().path_stats(path))
        return {**stats, "mtime": stats["mtime"] + Path(__file__).stat().st_mtime}

    def get_data(self, path: Any) -> bytes:
        """Read the source, or the bytecode under its own name."""
        return super().get_data(_bytecode(path))

    def set_data(self, path: Any, data: Any, *, _mode: int = 0o666) -> None:
        """Write the bytecode under its own name."""
        super().set_data(_bytecode(path), data, _mode=_mode)


def _bytecode(path: Any) -> str:
    path = str(path)
    return f"{path.removesuffix('.pyc')}.opt-{PACKAGE.replace('_', '')}.pyc" if path.endswith(".pyc") else path


class Finder(MetaPathFinder):
    """Finds the modules of a package by its ``__path__``, to be loaded with the names exchanged."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's file, unless it is one of this package's own."""
        if not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and Path(spec.loader.path) != Path(__file__):
            spec.loader = RenamingLoader(fullname, spec.loader.path)
        return spec


def load(package: ModuleType) -> None:
    """Make a package what ``lightning_tricks`` is.

    Raises:
        ImportError: If ``pytorch_lightning`` is not installed.
    """
    try:
        import pytorch_lightning  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "pytorch_lightning":
            raise
        command = runpy.run_path(str(SOURCE / "core" / "install.py"))["pip_install"]("pytorch-lightning")
        raise ImportError(
            f"pytorch_lightning_tricks needs pytorch_lightning: {command}. For lightning.pytorch, `import"
            " lightning_tricks as lt`."
        ) from error
    package.__path__.append(str(SOURCE))
    sys.meta_path.insert(0, Finder(package.__name__))
    RenamingLoader(package.__name__, str(SOURCE / "__init__.py")).exec_module(package)
