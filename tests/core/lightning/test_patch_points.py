"""The table of patch points is complete, and each entry is as the installed versions have it.

It imports nothing of the package but the table: the rest may not be importable any more when a name has moved.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_tricks.core.lightning.patching import PRIVATE, TABLE, WRAPPED, PatchPoint, wrap_method

ROOT = Path(__file__).parents[3]
FILES = [*(ROOT / "lightning_tricks").rglob("*.py"), *(ROOT / "lightning_tricks_cli").rglob("*.py")]
NAME = re.compile(r"_[A-Za-z]\w*(?<!__)|__compatible_ops__")
STANDARD_LIBRARY = {"_asdict", "_fields", "_replace", "_SubParsersAction", "_getframe"}
SET_BY_ASSIGNMENT = {  # methods that are replaced without wrap_method
    ("lightning_tricks/core/lightning/optimizer_groups.py", "Optimizer.add_param_group"): "before there is an instance",
    ("lightning_tricks/strategies/fsdp2/sharded.py", "module.configure_model"): "is_overridden looks through a wrapper",
    **dict.fromkeys(
        [
            ("lightning_tricks/evaluation/fold_data.py", f"data.{name}")
            for name in ("prepare_data", "setup", "train_dataloader", "val_dataloader", "predict_dataloader")
        ],
        "of a copy that is the fold's own; partial pickles for strategies that spawn",
    ),
}
LOADED = {name: ast.parse(path.read_text()) for path in FILES for name in [str(path.relative_to(ROOT))]}


def found(path: str) -> Any:
    """The module or class that a dotted path leads to."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            thing: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"{path} is gone")


@cache
def source(path: str) -> str:
    """What a module, or a class and those that it inherits from, is written as."""
    thing = found(path)
    modules = [thing] if isinstance(thing, ModuleType) else map(inspect.getmodule, thing.__mro__[:-1])
    files = [str(getattr(module, "__file__", None)) for module in modules]
    return "\n".join(Path(file).read_text() for file in files if file.endswith(".py"))


def label(entry: PatchPoint) -> str:
    return f"{entry.owner.rpartition('.')[2]}.{entry.name}"


@pytest.mark.parametrize("entry", WRAPPED, ids=label)
def test_a_wrapped_method_has_the_parameters_that_wrappers_rely_on(entry: PatchPoint) -> None:
    owner, broken = found(entry.owner), f"{label(entry)} is wrapped by {entry.users} ({entry.reason})"
    names = [name for name in dir(owner) if name.startswith(entry.name)] if entry.name.endswith("_") else [entry.name]
    assert names, f"{broken}, and is gone"
    for name in names:
        assert hasattr(owner, name), f"{broken}, and is gone"
        method = getattr(owner, name)
        parameters = inspect.signature(method).parameters if callable(method) else []  # torch.Tensor.data is none
        given = [each for each in parameters if each != "self"]
        asked = [each for each in str(entry.parameters).split(", ") if each]
        assert given[: len(asked)] == asked, f"{broken}, and takes {given} now"


@pytest.mark.parametrize("entry", PRIVATE, ids=label)
def test_a_private_name_is_where_it_was(entry: PatchPoint) -> None:
    broken = f"{label(entry)} is used by {entry.users}: {entry.reason}"
    there = hasattr(found(entry.owner), entry.name) or re.search(rf"\b{entry.name}\b", source(entry.owner))
    assert there, f"{broken}. It is gone from {entry.owner}"


def test_the_table_is_told_by_whom_and_why_and_has_nothing_twice() -> None:
    entries = [*WRAPPED, *PRIVATE]
    assert all(entry.users and entry.reason for entry in entries)
    assert len({(entry.owner, entry.name) for entry in entries}) == len(entries)


# -- nothing is missing from it ---------------------------------------------------------------------------------------


def test_what_is_wrapped_is_in_the_table() -> None:
    class Mine(nn.Module):
        def helper(self) -> None: ...

    with pytest.raises(LookupError, match=r"Mine.helper is wrapped, but core/lightning/patch_points.md"):
        wrap_method(Mine(), "helper", lambda original: None)


def test_methods_are_replaced_by_wrap_method_only() -> None:
    owners = [L.LightningModule, L.Trainer, L.Callback, Strategy, Precision, nn.Module, Optimizer, LRScheduler]
    owners += [found(entry.owner) for entry in WRAPPED if entry.owner != "torch.Tensor"]  # an attribute of which it is
    names = {name for owner in owners for name in dir(owner) if callable(getattr(owner, name, None))}
    methods = {name for name in names if not name.startswith("__")}
    set_there = {
        (file, ast.unparse(node))
        for file, tree in LOADED.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in methods
        if ast.unparse(node.value) != "self"  # an attribute of an own class, which may have the name of a method
    }
    assert set_there == set(SET_BY_ASSIGNMENT), "use wrap_method, or list it in SET_BY_ASSIGNMENT with the reason"


def test_every_private_name_in_the_package_is_in_the_table() -> None:
    listed = {entry.name for entry in PRIVATE}
    missing = {f"{file}: {name}" for file, name in used() if name not in listed}
    assert not missing, f"list them in {TABLE.relative_to(ROOT)}, or use a public name: {sorted(missing)}"


def test_every_entry_is_used() -> None:
    words = {word for path in FILES for word in re.findall(r"\w+", path.read_text())}
    assert not [entry for entry in PRIVATE if entry.name not in words]


@cache
def used() -> list[tuple[str, str]]:
    """The private names of others in each file: attributes, imports, and strings that name an attribute."""
    return list(_used())


def _used() -> Iterator[tuple[str, str]]:
    ours = {name for tree in LOADED.values() for name in defined(tree)}
    upstream = {name for entry in PRIVATE for name in re.findall(r"\bself\.(_\w+)", source(entry.owner))}
    for file, tree in LOADED.items():
        here = set(defined(tree))
        for node in ast.walk(tree):
            for name in private(node):
                on_self = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
                mine = name in ours and (name not in upstream or (on_self and name in here))
                if not mine and name not in STANDARD_LIBRARY:
                    yield file, name
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_tricks"):
                for alias in node.names:
                    if any(NAME.fullmatch(part) for part in (node.module or "").split(".")):
                        yield file, alias.name


def private(node: ast.AST) -> Iterator[str]:
    names: list[Any] = []
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_tricks"):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.keyword):
        names = [node.arg]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        names = [ast.literal_eval(node.args[1])] if isinstance(node.args[1], ast.Constant) else []
    yield from (name for name in names if name and NAME.fullmatch(name))


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file defines: functions, classes, variables, attributes that it sets on itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


# -- what a name does is tested, too ----------------------------------------------------------------------------------


def test_what_a_private_name_of_lightning_does_is_tested() -> None:
    """That it is there says little: a test says what its users rely on."""
    files = [path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    functions = [
        ast.unparse(node) for text in files for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    ]
    facts = [body for body in functions if re.match(r"(@.*\n)*def test_(lightning|torch)_", body)]
    names = {name for file, name in used() if file.startswith("lightning_tricks/core/lightning/")}
    ours = {entry.name for entry in PRIVATE if entry.owner.startswith("lightning.")} & names
    untested = {name for name in ours if not any(re.search(rf"\b{name}\b", body) for body in facts)}
    assert not untested, f"no test_lightning_... beside this file mentions {sorted(untested)}"
