"""`make test-clients`: its record is whole and shown as it is, and the projects' tests are left out elsewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

import lightning_tricks as lt
from lightning_tricks import modules
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import public_name
from tests.public import PUBLIC
from tests.ranks import run_alone

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "clients.py"
KNOWN = {  # what is known not to be right, and is said on the page
    ("scvi", "TOTALVI", "Mixup"): "late",
    ("scvi", "TOTALVI", 'HardExampleFilter(mode="loss")'): "late",
}

LEFT_OUT = {  # what is not tried there and has no entry in SETTINGS, which would say so, with the reason
    "SAM": "the settings of SAMMixin",
    "add_stochastic_depth": "has random numbers that no oracle draws; it finds the layers of add_squeeze_excite",
    "drop_bias_before_batchnorm": "is done before a fit; tests/modules compares networks of torchvision and timm",
    "freeze": "is done before a fit, and by names alone",
    "init_weights": "is done before a fit; tests/modules compares networks of torchvision and timm",
    "sharpness": "is measured after a fit",
}
BESIDE = {  # what else has a row
    *("CutOut", "DistributedWeightedSampler", "LengthBuckets", "callbacks", "cross_validate", "find_lr", "optimizer"),
    *("resume", "single_bf16"),
}


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import clients

    return clients


def test_every_project_has_tests_and_a_record(script: Any) -> None:
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "clients").glob("test_*.py")}
    assert set(json.loads(script["RESULTS"].read_text())) == set(script["PROJECTS"]) == files


def test_every_project_has_a_block_in_the_docs(script: Any) -> None:
    text = (ROOT / "docs" / "your_library.md").read_text()
    sections = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert len(sections) == len(script["PROJECTS"]) == text.count("```python")


def test_nothing_else_is_wrong_and_nothing_raises_from_inside(script: Any) -> None:
    found = {
        (project, model, trick): cell["cell"]
        for project, of in json.loads(script["RESULTS"].read_text()).items()
        for model, cells in of["models"].items()
        for trick, cell in cells.items()
    }
    assert {where: kind for where, kind in found.items() if kind not in ("right", "refused", "none")} == KNOWN


def test_every_model_has_every_trick(script: Any) -> None:
    models = [cells for of in json.loads(script["RESULTS"].read_text()).values() for cells in of["models"].values()]
    assert len({frozenset(cells) for cells in models}) == 1
    assert all(cell.get("why") for cells in models for cell in cells.values() if cell["cell"] != "right")


def test_no_trick_is_forgotten() -> None:
    tricks = {name for name, thing in PUBLIC.items() if isinstance(thing, type) and issubclass(thing, Callback)}
    tricks |= set(modules.__all__) & set(lt.__all__)
    assert left_out() <= tricks
    assert tried() == tricks - left_out() | BESIDE


def left_out() -> set[str]:
    return LEFT_OUT.keys() | {public_name(name) for name, entry in SETTINGS.items() if entry.no_client}


def tried() -> set[str]:
    """What has a row in the record of a project."""
    record = json.loads(runpy.run_path(str(SCRIPT))["RESULTS"].read_text())
    return {name.partition("(")[0] for of in record.values() for cells in of["models"].values() for name in cells}


def test_the_page_is_what_the_record_gives(clients: Any) -> None:
    assert clients.PAGE.read_text() == clients.page(), "run make tables"


def test_what_a_page_shows(clients: Any) -> None:
    right, refused = {"cell": "right"}, {"cell": "refused", "why": "because"}
    project = {"models": {"A": {"EMA": right, "SAM": right}, "B": {"EMA": right, "SAM": refused}}}
    notes: list[str] = []
    assert clients._cell(project, "EMA", notes) == "✓"
    assert clients._cell(project, "SAM", notes) == "✓, refused [1](#notes)"
    assert notes == ["B: because"]


def test_compromised_releases_are_excluded(script: Any, tmp_path: Path) -> None:
    script["constraints"].__globals__["FOLDER"] = tmp_path
    assert script["constraints"]() == ["--constraint", str(tmp_path / "constraints.txt")]
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    assert lines[0].startswith("torch")
    assert lines[1:] == ["lightning!=2.6.2,!=2.6.3", "pytorch-lightning!=2.6.2,!=2.6.3"]


def test_an_unknown_project_is_refused() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "nobody"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no project nobody; there are chemprop, darts" in done.stderr


def test_the_other_tests_do_not_collect_them() -> None:
    assert "1 test collected" in run_alone(
        collected, "tests/clients", "tests/test_clients.py::test_an_unknown_project_is_refused"
    )


def collected(*of: str) -> str:
    os.chdir(ROOT)
    with redirect_stdout(StringIO()) as shown:
        pytest.main(["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", *of])
    return shown.getvalue()
