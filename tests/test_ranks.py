"""The harness itself: real processes, their values, their errors and their end."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.nets import PlainNet, build, fit
from tests.ranks import run_cases, run_ranks


def where(word: str) -> tuple[str, int, int, int]:
    run = fit(build(PlainNet), strategy="ddp", devices=2, max_epochs=1)
    return word, run.global_rank, run.world_size, os.getpid()


def test_each_rank_is_a_process_of_one_world() -> None:
    first, second = run_ranks(where, "hello")
    assert (first[:3], second[:3]) == (("hello", 0, 2), ("hello", 1, 2))
    assert len({first[3], second[3], os.getpid()}) == 3


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}


def test_the_variables_are_torchruns_and_the_parents_stay() -> None:
    before = dict(os.environ)
    ranks = run_ranks(variables, nprocs=3)
    assert [rank["RANK"] for rank in ranks] == [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"3"}
    assert dict(os.environ) == before


def tensor() -> Tensor:
    return torch.arange(3)


def test_tensors_come_back() -> None:
    for value in run_ranks(tensor):
        assert torch.equal(value, torch.arange(3))


def fail_on_the_second() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("only here")


def test_a_failure_comes_with_its_rank_and_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^rank 1:\nTraceback .*in fail_on_the_second.*ValueError: only here"):
        run_ranks(fail_on_the_second)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_noticed() -> None:
    with pytest.raises(AssertionError, match="rank 0:\ndied with exit code -9"):
        run_ranks(die, nprocs=1)


def hang() -> None:
    time.sleep(600)


def test_a_rank_that_hangs_is_killed_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0:\nno answer in time"):
        run_ranks(hang, nprocs=1, timeout=1)
    assert time.monotonic() - start < 30


def waiting_for_another() -> None:
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        dist.barrier()
    else:
        raise ValueError("gone")


def test_a_rank_that_waits_for_a_failed_one_does_not_hang() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: gone"):
        run_ranks(waiting_for_another)


def of_a_case(case: str, folder: str) -> tuple[str, int]:
    if os.environ["RANK"] == "0" and case.startswith("fails"):
        raise ValueError(case)
    if case == "dies":
        die()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()
    return f"{case} {folder}", os.getpid()


def test_cases_share_their_processes() -> None:
    cases = run_cases(of_a_case, ["a", "b"], "x")
    assert [[name for name, _ in cases[case]] for case in "ab"] == [["a x", "a x"], ["b x", "b x"]]
    assert [process for _, process in cases["a"]] == [process for _, process in cases["b"]]


def test_a_case_that_fails_hides_no_other() -> None:
    cases = run_cases(of_a_case, ["a", "fails 1", "b", "fails 2", "c"], "x")
    for case in "abc":
        assert [name for name, _ in cases[case]] == [f"{case} x"] * 2
    for case in ("fails 1", "fails 2"):
        with pytest.raises(AssertionError, match=rf"(?s)^rank 0:\nTraceback .*ValueError: {case}"):
            cases[case]


def test_nor_does_one_that_dies() -> None:
    cases = run_cases(of_a_case, ["a", "dies", "b"], "x")
    assert cases["a"][0][0] == "a x"
    assert cases["b"][1][0] == "b x"
    with pytest.raises(AssertionError, match="rank 1:\ndied with exit code -9"):
        cases["dies"]
