"""`make test-xla`: its record is whole, and its tests are left out elsewhere."""

from __future__ import annotations

import json
import os
from contextlib import redirect_stdout
from io import StringIO

import pytest

from benchmarks.matrix import ROOT, XLA
from tests.conformance.settings import SETTINGS
from tests.ranks import run_alone
from tests.xla.test_tricks import REFUSED


def test_every_trick_has_run_or_is_refused_by_name() -> None:
    found = json.loads(XLA.read_text())
    assert list(found["tricks"]) == sorted(SETTINGS), "run make test-xla"
    assert found["versions"].keys() == {"torch", "torch_xla", "lightning"}
    refused = {name: cell["why"] for name, cell in found["tricks"].items() if cell["cell"] == "refused"}
    assert refused.keys() == REFUSED.keys()
    assert all(REFUSED[name] in why for name, why in refused.items())


def test_the_other_tests_do_not_collect_them() -> None:
    assert "no tests collected" in run_alone(collected)


def collected() -> str:
    os.chdir(ROOT)
    with redirect_stdout(StringIO()) as printed:
        pytest.main(["--collect-only", "-q", "--assert=plain", "-m", "", "-p", "no:cacheprovider", "tests/xla"])
    return printed.getvalue()
