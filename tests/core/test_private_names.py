"""Each private name of Lightning and torch that the package touches is where it was, or the message says who needs it.

It imports nothing of the package, which may not be importable any more when such a name has moved.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import lightning.fabric.connector
import lightning.pytorch as pl
import lightning.pytorch.strategies.launchers
import pytest
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector, data_connector
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.nets import trainer

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "lightning_tricks").rglob("*.py"))
TOUCHING = [ROOT / "lightning_tricks" / "core" / name for name in ("trainer.py", "loaders.py")]
PRIVATE = re.compile(r"_[A-Za-z]\w*")

# Where Lightning (or torch, of a DataLoader) has the names that these two files touch.
HOLDERS: dict[str, Callable[[], Any]] = {
    "_AcceleratorConnector": lambda: accelerator_connector,
    "_MultiProcessingLauncher": lambda: lightning.pytorch.strategies.launchers,
    "_accelerator_connector": trainer,
    "_batches_that_stepped": lambda: trainer().fit_loop.epoch_loop,
    "_combined_loader": lambda: trainer().fit_loop,
    "_convert_precision_to_unified_args": lambda: lightning.fabric.connector,
    "_current_fx_name": pl.LightningModule,
    "_data_fetcher": lambda: trainer().fit_loop,
    "_data_source": lambda: trainer().fit_loop,
    "_ddp_comm_state": DDPStrategy,
    "_ddp_kwargs": DDPStrategy,
    "_detect_anomaly": trainer,
    "_iterator": lambda: DataLoader([0]),
    "_load_state_dicts": lambda: CombinedLoader([]),
    "_mode": lambda: CombinedLoader([]),
    "_on_before_batch_transfer": pl.LightningModule,
    "_parse_num_batches": lambda: data_connector,
    "_precision_plugin_flag": lambda: trainer()._accelerator_connector,
    "_process_dataloader": lambda: data_connector,
    "_request_dataloader": lambda: data_connector,
    "_resolve_overfit_batches": lambda: data_connector,
    "_save_distributed_checkpoint": ModelParallelStrategy,
    "_should_accumulate": lambda: trainer().fit_loop,
    "_state_dicts": lambda: CombinedLoader([]),
}


class Touch(NamedTuple):
    """A private name, and who needs it for what."""

    name: str
    file: str
    user: str
    purpose: str

    def __str__(self) -> str:
        return f"{self.name} has moved: {self.file} needs it in {self.user}: {self.purpose}"


def touches(file: Path, names: Callable[[ast.AST], Iterator[str]]) -> Iterator[Touch]:
    """The private names of a file, each with the outermost function or class around it."""
    tree, place = ast.parse(file.read_text()), str(file.relative_to(ROOT))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for statement in tree.body:
        documented = statement if isinstance(statement, ast.FunctionDef | ast.ClassDef) else tree
        purpose = (ast.get_docstring(documented) or "").split("\n")[0]
        for node in ast.walk(statement):
            for name in sorted(set(names(node)) - own):
                yield Touch(name, place, getattr(documented, "name", "its imports"), purpose)


def of_lightning(node: ast.AST) -> Iterator[str]:
    """Attributes (other than a module's own), imported names, strings and keywords that are private names."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "sys"):
        found = [node.attr]
    elif isinstance(node, ast.ImportFrom):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = [node.value]
    else:
        found = [str(node.arg)] if isinstance(node, ast.keyword) else []
    yield from (name for name in found if PRIVATE.fullmatch(name))


def of_torch(node: ast.AST) -> Iterator[str]:
    """Private names of torch, from where they are imported or by their path."""
    if isinstance(node, ast.ImportFrom):
        found = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        found = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
    for name in found:
        parts = name.split(".")
        if parts[0] == "torch" and any(map(PRIVATE.fullmatch, parts)):
            yield name


LIGHTNING = list(dict.fromkeys(touch for file in TOUCHING for touch in touches(file, of_lightning)))
TORCH = list(dict.fromkeys(touch for file in FILES for touch in touches(file, of_torch)))


def place(touch: Touch) -> str:
    return f"{touch.name}-{touch.file}-{touch.user}"


@pytest.mark.parametrize("touch", LIGHTNING, ids=place)
def test_lightning_has_the_private_name(touch: Touch) -> None:
    assert touch.name in HOLDERS, f"say in HOLDERS where Lightning has {touch.name}"
    assert hasattr(HOLDERS[touch.name](), touch.name), touch


@pytest.mark.parametrize("touch", TORCH, ids=place)
def test_torch_has_the_private_name(touch: Touch) -> None:
    parts = touch.name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        try:
            reduce(getattr, parts[length:], found)
        except AttributeError:
            pytest.fail(str(touch))
        return


@pytest.mark.parametrize("name", sorted({touch.name for touch in LIGHTNING}))
def test_what_a_private_name_does_is_tested(name: str) -> None:
    """That it is there says little: a test of this kind says what we rely on."""
    tests = [ast.parse((Path(__file__).parent / f"test_{file.name}").read_text()) for file in TOUCHING]
    bodies = [ast.unparse(node) for tree in tests for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert any(re.search(rf"^def test_(lightning|torch)_.*\b{name}\b", body, re.S | re.M) for body in bodies), (
        f"no test_lightning_... or test_torch_... in tests/core/test_trainer.py or test_loaders.py mentions {name}"
    )


def test_the_names_are_found() -> None:
    assert {touch.name for touch in LIGHTNING} == set(HOLDERS)
    assert {"torch._foreach_lerp_", "torch.autograd._unsafe_preserve_version_counter"} <= {each.name for each in TORCH}
