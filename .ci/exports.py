"""Write the ``__init__`` files of the package and functional.py from the ``__all__`` of its source files.

What a file lists is imported by its package. The top level has all of it except a class that a function of the same
file returns (a result), the pure function beside a class (it is in ``lightning_tricks.functional``), and IN_PACKAGE.
A loss that needs no class is in both.
``--check`` only compares, and names the files that differ.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_tricks"
KINDS = (
    *("advisor", "callbacks", "checkpoints", "data", "evaluation", "losses", "modules", "optimizers"),
    *("schedules", "strategies"),
)
TRICKS = ("callbacks", "modules")  # where a function beside a class is the pure half of a trick
CORE = {  # what several tricks need, and the kind that offers it
    "core/averaging/decay.py": "callbacks",
    "core/batches/growing.py": "callbacks",
    "core/lightning/fit.py": "schedules",
    "core/lightning/steps.py": "schedules",
}
IN_PACKAGE = {"CurveLR", "PlateauLR", "TricksProfile"}  # made by functions, and constructed by nobody
PURE = {"Averager", "ema_decay", "growing_size", "sam_step"}  # without a Trainer, or the pure half of two tricks
MODULES = {"functional": "lightning_tricks", "lr_scheduler": "lightning_tricks.schedules"}  # public, on the top level


class Name(NamedTuple):
    """A public name, and the module that defines it."""

    name: str
    kind: str
    module: str
    on_top: bool
    pure: bool


def public_names() -> list[Name]:
    """Every name in the ``__all__`` of a source file."""
    files = [(kind, file) for kind in KINDS for file in sorted((PACKAGE / kind).rglob("*.py"))]
    files += [(kind, PACKAGE / file) for file, kind in CORE.items()]
    return [name for kind, file in files if file.name != "__init__.py" for name in _names(kind, file)]


def _names(kind: str, file: Path) -> list[Name]:
    tree = ast.parse(file.read_text())
    listed = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
    names = ast.literal_eval(listed[0]) if listed else []
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    results = {ast.unparse(node.returns) for node in functions if node.returns}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names} - results
    halves = {node.name for node in functions if classes and kind in TRICKS} | (PURE & {*names})
    pure = {node.name for node in functions} if kind == "losses" and not classes else halves
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return [Name(name, kind, module, name not in (results | halves | IN_PACKAGE), name in pure) for name in names]


def contents() -> dict[Path, str]:
    """The text of every generated file."""
    names = public_names()
    made = {PACKAGE / kind / "__init__.py": [n for n in names if n.kind == kind] for kind in KINDS}
    made[PACKAGE / "functional.py"] = [name for name in names if name.pure]
    made[PACKAGE / "__init__.py"] = [name for name in names if name.on_top]
    return {file: _text(file, found) for file, found in made.items()}


def _text(file: Path, names: list[Name]) -> str:
    """The file with new imports and a new ``__all__``; its docstring and what follows ``__all__`` stay."""
    old = file.read_text()
    tree, lines = ast.parse(old), old.splitlines(keepends=True)
    docstring = "".join(lines[: tree.body[0].end_lineno])
    kept = [node for node in tree.body[1:] if not isinstance(node, ast.ImportFrom | ast.Import) and not _is_all(node)]
    calls = {call.func.id for node in kept for call in ast.walk(node) if isinstance(call, ast.Call)}
    imports = [f"from {n.module} import {n.name}" for n in names]
    imports += [
        ast.unparse(n) for n in tree.body if isinstance(n, ast.ImportFrom) and {a.name for a in n.names} & calls
    ]
    modules = MODULES if file == PACKAGE / "__init__.py" else {}
    imports += [f"from {package} import {name}" for name, package in modules.items()]
    listed = [*(name.name for name in names), *modules]
    rest = "\n\n".join(ast.unparse(node).replace("'", '"') for node in kept)
    text = "\n\n".join([docstring.rstrip(), "\n".join(sorted(set(imports))), f"__all__ = {listed}", rest])
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select", "I,RUF022", "--fix", "--quiet"], ["format", "--quiet"]):
        run = [*ruff, *command, "--stdin-filename", str(file), "-"]
        text = subprocess.run(run, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def main() -> None:
    """Write the files, or name those that differ."""
    differ = {file: text for file, text in contents().items() if file.read_text() != text}
    if "--check" in sys.argv and differ:
        sys.exit(f"{', '.join(str(file.relative_to(ROOT)) for file in differ)}: run `make exports`.")
    for file, text in differ.items():
        file.write_text(text)


if __name__ == "__main__":
    main()
