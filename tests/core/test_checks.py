"""Checks accept what is allowed and name the argument, the value and the rule of what is not."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_tricks.core.checks import (
    check_bool,
    check_choice,
    check_count,
    check_duration,
    check_range,
    duration_steps,
)
from lightning_tricks.core.safe_load.damage import damage, unfinished

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "check",
    [
        *(lambda v=v: check_range("x", v, 0.0, 1.0) for v in (0, 1, 0.0, 0.5, 1.0)),
        *(lambda v=v: check_range("x", v, 0.0, 1.0, below=True) for v in (0.0, math.nextafter(1.0, 0.0))),
        *(lambda v=v: check_range("x", v, 0.0) for v in (0, 1e300)),
        *(lambda v=v: check_count("x", v) for v in (1, 2**62)),
        *(lambda v=v: check_bool("x", v) for v in (True, False)),
        lambda: check_choice("x", "ab", {"ab": 1}),
        *(lambda v=v: check_duration("x", v) for v in (0, 1, 10**9, 0.0, 0.5, 1.0)),
    ],
)
def test_what_is_allowed_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "value", "rule"),
    [
        *((lambda v=v: check_range("x", v, 0.0, 1.0), v, "in [0.0, 1.0]") for v in (-0.1, 1.1, NAN, INF, -INF)),
        *((lambda v=v: check_range("x", v, 0.0), v, "in [0.0, inf)") for v in (-1, NAN, INF)),
        (lambda: check_range("x", 1.0, 0.0, 1.0, below=True), 1.0, "in [0.0, 1.0)"),
        *((lambda v=v: check_count("x", v), v, "at least 1") for v in (0, -3)),
    ],
)
def test_a_number_out_of_range_is_a_value_error(check: Callable[[], None], value: float, rule: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(f"x must be {rule}, got {value!r}.") + "$"):
        check()


@pytest.mark.parametrize("value", [True, False, "0.5", None, [0.5], 1j])
def test_what_is_no_number_is_a_type_error(value: object) -> None:
    for check, rule in (
        (lambda: check_range("x", value, 0.0, 1.0), r"x must be a number in \[0.0, 1.0\]"),
        (lambda: check_duration("x", value), r"x must be an int \(optimizer steps\) or a float \(fraction .*\)"),
        (lambda: check_count("x", value), "x must be an integer"),
    ):
        with pytest.raises(TypeError, match=f"^{rule}, got ") as error:
            check()
        assert repr(value) in str(error.value)


def test_a_fraction_is_no_count() -> None:
    with pytest.raises(TypeError, match=r"^steps must be an integer, got 2\.0\.$"):
        check_count("steps", 2.0)


@pytest.mark.parametrize("value", [0, 1, None, "True"])
def test_what_is_not_true_or_false_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=r"^warmup must be True or False, got"):
        check_bool("warmup", value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [("cosin", " Did you mean 'cosine'?"), ("COSINE", " Did you mean 'cosine'?"), ("zzz", ""), (3, "")],
)
def test_an_unknown_choice_names_all_and_the_nearest(value: object, hint: str) -> None:
    with pytest.raises(ValueError, match="must be one of") as error:
        check_choice("curve", value, ("cosine", "linear"))
    assert str(error.value) == f"curve must be one of 'cosine', 'linear', got {value!r}.{hint}"


@pytest.mark.parametrize("value", ["2 epochs", 2.0, {"epochs": 2}])
def test_a_duration_in_epochs_is_refused_with_how_to_write_it(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^warmup .* Epochs are a fraction: 2 of max_epochs=10"):
        check_duration("warmup", value)


@pytest.mark.parametrize("value", [-1, -0.1, 1.5, NAN, INF, -INF])
def test_a_duration_out_of_range_is_a_value_error(value: float) -> None:
    with pytest.raises(ValueError, match=r"^start must be an int >= 0 \(steps\) or a float in \[0, 1\]") as error:
        check_duration("start", value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("value", "steps"), [(0, 0), (7, 7), (500, 500), (0.0, 0), (0.5, 12.5), (1.0, 25), (1, 1), (0.1, 2.5)]
)
def test_an_int_counts_steps_and_a_float_is_a_fraction(value: float, steps: float) -> None:
    assert duration_steps(value, total_steps=25) == steps


def test_a_record_with_a_wrong_checksum_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", b"0123456789")
        file.writestr("b", b"9876543210")
    assert damage(path) is None
    path.write_bytes(path.read_bytes().replace(b"9876543210", b"9876543211"))
    assert damage(path) == "the checksum of b is wrong"
    encrypted = bytearray(path.read_bytes())
    encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(encrypted)
    assert damage(path) == "its records cannot be read (RuntimeError)"
    path.write_bytes(b"no zip file")
    assert damage(path) is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, r"it has neither \.metadata \(FSDP\) nor latest \(ZeRO\)"),
        ({"note.txt": ""}, r"neither \.metadata"),
        ({"__0_0.distcp": ""}, r"it has no \.metadata: saving was interrupted"),
        ({"__0_0.distcp": "", ".metadata": ""}, r"it has no meta\.pt: saving was interrupted"),
        ({"__0_0.distcp": "", "meta.pt": ""}, r"it has no \.metadata: saving was interrupted"),
        ({"checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt": ""}, "it has no latest, which DeepSpeed writes last"),
        ({"latest": "tag"}, "it has no model and optimizer states in 'tag'"),
        ({"latest": "tag", "other/mp_rank_00_model_states.pt": ""}, "it has no model and optimizer states in 'tag'"),
    ],
)
def test_a_folder_that_was_not_finished_is_told_from_a_checkpoint(
    files: dict[str, str], reason: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert re.search(reason, unfinished(tmp_path) or "")


def test_finished_folders(tmp_path: Path) -> None:
    for name in ("fsdp/.metadata", "fsdp/meta.pt", "fsdp/__0_0.distcp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    tag = tmp_path / "zero" / "tag"
    tag.mkdir(parents=True)
    for name in ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        (tag / name).touch()
    (tmp_path / "zero" / "latest").write_text("tag\n")
    assert unfinished(tmp_path / "fsdp") is None
    assert unfinished(tmp_path / "zero") is None
