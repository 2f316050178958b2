"""The metadata of a folder of shards: what torch has written is read, anything else is refused and changes nothing."""

from __future__ import annotations

import pickle
import pickletools
import random
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from lightning_tricks.core.safe_load.metadata import ALLOWED_NAMES, read_metadata
from lightning_tricks.core.safe_load.reader import SafeReader, load_safely
from tests.faults.pickles import CRAFTED, behind, state_of


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    groups = {"0": {"lr": 0.1, "params": ["w"]}}
    state = {
        "state_dict": {"w": torch.ones(2, 3), "half": torch.ones(0, dtype=torch.bfloat16), "extra": {"a": 1}},
        "optimizer_0": {"state": {"w": {"step": torch.tensor(1), "mean": torch.zeros(2, 3)}}, "param_groups": groups},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder / ".metadata"


def test_it_is_what_torch_reads(file: Path) -> None:
    expected, found = pickle.loads(file.read_bytes()), read_metadata(file)
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for name, theirs in expected.state_dict_metadata.items():
        mine = found.state_dict_metadata[name]
        assert type(mine) is type(theirs)
        if isinstance(theirs, TensorStorageMetadata):  # its other properties are deprecated, or no reader's business
            assert mine.properties.dtype == theirs.properties.dtype
            assert (mine.size, mine.chunks) == (theirs.size, theirs.chunks)
    assert found.planner_data == expected.planner_data
    for index, place in expected.storage_data.items():
        ours = found.storage_data[index]
        assert (ours.relative_path, ours.offset, ours.length) == (place.relative_path, place.offset, place.length)
    assert [each.index for each in found.storage_data] == [each.index for each in expected.storage_data]


def test_metadata_without_paths_is_read(file: Path, tmp_path: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = None
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert read_metadata(tmp_path / ".metadata").planner_data is None


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_any_protocol_is_read(file: Path, protocol: int, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), protocol))
    assert read_metadata(tmp_path / ".metadata") == read_metadata(file)


@pytest.mark.parametrize("crafted", CRAFTED)
def test_a_crafted_pickle_is_refused_and_changes_nothing(file: Path, crafted: str, tmp_path: Path) -> None:
    before = state_of(ALLOWED_NAMES)
    (tmp_path / ".metadata").write_bytes(behind(CRAFTED[crafted], file.read_bytes()))
    with pytest.raises(ValueError, match=r"\.metadata (is damaged|holds .*, which can run code)"):
        read_metadata(tmp_path / ".metadata")
    assert state_of(ALLOWED_NAMES) == before


def refused(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        read_metadata(folder / ".metadata")


NAME = "state_dict.w"


@pytest.mark.parametrize(
    ("kind", "attribute", "value"),
    [
        *[("metadata", name, 1) for name in ("state_dict_metadata", "planner_data", "storage_data")],
        *[("entry", name, 1) for name in ("properties", "size", "chunks")],
        ("properties", "dtype", 1),
        *[("chunk", name, 1) for name in ("offsets", "sizes")],
        ("chunk", "sizes", torch.Size([2, 2])),
        *[("index", name, value) for name, value in {"fqn": 1, "offset": 1, "index": "1"}.items()],
        *[("place", name, value) for name, value in {"relative_path": 1, "offset": "1", "length": None}.items()],
        ("place", "transform_descriptors", [1]),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_refused(file: Path, kind: str, attribute: str, value: Any, tmp_path: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    entry = metadata.state_dict_metadata[NAME]
    index, place = next((index, place) for index, place in metadata.storage_data.items() if index.fqn == NAME)
    kinds = {"metadata": metadata, "entry": entry, "properties": entry.properties, "chunk": entry.chunks[0]}
    object.__setattr__({**kinds, "index": index, "place": place}[kind], attribute, value)
    refused(tmp_path, pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *[(NAME, path) for path in (1, ("optimizer_0", "w"), ["state_dict", "w"])],
        *[("", ()), ("state_dict.None", ("state_dict", None))],
        *[("a path to nothing", ("a path to nothing",)), ("a value without a path", None)],
    ],
    ids=str,
)
def test_a_wrong_path_is_refused(file: Path, name: str, path: Any, tmp_path: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    if name != "a path to nothing":
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[NAME]
    if path is not None:
        metadata.planner_data[name] = path
    refused(tmp_path, pickle.dumps(metadata))


def test_two_values_in_one_place_are_refused(file: Path, tmp_path: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    first, second = list(metadata.storage_data)[:2]
    metadata.storage_data[second] = metadata.storage_data[first]
    refused(tmp_path, pickle.dumps(metadata))


def test_a_part_of_a_file_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        refused(tmp_path, content[:length])


def greedy(content: bytes) -> bool:
    """Whether Python's reader of pickles would take gigabytes of memory for it."""
    try:
        return any(code.name in ("LONG_BINPUT", "BYTEARRAY8") for code, *_ in pickletools.genops(content))
    except Exception:
        return True  # from here on it reads something else


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_flipped_bit_is_noticed_or_changes_nothing(file: Path, tmp_path: Path) -> None:
    content, (expected, paths), refused, read = file.read_bytes(), values_of(file.parent), 0, 0
    for shards in file.parent.glob("*.distcp"):
        shutil.copy(shards, tmp_path)
    for bit in random.Random(0).sample(range(8 * len(content)), 800):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        if greedy(flipped):
            continue
        (tmp_path / ".metadata").write_bytes(flipped)
        try:
            found, places = values_of(tmp_path)
        except (ValueError, CheckpointException):
            refused += 1
            continue
        assert (repr(found), places) == (repr(expected), paths), bit
        read += 1
    assert min(refused, read) > 50


def values_of(folder: Path) -> tuple[dict[str, Any], Any]:
    """All that is in a folder, and where it belongs."""
    reader = SafeReader(folder)
    values = {
        key: torch.full(entry.size, 7, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in reader.metadata.state_dict_metadata.items()
    }
    load_safely(values, reader)
    return values, reader.metadata.planner_data


@pytest.mark.parametrize(
    ("size", "chunks", "right"),
    [
        ((4, 3), [((0, 0), (4, 3))], True),
        ((4, 3), [((2, 0), (2, 3)), ((0, 0), (2, 3))], True),
        ((4, 3), [((0, 0), (2, 2)), ((0, 2), (2, 1)), ((2, 0), (2, 3))], True),
        ((4, 3), [((0, 0), (4, 3)), ((4, 0), (0, 3))], True),  # a rank with none
        ((), [((), ())], True),
        ((0,), [((0,), (0,))], True),
        ((4, 3), [((1, 0), (4, 3))], False),
        ((4, 3), [((-1, 0), (4, 3))], False),
        ((4, 3), [((0, 0), (2, 3)), ((0, 0), (2, 3))], False),
        ((4, 3), [((0, 0), (3, 2)), ((0, 1), (3, 2))], False),
        ((4, 3), [((0, 0), (2, 3))], False),
        ((4, 3), [((0,), (12,))], False),
        ((), [((), ()), ((), ())], False),
        ((2**32, 2**32), [((0, 0), (0, 0))], False),
    ],
)
def test_chunks_are_all_of_a_tensor(file: Path, size: Any, chunks: Any, right: bool, tmp_path: Path) -> None:
    metadata = pickle.loads(file.read_bytes())
    entry = metadata.state_dict_metadata["state_dict.w"]
    entry.size = torch.Size(size)
    entry.chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with nullcontext() if right else pytest.raises(ValueError, match="is damaged"):
        read_metadata(tmp_path / ".metadata")
