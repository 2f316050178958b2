"""`make gpu`: all that has to run on a GPU is in it, each part ends, and what was killed goes on and is told."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import printed, run_alone

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "gpu.py"
WHERE = {"device": "a card", "python": "3.12", "torch": "2.11"}


@pytest.fixture(scope="module")
def script() -> Any:
    return runpy.run_path(str(SCRIPT))


def work(script: Any, folder: Path, command: list[str], *, benchmark: bool = False, seconds: float = 60) -> bool:
    (folder / "scratch").mkdir(exist_ok=True)
    part = script["Slice"]("part", command, benchmark)
    return script["work"](part, WHERE, folder, time.monotonic() + seconds, whole=benchmark)


def outcomes(folder: Path) -> dict[str, str]:
    """The outcomes of the units and their reasons."""
    (known,) = json.loads((folder / "gpu.json").read_text()).values()
    assert known["where"] == WHERE
    units = known["units"].items()
    return {unit: " ".join(filter(None, (of.get("outcome"), of.get("why")))) for unit, of in units}


def pytests(folder: Path, text: str) -> list[str]:
    """The command that runs a file of tests, whose processes leave their numbers in another file."""
    (folder / "test_part.py").write_text(f"import os, signal, time\nimport pytest\nFOLDER = {str(folder)!r}\n{text}")
    options = [
        "-p",
        "tests.device.record",
        "--record",
        str(folder / "gpu.json"),
        "--slice",
        "part",
        "--missing",
        "a_peer",
    ]
    options += ["--rootdir", str(folder), "-c", os.devnull, "-p", "no:cacheprovider", "-q"]
    return ["-m", "pytest", *options, str(folder / "test_part.py")]


# -- what runs --------------------------------------------------------------------------------------------------------


def collected() -> set[str]:
    os.chdir(ROOT)
    with redirect_stdout(StringIO()) as shown:
        pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--assert=plain", "tests"])
    return set(re.findall(r"^(tests/\S*\.py)::", shown.getvalue(), re.MULTILINE))


@pytest.mark.slow
def test_every_file_with_tests_for_a_gpu_is_a_slice(script: Any) -> None:
    assert sorted(f"tests/{name}.py" for name in script["TESTS"]) == sorted(run_alone(collected))


def test_every_benchmark_is_a_slice_or_measures_no_device(script: Any) -> None:
    names = [*script["BENCHMARKS"], *script["ON_THE_CPU"]]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "benchmarks" / "cost").glob("*.py"))
    assert sorted(script["LARGER"]) == sorted(path.stem for path in (ROOT / "benchmarks" / "gpu").glob("[!_]*.py"))


def test_names_are_those_of_slices(script: Any, tmp_path: Path) -> None:
    known = script["slices"](tmp_path, simulate=False)
    assert next(iter(known)) == "tests/callbacks/test_compile.py"
    assert all(Path(ROOT, name).exists() for name in known if name.startswith("tests/"))
    done = subprocess.run([sys.executable, SCRIPT, "--simulate", "tests/none.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no tests/none.py; there are tests/callbacks/test_compile.py, " in done.stderr


def test_what_is_missing_is_named_before_anything_runs() -> None:
    done = subprocess.run([sys.executable, "-S", SCRIPT, "--simulate"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "has no torch, torchmetrics, tqdm, typing_extensions, lightning or pytorch_lightning: nothing can run without\n"
    )


def test_what_can_be_left_out_is_named_and_the_rest_runs(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    where = script["checked"](simulate=True)
    assert "left out and says so: pytest, deepspeed\n" in capsys.readouterr().out
    assert where["device"] == "simulated"
    assert where.keys() >= {"python", "torch", "lightning"}
    assert list(script["slices"](tmp_path, simulate=True)) == [
        f"{name}-reduced" for name in (*script["BENCHMARKS"], *script["LARGER"])
    ]


def test_without_a_gpu_the_dry_run_is_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["checked"].__globals__, "DEVICE", "print()")
    with pytest.raises(SystemExit, match="torch finds no CUDA device; --simulate runs everything without one"):
        script["checked"](simulate=False)


# -- how it ends ------------------------------------------------------------------------------------------------------

TESTS = """
def test_good():
    pass

def test_bad():
    raise ValueError("no\\nmore")

@pytest.mark.skip(reason="not today")
def test_left_out():
    pass

def test_that_needs_a_peer():
    raise ModuleNotFoundError("Foo needs a_peer: pip install 'a[b]'")

def test_that_needs_another():
    import another

def test_that_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_behind_it():
    pass
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_behind_the_test_that_killed_it_twice(script: Any, tmp_path: Path) -> None:
    assert work(script, tmp_path, pytests(tmp_path, TESTS))
    assert outcomes(tmp_path) == {
        "test_good": "passed",
        "test_bad": "failed ValueError: no more",
        "test_left_out": "skipped not today",
        "test_that_needs_a_peer": "skipped ModuleNotFoundError: Foo needs a_peer: pip install 'a[b]'",
        "test_that_needs_another": "failed ModuleNotFoundError: No module named 'another'",
        "test_that_is_killed": "failed 2 times without an end, at last exit code -9",
        "test_behind_it": "passed",
    }


DEVICE_ERROR = """
@pytest.mark.parametrize("number", range(3))
def test_it(number):
    with open(f"{FOLDER}/processes", "a") as file:
        print(os.getpid(), file=file)
    if number == 1:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


@pytest.mark.slow
def test_what_comes_after_an_error_of_the_device_has_another_process(script: Any, tmp_path: Path) -> None:
    assert work(script, tmp_path, pytests(tmp_path, DEVICE_ERROR))
    assert [why.split()[0] for why in outcomes(tmp_path).values()] == ["passed", "failed", "passed"]
    first, second, third = (tmp_path / "processes").read_text().split()
    assert first == second != third


@pytest.mark.slow
def test_a_test_without_an_end_is_killed(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script["work"].__globals__, "PATIENCE", 2)
    text = "def test_it():\n    time.sleep(600)\n\ndef test_behind_it():\n    pass"
    assert work(script, tmp_path, pytests(tmp_path, text))
    assert outcomes(tmp_path) == {
        "test_it": "failed 2 times without an end, at last killed after 2 s without news",
        "test_behind_it": "passed",
    }


ONCE = """
def test_first():
    with open(f"{FOLDER}/first", "x"):
        pass

def test_second():
    if not os.path.exists(f"{FOLDER}/go"):
        time.sleep(600)
"""


@pytest.mark.slow
def test_the_next_call_goes_on_where_the_time_was_over(script: Any, tmp_path: Path) -> None:
    command = pytests(tmp_path, ONCE)
    for _ in range(2):  # no try is counted
        assert not work(script, tmp_path, command, seconds=3)
    assert not outcomes(tmp_path).get("test_second")
    (tmp_path / "go").touch()
    assert work(script, tmp_path, command)
    assert outcomes(tmp_path) == {"test_first": "passed", "test_second": "passed"}


@pytest.mark.slow
def test_a_file_that_cannot_be_loaded_is_tried_once(script: Any, tmp_path: Path) -> None:
    assert work(script, tmp_path, pytests(tmp_path, "import nothing_of_the_kind"))
    assert outcomes(tmp_path) == {"the file": "failed ModuleNotFoundError: No module named 'nothing_of_the_kind'"}


def test_a_process_that_comes_to_no_test_is_tried_twice(script: Any, tmp_path: Path) -> None:
    assert work(script, tmp_path, ["-c", "raise SystemExit(7)"])
    assert outcomes(tmp_path) == {"the process": "failed 2 times without an end, at last exit code 7"}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('|a|1|'); print('(3 s)')", "passed"),
        ("print('|a|1|'); print('|b|skipped: no memory|')", "passed skipped: no memory"),
        ("import sys; print('|b|failed: ValueError: no|'); sys.exit('failed: b')", "failed failed: ValueError: no"),
        ("import sys; print('a'); sys.exit('The peers are missing.')", "failed The peers are missing."),
        ("import os; os.kill(os.getpid(), 9)", "failed nothing"),
    ],
)
def test_a_benchmark_says_why_it_has_no_figures(code: str, outcome: str, script: Any, tmp_path: Path) -> None:
    assert work(script, tmp_path, ["-c", code], benchmark=True)
    assert outcomes(tmp_path) == {"part": outcome}


def test_a_benchmark_that_takes_longer_than_two_calls_has_failed(script: Any, tmp_path: Path) -> None:
    command = ["-c", "import time; time.sleep(600)"]
    assert not work(script, tmp_path, command, benchmark=True, seconds=0.5)
    assert work(script, tmp_path, command, benchmark=True, seconds=0.5)
    assert outcomes(tmp_path)["part"].startswith("failed 2 times without an end")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """It is terminated while a process of a slice has started another."""
    waits = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)', FOLDER])"
    waits = waits.replace("FOLDER", repr(str(tmp_path)))
    code = f"""
import runpy, signal, time
from pathlib import Path
script = runpy.run_path({str(SCRIPT)!r})
signal.signal(signal.SIGTERM, script["stopped"])
script["work"](script["Slice"]("part", ["-c", {waits!r}]), {{}}, Path({str(tmp_path)!r}), time.monotonic() + 600, True)
"""
    (tmp_path / "scratch").mkdir()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(running(tmp_path)) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    while running(tmp_path):  # killed, and not gone at once on a busy machine
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(folder: Path) -> list[str]:
    listed = subprocess.check_output(["ps", "-wweo", "args"], text=True).splitlines()
    return [line for line in listed if str(folder) in line]


# -- what is told -----------------------------------------------------------------------------------------------------


def test_the_page_is_made_of_the_record(script: Any) -> None:
    path = script["RESULTS"] / "gpu.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    assert script["PAGE"].read_text() == script["page"](record)
    assert (script["NOTHING"] in script["PAGE"].read_text()) == (not record)


def test_a_page_says_what_ran_where(script: Any) -> None:
    units = {
        "test_a": {"tries": 1, "outcome": "passed", "seconds": 1.0},
        "test_b": {"tries": 2, "outcome": "failed", "seconds": 2.0, "why": "`a` | b"},
        "test_c": {"tries": 1, "outcome": "skipped", "seconds": 0.0, "why": "needs 2 CUDA devices"},
        "test_d": {"tries": 1},
    }
    tests = {"done": False, "where": WHERE, "seconds": 9, "units": units, "warnings": {"UserWarning: slow": 2}}
    ema = {"tries": 1, "outcome": "passed", "seconds": 3.0, "why": "failed: no peer"}
    bench = {"done": True, "where": {"device": "another"}, "seconds": 4, "units": {"ema": ema}, "warnings": {}}
    lines = script["page"]({"tests/core/test_device.py": tests, "ema": bench}).splitlines()
    assert script["NOTHING"] not in lines
    for line in (
        "|`tests/core/test_device.py` (not complete)|1|1|1|9|1|",
        "|`ema`|1|0|0|4|2|",
        "1. device a card, python 3.12, torch 2.11",
        "2. device another",
        "- `tests/core/test_device.py` `test_b`: `'a' | b`",
        "- `ema`: `failed: no peer`",
        "- 1: `needs 2 CUDA devices`",
        "- 2: `UserWarning: slow`",
    ):
        assert line in lines


# -- the other Lightning ----------------------------------------------------------------------------------------------

RENAMED = """
import runpy, sys
sys.argv = ["renamed.py", {0!r}]
runpy.run_path({1!r}, run_name="__main__")
"""


def test_a_script_has_the_other_name_of_lightning(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("import lightning as L\nNAME = L.__name__\n")
    (tmp_path / "script.py").write_text("import beside\n\ndef main():\n    print(beside.NAME)\n")
    program = RENAMED.format(str(tmp_path / "script.py"), str(ROOT / ".ci" / "renamed.py"))
    assert run_alone(printed, program) == "pytorch_lightning\n"


@pytest.mark.slow
@pytest.mark.parametrize("namespace", ["lightning", "pytorch-lightning"])
def test_the_dry_run(namespace: str, tmp_path: Path) -> None:
    """Of a file and a benchmark, whose processes have both Lightnings, or cannot import the usual one."""
    variables = dict(os.environ)
    if namespace == "pytorch-lightning":
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['lightning'] = None\n")
        variables["PYTHONPATH"] = str(tmp_path)
    names = ["tests/callbacks/test_auto_clip.py", "tests/strategies/test_single.py", "data_wait-reduced"]
    committed = {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks" / "results").rglob("*.json")}
    command = [sys.executable, SCRIPT, "--simulate", "--folder", tmp_path / "record", *names]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record" / "gpu.json").read_text())
    assert list(record) == names
    for known in record.values():
        assert known["done"]
        assert known["where"]["device"] == "simulated"
        assert {of["outcome"] for of in known["units"].values()} == {"passed"}
    figures = json.loads((tmp_path / "record" / "scratch" / "data_wait.json").read_text())
    assert namespace in figures["machine"]
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks" / "results").rglob("*.json")} == committed
