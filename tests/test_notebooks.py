"""notebooks/: executed, clean, equal to their scripts; here their scripts run, too, in their fast mode."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import matplotlib
import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from lightning_tricks.core.install import REPOSITORY, SOURCE
from tests.ranks import _free_port, run_ranks

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
STEMS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
INTERACTIVE = "6_scaling_out"  # what it shows depends on the process being a notebook's
each = pytest.mark.parametrize("stem", STEMS)


def notebook(stem: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{stem}.ipynb", as_version=4)


def test_every_script_has_its_notebook() -> None:
    assert len(STEMS) == 6
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.py")) == STEMS


@each
def test_it_is_equal_to_its_script(stem: str) -> None:
    script = script_of(stem)
    sources = [[(cell.cell_type, cell.source) for cell in book.cells] for book in (notebook(stem), script)]
    assert sources[0] == sources[1], f"make notebooks executes {stem}.py again"


def script_of(stem: str) -> nbformat.NotebookNode:
    return jupytext.read(NOTEBOOKS / f"{stem}.py", fmt="py:percent")


@pytest.mark.slow
@each
def test_it_runs_in_jupyter(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_TRICKS_FAST", "1")
    monkeypatch.setenv("MASTER_PORT", str(_free_port()))
    script = script_of(stem)
    place = {"metadata": {"path": str(NOTEBOOKS)}}
    with TemporaryDirectory() as folder:  # of sockets: a free port may be another's before the kernel listens on it
        sockets = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(script, timeout=600, resources=place, config=sockets).execute()


def run_cells(stem: str) -> int:
    """Run the cells in IPython's own shell, as the kernel of a notebook does."""
    from IPython.core.interactiveshell import InteractiveShell

    matplotlib.use("module://matplotlib_inline.backend_inline")
    os.environ["LIGHTNING_TRICKS_FAST"] = "1"
    os.chdir(NOTEBOOKS)
    shell = InteractiveShell.instance()
    shell.system = lambda line: command_line(shell.var_expand(line))
    cells = [cell.source for cell in script_of(stem).cells if cell.cell_type == "code"]
    for source in cells:
        shell.run_cell(source, store_history=True).raise_error()
    return len(cells)


def command_line(line: str) -> None:
    """What a cell gives to the shell, here: a new interpreter would spend six seconds on its imports."""
    folder, module, arguments = re.fullmatch(rf"cd (\S+) && {re.escape(sys.executable)} -m (\S+) (.*)", line).groups()
    os.chdir(folder)
    assert import_module(module).main(shlex.split(arguments)) == 0
    os.chdir(NOTEBOOKS)


QUICK, *OTHERS = [stem for stem in STEMS if stem != INTERACTIVE]


@pytest.mark.parametrize("stem", [QUICK, *(pytest.param(stem, marks=pytest.mark.slow) for stem in OTHERS)])
def test_its_cells_run_in_a_process_of_their_own(stem: str) -> None:
    (ran,) = run_ranks(run_cells, stem, nprocs=1)
    assert ran == sum(cell.cell_type == "code" for cell in notebook(stem).cells)


@each
def test_it_was_executed_from_top_to_bottom_without_a_warning(stem: str) -> None:
    nbformat.validate(notebook(stem))
    code = [cell for cell in notebook(stem).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@each
def test_it_is_small_and_tells_nothing_of_the_machine_that_ran_it(stem: str) -> None:
    path = NOTEBOOKS / f"{stem}.ipynb"
    assert path.stat().st_size < 300_000
    texts = [
        json.dumps({kind: data for kind, data in output.get("data", {}).items() if kind != "image/png"})
        + str(output.get("text", ""))
        for cell in notebook(stem).cells
        for output in cell.get("outputs", [])
    ]
    assert not re.search(r"/(work|tmp|home|root|Users|content)/| at 0x[0-9a-f]{6}", "\n".join(texts))
    assert not [cell for cell in notebook(stem).cells if "execution" in cell.metadata]  # no times


@each
def test_it_opens_in_colab_and_its_links_lead_somewhere(stem: str) -> None:
    prose = "\n".join(cell.source for cell in notebook(stem).cells if cell.cell_type == "markdown")
    repository = REPOSITORY.removeprefix("https://github.com/")
    assert f"(https://colab.research.google.com/github/{repository}/blob/main/notebooks/{stem}.ipynb)" in prose
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not link.startswith("http")]
    assert not [link for link in links if not (NOTEBOOKS / link).exists()]


@each
def test_its_first_cell_installs_imports_and_seeds(stem: str) -> None:
    first = next(cell.source for cell in notebook(stem).cells if cell.cell_type == "code")
    condition, *install, library, ours, seed = [line for line in first.splitlines() if line]
    assert condition == 'if "google.colab" in str(get_ipython()):'
    (extras,) = re.findall(rf"\"install -q 'lightning-tricks\[(\S+)\]{re.escape(SOURCE)}'\"", " ".join(install))
    known = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in known for extra in extras.split(","))
    assert (library, ours) == ("import lightning as L", "import lightning_tricks as lt")
    assert seed == "_ = L.seed_everything(0, verbose=False)"


@each
def test_it_uses_public_names_of_installed_packages(stem: str) -> None:
    nodes = list(ast.walk(ast.parse((NOTEBOOKS / f"{stem}.py").read_text())))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules |= {
        f"{node.module}.{alias.name}" for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not [name for name in modules if name.split(".")[0] in ("tests", "benchmarks") or "._" in name]
    assert not [node.attr for node in nodes if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)]


@each
def test_it_ends_with_what_was_learned_and_cards(stem: str) -> None:
    last = notebook(stem).cells[-1].source
    learned = last.partition("## What we learned\n")[2]
    assert learned.count("\n- ") >= 4
    assert len(re.findall(r"\]\(\.\./docs/tricks/\w+\.md\)", learned)) >= 3


@each
def test_what_its_prose_tells_to_type_is_what_other_tests_run(stem: str) -> None:
    """Commands are those of docs/multi_node.md, the difference has the lines of the README's."""
    prose = "\n".join(cell.source for cell in notebook(stem).cells if cell.cell_type == "markdown")
    assert "TODO" not in prose
    for kind, text in re.findall(r"^```(.*?)\n(.*?)^```", prose, re.S | re.M):
        lines = set(text.splitlines())
        if kind == "bash":
            assert lines <= set((ROOT / "docs" / "multi_node.md").read_text().splitlines())
        else:
            assert kind == "diff"
            assert added((ROOT / "README.md").read_text()) <= added(text)


def added(text: str) -> set[str]:
    """The lines that a diff adds, without comments and whatever Lightning is called."""
    return {line.replace("pl.", "L.") for line in re.findall(r"^\+ *(.*?)(?: +#.*)?$", text, re.MULTILINE)}
