"""Execute the scripts of notebooks/ and write what they give into the notebooks beside them: ``make notebooks``.

python .ci/notebooks.py [STEM ...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def executed(script: Path) -> NotebookNode:
    """The notebook of a script with its outputs; nothing in it tells when and by which Python it was made."""
    notebook = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # a random one would be a change in every run
        cell.metadata.clear()
    place = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=place).execute()
    notebook.metadata.pop("language_info")
    return notebook


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm, where there is no ipywidgets
    for script in sorted(NOTEBOOKS.glob("*.py")):
        if not sys.argv[1:] or script.stem in sys.argv[1:]:
            print("executing", script.name, flush=True)
            jupytext.write(executed(script), script.with_suffix(".ipynb"))
