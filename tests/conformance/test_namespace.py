"""With a ``pytorch_lightning.Trainer`` a trick trains what the plain loop trains; presets train the same."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.conformance.settings import every_third
from tests.conformance.test_families import FAMILIES, PROCESSES
from tests.nets import PlainNet, assert_close, build, fit, loader, weights
from tests.pytorch_lightning.test_conformance import SLICE, SUITE, load_tests_again, run_slice
from tests.ranks import run_alone, run_ranks

TEST = f"{SUITE}/test_naive.py::test_a_plain_loop_gives_the_same"


@pytest.fixture(scope="module")
def passed(selected: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tests that passed with that namespace, in a process of its own."""
    naive = [f"{TEST}[fp32-{name}]" for name in selected("name")]
    return run_alone(run_slice, str(tmp_path_factory.mktemp("pl")), [*SLICE, *naive])


def test_a_slice_of_the_suite_passes(passed: list[str]) -> None:
    assert {f"{name} pytorch_lightning" for name in SLICE} <= {*passed}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", every_third(2))
def test_it_works_in_the_other_namespace(name: str, passed: list[str], cell: Callable[..., None]) -> None:
    assert f"{TEST}[fp32-{name}] pytorch_lightning" in passed
    cell(name, "namespace")


def trained(name: str) -> tuple[str, dict[str, Any]]:
    load_tests_again()
    families = import_module("tests.conformance.test_families")
    return families.L.__name__, {key: value.numpy() for key, value in families.trained(name).items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_trains_the_same_in_the_other_namespace(family: str, cell: Callable[..., None]) -> None:
    processes = PROCESSES.get(family, 2)
    alone = build(PlainNet)
    fit(alone, train=loader(80, 16))
    for name, given in run_ranks(trained, FAMILIES[family], nprocs=processes, nodes=max(1, processes // 2)):
        assert name == "pytorch_lightning"
        assert_close({key: torch.from_numpy(value) for key, value in given.items()}, weights(alone), 1e-5)
    cell(family, "namespace")
