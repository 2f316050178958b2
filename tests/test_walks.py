"""docs/architecture.md and CONTRIBUTING.md: what they name exists, and is called in the order that they say."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy

import lightning_tricks as lt
from lightning_tricks.core.trick import Trick
from tests.nets import PlainNet, build, fit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_tricks"
WALK, GUIDE = ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"
THEIRS = {
    "Strategy": Strategy,
    "LightningModule": L.LightningModule,
    "Callback": L.Callback,
    "Trainer": L.Trainer,
    "Optimizer": torch.optim.Optimizer,
    "torch": torch,
}

# -- docs/architecture.md ---------------------------------------------------------------------------------------------


@cache
def definitions(file: Path) -> dict[str, str]:
    """The source code of every class, method and function of a file, by ``name`` or ``Class.name``."""
    text, found = file.read_text(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.get_source_segment(text, node)
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(method, ast.FunctionDef):
                found[f"{node.name}.{method.name}"] = ast.get_source_segment(text, method)
    return found


def linked() -> list[Path]:
    return [(WALK.parent / link).resolve() for link in re.findall(r"\]\(([^)]+\.py)\)", WALK.read_text())]


def everything() -> dict[str, str]:
    return {name: code for file in linked() for name, code in definitions(file).items()}


def test_a_name_before_a_link_is_in_that_file() -> None:
    pairs = re.findall(r"`([^`]+)`\s+\(\[[^\]]+\]\(([^)]+)\)\)", WALK.read_text())
    assert len(pairs) > 15
    for name, link in pairs:
        assert name in definitions((WALK.parent / link).resolve()), f"{link} has no {name}"


def test_every_name_of_the_walk_is_there() -> None:
    prose = re.sub(r"```.*?```", "", WALK.read_text(), flags=re.S)
    for name in set(re.findall(r"`([\w.]+)`", prose)):
        known = name in everything() or (PACKAGE / "core" / name).is_dir()
        assert known or name in (".grad", "state_dict") or is_theirs(name), name


def is_theirs(name: str) -> bool:
    owner, _, attribute = name.partition(".")
    return owner in THEIRS and hasattr(THEIRS[owner], attribute)


def steps() -> list[tuple[str, list[str]]]:
    """The rows of the table: what Lightning and torch call, if anything, and the chain of calls here."""
    rows = re.findall(r"^\|(?:`([^|`]+)`)?\|((?:`.*`)?)\|$", WALK.read_text(), re.M)
    return [(theirs, re.findall(r"`([^`]+)`", ours)) for theirs, ours in rows]


def test_the_table_has_real_names() -> None:
    assert len(steps()) == 12
    for theirs, ours in steps():
        assert not theirs or is_theirs(theirs), theirs
        assert not {*ours} - {*everything()}


def test_an_arrow_is_a_call() -> None:
    calls = [call for _, ours in steps() for call in pairwise(ours)]
    assert len(calls) == 24
    for caller, called in calls:
        assert called.rpartition(".")[2] in everything()[caller], f"{caller} does not call {called}"


def test_a_loss_goes_through_sam_as_written() -> None:
    """The names of the section are called in its order, all of them for each training step."""
    section = re.search(r"## A loss through SAM\n(.*?)\n## ", WALK.read_text(), re.S)
    assert section is not None
    pairs = re.findall(r"`([^`]+)`\s+\(\[[^\]]+\]\(([^)]+)\)\)", section[1])
    written = [name for name, link in pairs if name not in ("RecordedStep", "Start")]
    assert len(written) == 8
    starts = {}
    for name, link in pairs:
        file = (WALK.parent / link).resolve()
        place = file.read_text().index(definitions(file)[name])
        starts[str(file), file.read_text()[:place].count("\n") + 1] = name
    called: list[str] = []

    def watch(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        lines = (code.co_firstlineno, code.co_firstlineno + 1)  # the first line is that of a decorator, if there is one
        name = next((starts[key] for line in lines if (key := (code.co_filename, line)) in starts), None)
        if event == "call" and name is not None:
            called.append(name)

    sys.setprofile(watch)
    try:
        fit(build(WithSAM), max_epochs=1, limit_train_batches=2, limit_val_batches=0)
    finally:
        sys.setprofile(None)
    assert [*dict.fromkeys(called)] == written
    assert all(called.count(name) >= 2 for name in written)


class WithSAM(lt.SAMMixin, PlainNet):
    sam = lt.SAM(rho=0.05)


def test_a_weight_goes_into_the_checkpoint_by_the_written_way(tmp_path: Path) -> None:
    rows = dict(steps())
    way = [rows["Callback.on_train_batch_end"], rows["Trainer.save_checkpoint"], rows["Callback.state_dict"]]
    called: list[str] = []
    module, before = build(PlainNet), sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        fit(module, callbacks=[lt.EMA(at_end="raw")], max_steps=2).save_checkpoint(tmp_path / "x.ckpt")
    finally:
        sys.setprofile(before)
    rest = iter(called)
    assert all(name.rpartition(".")[2] in rest for names in way for name in names)


# -- CONTRIBUTING.md --------------------------------------------------------------------------------------------------


def test_the_base_classes_are_where_the_guide_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \| (.*) \|$", GUIDE.read_text(), re.M)
    assert len(rows) == 5
    for name, file, does in rows:
        found = definitions(PACKAGE / "core" / file)
        assert name in found
        for method in re.findall(r"`(_\w+)`", does):
            assert f"{name}.{method}" in found
            assert "@abstractmethod" in found[name]
    for name in re.findall(r"`self\.(_\w+)`", GUIDE.read_text()):
        assert name in inspect.getsource(Trick), name
