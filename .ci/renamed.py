"""``python .ci/renamed.py SCRIPT ARGUMENTS``: a script's ``main()`` where Lightning is ``pytorch_lightning`` alone.

The script and the modules beside it are loaded as ``pytorch_lightning_tricks`` is; processes that it starts are not.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pytorch_lightning_tricks.loader import RenamingLoader  # noqa: E402


class Beside:
    """Finds the modules of a folder and of those inside, to be loaded with the names exchanged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        if self.folder not in Path(spec.loader.path).parents:
            return None
        spec.loader = RenamingLoader(fullname, spec.loader.path)
        return spec


if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    sys.meta_path.insert(0, Beside(script.parent))
    import_module(script.stem).main()
