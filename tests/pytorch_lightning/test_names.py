"""``pytorch_lightning_tricks`` has the names of ``lightning_tricks``, from the same files, for the other classes."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import traceback
from pathlib import Path

import lightning as L
import pytest
import pytorch_lightning as others

import lightning_tricks as lt
import pytorch_lightning_tricks as olt
from lightning_tricks.core.install import pip_install
from pytorch_lightning_tricks.loader import PACKAGE, SOURCE, rename
from tests.nets import spelled
from tests.public import KINDS, PUBLIC
from tests.ranks import printed, run_alone

ROOT = SOURCE.parent
IMPORTABLE = ("lightning.pytorch", "lightning.fabric")
OF_BOTH = {  # what both have under their own names
    *("Trainer", "LightningModule", "LightningDataModule", "Callback", "seed_everything", "__name__", "__version__"),
}


def other(thing: object) -> object:
    """What the other package has in the place of something public."""
    return getattr(importlib.import_module(rename(thing.__module__)), thing.__name__)


def test_the_packages_list_the_same_names() -> None:
    assert olt.__all__ == lt.__all__
    assert olt.__version__ == lt.__version__
    for kind in (*KINDS, "functional"):
        ours, theirs = (importlib.import_module(f"{package.__name__}.{kind}") for package in (lt, olt))
        assert theirs.__all__ == ours.__all__
        assert all(getattr(theirs, name) is other(getattr(ours, name)) for name in ours.__all__)


@pytest.mark.few(50)
@pytest.mark.parametrize("name", PUBLIC)
def test_a_name_is_another_object_of_the_same_source_and_signature(name: str) -> None:
    ours, theirs = PUBLIC[name], other(PUBLIC[name])
    assert ours is not theirs
    assert inspect.getsourcefile(ours) == inspect.getsourcefile(theirs)
    assert inspect.getsource(ours) == inspect.getsource(theirs)
    assert inspect.getdoc(theirs) == rename(inspect.getdoc(ours))
    if not (isinstance(ours, type) and issubclass(ours, Exception)):  # which have none
        assert rename(spelled(inspect.signature(ours))) == spelled(inspect.signature(theirs))


def test_classes_are_those_of_the_other_lightning() -> None:
    assert issubclass(olt.EMA, others.Callback)
    assert not issubclass(olt.EMA, L.Callback)
    assert issubclass(olt.DDPPreset, others.strategies.DDPStrategy)
    assert {row["name"] for row in olt.presets()} <= set(others.strategies.StrategyRegistry)


def test_a_traceback_shows_the_source_file_and_its_line() -> None:
    with pytest.raises(ValueError, match="decay") as caught:
        olt.EMA(decay=2.0)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename == str(SOURCE / "core/checks.py")
    assert last.line == (SOURCE / "core/checks.py").read_text().splitlines()[last.lineno - 1].strip()
    assert "raise ValueError" in last.line


@pytest.mark.slow
def test_the_examples_in_docstrings_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for found in pkgutil.walk_packages([str(SOURCE)], f"{PACKAGE}."):
        module = importlib.import_module(found.name)
        assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0, found.name


# -- in a fresh interpreter -------------------------------------------------------------------------------------------

LOADED = """
import json, sys
import {} as lt
names = ("lightning", "lightning_fabric", "pytorch_lightning", "lightning_tricks", "pytorch_lightning_tricks")
base = next(base for base in lt.EMA.__mro__ if base.__name__ == "Callback")
print(json.dumps([name for name in names if name in sys.modules] + [base.__module__]))
"""


EXPECTED = {
    "lightning_tricks": ["lightning", "lightning_tricks", "lightning.pytorch.callbacks.callback"],
    PACKAGE: ["lightning_fabric", "pytorch_lightning", PACKAGE, "pytorch_lightning.callbacks.callback"],
}


def fresh(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)


FORGET = """
import sys
ours = {"lightning", "lightning_fabric", "pytorch_lightning", "lightning_tricks", "pytorch_lightning_tricks"}
for name in [name for name in sys.modules if name.split(".")[0] in ours]:
    del sys.modules[name]
"""


@pytest.mark.slow
def test_each_package_loads_its_own_lightning_only() -> None:
    """In a process of which all others are forgotten; in new interpreters with ``-m slow``."""
    loaded = {name: json.loads(run_alone(printed, FORGET + LOADED.format(name))) for name in EXPECTED}
    assert loaded == EXPECTED


@pytest.mark.slow
def test_each_package_has_its_own_lightning_only_and_its_own_bytecode() -> None:
    """The test process has compiled both."""
    assert {name: json.loads(fresh(LOADED.format(name)).stdout) for name in EXPECTED} == EXPECTED


def test_without_pytorch_lightning_the_extra_is_named() -> None:
    error = fresh(f"import sys; sys.modules['pytorch_lightning'] = None; import {PACKAGE}").stderr.splitlines()[-1]
    assert error == (
        f"ImportError: pytorch_lightning_tricks needs pytorch_lightning: {pip_install('pytorch-lightning')}. For"
        " lightning.pytorch, `import lightning_tricks as lt`."
    )


# -- what the loader relies on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        (">>> import lightning as L", ">>> import pytorch_lightning as L"),
        ("lightning.pytorch.strategies.DDPStrategy", "pytorch_lightning.strategies.DDPStrategy"),
        (">>> import lightning_tricks as lt", ">>> import pytorch_lightning_tricks as lt"),
        ("`import pytorch_lightning_tricks as lt`", "`import lightning_tricks as lt`"),
        ("pip install 'lightning-tricks[plot]'", "pip install 'lightning-tricks[plot]'"),
        ("ray.train.lightning.pytorch", "ray.train.lightning.pytorch"),
        ("core/lightning/patching.py", "core/lightning/patching.py"),
        ("tests.pytorch_lightning", "tests.pytorch_lightning"),
    ],
)
def test_names_are_exchanged_where_they_begin_a_dotted_name(text: str, renamed: str) -> None:
    assert rename(text) == renamed
    assert rename(renamed) == text


def test_the_package_has_lightning_under_names_that_can_be_exchanged() -> None:
    """As ``L``, or as ``lightning.pytorch`` and ``lightning.fabric``, from which something is imported."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = f"{alias.name} as {alias.asname}"
                    assert alias.name.split(".")[0] != "lightning" or name == "lightning as L", where
            elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "lightning":
                assert str(node.module).startswith(IMPORTABLE), where
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "L":
                assert node.attr in OF_BOTH, f"{where}: import it from lightning.pytorch"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != "lightning":
                bare = re.search(r"(?<![\w./-])lightning(\.(?!pytorch|fabric)|$)", node.value)
                assert not bare, f"{where}: write lightning.pytorch or lightning.fabric"
