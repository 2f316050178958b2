"""Write the types of ``pytorch_lightning_tricks`` beside its loader, for editors and type checkers.

They are the source files of ``lightning_tricks`` under their other names. Building or installing the package does it;
nothing at run time reads them, and git does not keep them.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pytorch_lightning_tricks"


def write(folder: Path) -> None:
    """Write a stub file for every source file, and remove those of sources that are gone."""
    loader = runpy.run_path(str(PACKAGE / "loader.py"))
    source, rename = loader["SOURCE"], loader["rename"]
    for old in folder.rglob("*.pyi"):
        old.unlink()
    for path in source.rglob("*.py"):
        stub = (folder / path.relative_to(source)).with_suffix(".pyi")
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"{rename(path.read_text())}\n# mypy: ignore-errors\n")  # they are looked for in the source


def get_build_hook() -> Any:
    """What hatchling asks a file for that it runs when it builds."""
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class Stubs(BuildHookInterface):  # type: ignore[misc,type-arg]
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            write(PACKAGE)

    return Stubs


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
