"""The shape of the package: who imports what, and that nothing of a trick is forgotten."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import lightning_tricks as lt

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_tricks"
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
PUBLIC = [file for file in FILES if file.endswith("__init__.py") and file.split("/")[0] not in ("core", "cli")]
SOURCES = [file for file in FILES if not file.endswith("__init__.py")]
HEAVY = {"timm", "transformers", "deepspeed", "ray", "matplotlib", "rich", "sklearn", "skimage", "jsonargparse"}

ON_TOP = {"cli", "advisor"}  # may import anything, and are no tricks

# What another kind may import besides itself and core: no other kind, with one exception. Callbacks stand on schedules,
# since LRSchedule is the YAML form of the schedules.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "schedules": set(),
    "modules": set(),
    "strategies": set(),
    "callbacks": {"schedules"},
    "checkpoints": set(),
}
# In these kinds every file is a trick of its own, apart from what the tricks of the kind share.
SHARED: dict[str, set[str]] = {
    "callbacks": {"mixing", "stages"},
    "checkpoints": {"average", "files", "folders", "stream", "zero_folder"},
    "modules": {"sam_engine", "sam_rules", "sam_setup"},
    "strategies": {
        *("base", "blocks", "compression", "folders", "prepare", "presets", "root", "slices", "wholes"),
        "zero_checks",
        "zero_config",
    },
}


class Import(NamedTuple):
    module: str
    name: str | None
    at_module_level: bool


@cache
def imports(file: str) -> list[Import]:
    return list(_imports(ast.parse((PACKAGE / file).read_text()), True))


def _imports(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, at_module_level) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (Import(str(child.module), alias.name, at_module_level) for alias in child.names)
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checkers(child)
        yield from _imports(child, at_module_level and not later)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def top_levels(file: str) -> set[str]:
    return {each.module.split(".")[0] for each in imports(file)}


def ours(file: str) -> set[tuple[str, str]]:
    """The (kind, file) pairs of the package that a file imports."""
    paths = [
        f"{each.module}.{each.name}".split(".") for each in imports(file) if each.module.split(".")[0] == PACKAGE.name
    ]
    return {(path[1], path[2]) for path in paths}


# -- floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["core/checks.py", "schedules/curves.py"])
def test_the_lowest_floor_needs_the_standard_library_only(file: str) -> None:
    assert top_levels(file) <= set(sys.stdlib_module_names)


TORCH_FLOOR = {
    *("averages", "checks", "exchange", "functions", "history", "losses", "offload", "shards", "structure", "targets"),
    *("blocks", "finite", "owners", "plain", "plan", "records", "weights", "zero"),
}


@pytest.mark.parametrize("name", sorted(TORCH_FLOOR))
def test_the_torch_floor_sees_no_trainer(name: str) -> None:
    file = f"core/{name}.py"
    assert top_levels(file) - HEAVY <= {*sys.stdlib_module_names, "torch", "typing_extensions", "lightning_tricks"}
    assert {each for _, each in ours(file)} <= TORCH_FLOOR


@pytest.mark.parametrize("file", SOURCES)
def test_no_kind_imports_another(file: str) -> None:
    kind = file.split("/")[0]
    assert kind in ON_TOP or {each for each, _ in ours(file)} <= {kind, "core", *MAY_IMPORT[kind]}


@pytest.mark.parametrize("file", [file for file in SOURCES if file.split("/")[0] in SHARED])
def test_no_trick_imports_another(file: str) -> None:
    kind, name = file.removesuffix(".py").split("/", 1)
    if name not in SHARED[kind]:
        assert {each for its_kind, each in ours(file) if its_kind == kind} <= SHARED[kind]


@pytest.mark.parametrize("file", FILES)
def test_what_is_heavy_is_imported_where_it_is_used(file: str) -> None:
    found = {each.module.split(".")[0] for each in imports(file) if each.at_module_level}
    assert not found & HEAVY


@pytest.mark.parametrize("file", [file for file in FILES if file not in ("core/trainer.py", "core/loaders.py")])
def test_lightnings_private_names_are_used_in_one_place(file: str) -> None:
    private = [
        each
        for each in imports(file)
        if each.module.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning")
        and any(part.startswith("_") for part in f"{each.module}.{each.name or ''}".split("."))
    ]
    assert not private, (
        "private names of Lightning belong into core/trainer.py or core/loaders.py, with reason and test"
    )


@pytest.mark.parametrize("file", FILES)
def test_only_lightning_pytorch_is_imported(file: str) -> None:
    assert "pytorch_lightning" not in top_levels(file), "its classes are not those of lightning.pytorch"


COMMAND = ROOT / "lightning_tricks_cli"
PARSERS = sorted(str(path.relative_to(COMMAND)) for path in COMMAND.rglob("*.py"))


@pytest.mark.parametrize("file", PARSERS)
def test_a_parser_needs_the_standard_library_only(file: str) -> None:
    found = _imports(ast.parse((COMMAND / file).read_text()), True)
    loaded = {each.module.split(".")[0] for each in found if each.at_module_level}
    assert loaded <= {*sys.stdlib_module_names, COMMAND.name}, "a command's run imports what it needs"


# -- nothing forgotten ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [file for file in SOURCES if file.split("/")[0] not in ON_TOP])
def test_a_source_file_has_its_test(file: str) -> None:
    kind, name = file.rsplit("/", 1)
    assert (ROOT / "tests" / kind / f"test_{name}").exists()


@pytest.mark.parametrize("file", SOURCES)
def test_a_source_file_is_short(file: str) -> None:
    assert len((PACKAGE / file).read_text().splitlines()) <= 260


@pytest.mark.parametrize("file", PUBLIC)
def test_all_is_sorted_and_exists(file: str) -> None:
    module = importlib.import_module(".".join(("lightning_tricks", *Path(file).parent.parts)))
    assert module.__all__ == sorted(module.__all__, key=_order)
    assert all(hasattr(module, name) for name in module.__all__)


def _order(name: str) -> tuple[int, str]:
    """As ruff sorts ``__all__``: constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_the_package_has_what_its_kinds_have() -> None:
    kinds = {str(Path(file).parent) for file in PUBLIC} - {"."}
    public = {name for kind in kinds for name in importlib.import_module(f"lightning_tricks.{kind}").__all__}
    assert set(lt.__all__) == public


@pytest.mark.parametrize("name", lt.__all__)
def test_a_public_name_is_in_the_readme(name: str) -> None:
    assert re.search(rf"`(lt\.)?{name}\b", (ROOT / "README.md").read_text()), f"README.md has no row with `{name}`"


@pytest.mark.parametrize("name", lt.__all__)
def test_a_public_name_goes_through_the_conformance_suite(name: str) -> None:
    settings = importlib.import_module("tests.conformance.settings")
    assert (name in settings.SETTINGS) != (name in settings.EXEMPT), "enrol it in SETTINGS, or give a reason in EXEMPT"
    if name in settings.EXEMPT:
        assert settings.EXEMPT[name], "an exemption needs a reason"


@pytest.mark.parametrize("name", lt.__all__)
def test_a_public_name_is_documented_with_an_example(name: str) -> None:
    documentation = getattr(lt, name).__doc__
    assert documentation.split("\n")[0].endswith(".")
    assert "Example:" in documentation
    assert ">>>" in documentation


# -- in a fresh interpreter -------------------------------------------------------------------------------------------

FRESH = """
import json, sys
import lightning.pytorch as pl
strategies = set(pl.strategies.StrategyRegistry.available_strategies())
modules = set(sys.modules)
import lightning_tricks
added = sorted(set(pl.strategies.StrategyRegistry.available_strategies()) - strategies)
print(json.dumps({"strategies": added, "modules": sorted({m.split(".")[0] for m in set(sys.modules) - modules})}))
"""


def test_importing_registers_the_presets_and_loads_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=True, cwd=ROOT)
    added = json.loads(run.stdout)
    assert added["strategies"] == sorted(row["name"] for row in lt.presets())
    assert not set(added["modules"]) & HEAVY
    assert set(added["modules"]) <= {*sys.stdlib_module_names, "lightning_tricks", "lightning", "torch", "torchmetrics"}
