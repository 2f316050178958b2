"""Folders of shards by torch, read without running what is in them; more in tests/faults/test_hostile.py."""

from __future__ import annotations

import fractions
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from lightning_tricks.checkpoints.stream import SAFETENSORS_TYPES
from lightning_tricks.core.safe_load.reader import SafeReader, load_safely

VALUES: dict[str, Any] = {
    "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "complex": torch.randn(3, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "plain": {"lr": 0.1, "betas": (0.9, 0.99), "names": ["a", None, True]},
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


def empty() -> dict[str, Any]:
    tensors = {name: torch.zeros_like(v) for name, v in VALUES.items() if isinstance(v, torch.Tensor)}
    return {**tensors, "plain": {"lr": None, "betas": None, "names": [None, 0, 0]}}


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    dcp.save(VALUES, checkpoint_id=tmp_path)
    found = empty()
    load_safely(found, SafeReader(tmp_path))
    plain = found.pop("plain")
    assert plain == VALUES["plain"]
    assert all(torch.equal(value, VALUES[name]) for name, value in found.items())


def test_every_dtype_is_a_record(tmp_path: Path) -> None:
    dtypes = {str(each): torch.zeros(2).to(each) for each in SAFETENSORS_TYPES}
    dcp.save(dtypes, checkpoint_id=tmp_path)
    assert len(SafeReader(tmp_path).metadata.state_dict_metadata) == len(dtypes)


def test_a_partial_load_takes_what_is_there(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path)
    found = {"a": torch.zeros(2), "b": torch.zeros(2)}
    load_safely(found, SafeReader(tmp_path), strict=False)
    assert found["a"].tolist() == [1, 1]
    with pytest.raises(CheckpointException):
        load_safely(found, SafeReader(tmp_path))


def test_metadata_with_another_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(fractions.Fraction(1, 2)))
    with pytest.raises(ValueError, match=r"\.metadata holds fractions.Fraction, which can run code"):
        SafeReader(tmp_path)


def test_a_value_with_another_object_is_refused_unless_the_user_allows_it(tmp_path: Path) -> None:
    dcp.save({"half": fractions.Fraction(1, 2)}, checkpoint_id=tmp_path)
    found: dict[str, Any] = {"half": None}
    with pytest.raises(CheckpointException) as caught:
        load_safely(found, SafeReader(tmp_path))
    assert "half was not read, since loading more than tensors and plain values can run code" in str(caught.value)
    assert found == {"half": None}
    with torch.serialization.safe_globals([fractions.Fraction]):
        load_safely(found, SafeReader(tmp_path))
    assert found == {"half": fractions.Fraction(1, 2)}
