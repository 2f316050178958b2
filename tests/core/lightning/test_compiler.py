"""Compilations that were killed, in real processes: nobody waits for their locks, and living ones keep theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_tricks.advisor.environment import environment
from lightning_tricks.core.lightning import compiler
from lightning_tricks.core.lightning.compiler import prepare_to_compile, remove_stale_locks, stale_locks
from tests.ranks import run_ranks

COMPILES = """
import sys, time, importlib.util
spec = importlib.util.find_spec("torch").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("file_baton", spec + "/utils/file_baton.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.FileBaton(sys.argv[1]).try_acquire()
print("compiling", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "NETWORK", ())  # whatever disk the tests run on
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def compiling(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock with torch's own class."""
    with subprocess.Popen([sys.executable, "-c", COMPILES, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        yield process
        process.kill()


def test_the_lock_of_a_living_compilation_stays_and_that_of_a_killed_one_is_removed(
    lock: Path, compiling: subprocess.Popen[str]
) -> None:
    remove_stale_locks()
    assert lock.exists()
    assert environment().stale_locks == ()
    compiling.send_signal(signal.SIGKILL)
    compiling.wait()
    assert lock.exists()
    assert environment().stale_locks == (str(lock),)
    with pytest.warns(UserWarning, match=rf"{lock} was left by a compilation that was killed.*removed"):
        prepare_to_compile("cpu_adam")
    assert not lock.exists()
    assert stale_locks() == []


def test_a_file_that_torch_has_not_made_is_no_lock(lock: Path) -> None:
    """torch's own locks are empty files."""
    lock.write_text("of the user")
    assert stale_locks() == []
    remove_stale_locks()
    assert lock.read_text() == "of the user"
    (other := lock.with_name("other")).touch()
    lock.unlink()
    lock.symlink_to(other)
    assert stale_locks() == []
    remove_stale_locks()
    assert other.exists()
    assert lock.is_symlink()


def test_a_compilation_that_ends_while_one_looks_was_not_killed(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(looked_at: Path) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:  # after it was found, and before it is removed
            lock.unlink()
        return False

    looks = 0
    monkeypatch.setattr(compiler, "_is_held", ends)
    lock.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remove_stale_locks()
    assert looks == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("who", ["machine", "user"])
def test_what_is_not_seen_here_may_hold_a_lock(who: str, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "NETWORK", ("",) if who == "machine" else ())
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() if who == "machine" else 12345)
    monkeypatch.setattr(compiler, "QUIET", 2)
    lock.touch()
    begun = time.monotonic()
    with (
        pytest.warns(UserWarning, match="another machine or user compiles"),
        pytest.warns(UserWarning, match="removed"),
    ):
        remove_stale_locks()
    assert time.monotonic() - begun >= 1
    lock.touch()
    os.utime(lock.parent / "lock.check", times=(0, 0))
    os.utime(lock, times=(time.time() - 60,) * 2)
    with pytest.warns(UserWarning, match="removed") as warned:
        remove_stale_locks()
    assert len(warned) == 1


def removes(root: str) -> bool:
    """Whether this rank is the one that removes the lock; then it compiles, and the other must leave its new lock."""
    os.environ["TORCH_EXTENSIONS_DIR"] = root
    compiler.NETWORK = ()
    lock = Path(root, "cpu_adam", "lock")
    with warnings.catch_warnings(record=True) as warned:
        remove_stale_locks()
    if not warned:
        return False
    with lock.open("x"):
        time.sleep(0.5)
        assert lock.exists(), "the other rank removed the lock of a living compilation"
    return True


def test_of_two_ranks_one_removes_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert sorted(run_ranks(removes, str(tmp_path))) == [False, True]


def test_it_says_that_it_compiles_and_only_before_it_does(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        prepare_to_compile("cpu_adam")
        assert "Compiling DeepSpeed's cpu_adam" in caplog.text
        caplog.clear()
        (lock.parent / "cpu_adam.so").touch()
        prepare_to_compile("cpu_adam")
        assert "Compiling" not in caplog.text
