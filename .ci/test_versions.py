"""Run the fast tests with each Python, and the oldest and newest torch, Lightning and libraries that are supported.

Each environment is made in a temporary folder with everything that is written while it works, and removed with it,
on a failure and on Ctrl-C, too. What was found goes to benchmarks/results/versions.json and docs/versions.md.

    python .ci/test_versions.py                                  all combinations whose Python is installed
    python .ci/test_versions.py 3.10:oldest:oldest:oldest        these, as python:lightning:torch:libraries
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Python has it from 3.11 on. Before, pytest brings tomli; pip has one of its own, but what imports pip loses the
# distutils of setuptools.
tomllib = import_module(next(filter(find_spec, ("tomllib", "tomli", "pip._vendor.tomli"))))

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"

COMBINATIONS = [
    "3.10:oldest:oldest:oldest",
    "3.11:oldest:newest:newest",
    "3.12:newest:oldest:newest",
    "3.13:newest:newest:oldest",
    "3.14:newest:newest:newest",
]
COMPROMISED = {"2.6.2", "2.6.3"}  # releases of lightning that must not be installed
LIBRARIES = ("timm", "transformers", "peft", "deepspeed", "torchao")
NEEDS_TORCHVISION = "timm"
REPORTED = ("python", "torch", "lightning", "torchvision", *LIBRARIES, "torchmetrics")


def requirements(extra: str) -> Iterator[str]:
    """What an extra of the package needs, extras that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for each in project["optional-dependencies"][extra]:
        if inner := re.fullmatch(rf"{project['name']}\[(.*)\]", each):
            for name in inner[1].split(","):
                yield from requirements(name)
        else:
            yield each


def oldest(package: str) -> str:
    """The lower limit in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for each in (*project["dependencies"], *requirements("all")):
        if match := re.match(rf"{package}>=([\d.]+)", each):
            return match[1] + ".0" * (2 - match[1].count("."))
    sys.exit(f"error: pyproject.toml has no lower limit of {package}")


def newest(package: str) -> str:
    """The newest release that pip finds."""
    found = subprocess.run([sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True)
    match = re.match(rf"{package} \((\S+)\)", found.stdout)
    if match is None:
        sys.exit(f"error: pip finds no {package}: {found.stderr.strip()}")
    return match[1]


def interpreter(python: str) -> str | None:
    """The command of a Python of this version that can make environments, or None."""
    own = ".".join(map(str, sys.version_info[:2])) == python
    command = sys.executable if own else shutil.which(f"python{python}")
    if command is None or subprocess.run([command, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        return None
    return command


class Environment:
    """A virtual environment in a folder, and processes that leave nothing outside of the folder."""

    def __init__(self, folder: Path, python: str) -> None:
        self.python = str(folder / "env" / "bin" / "python")
        self.variables = {**os.environ, "PATH": f"{folder}/env/bin:{os.environ['PATH']}", "DS_BUILD_OPS": "0"}
        for name in ("TMPDIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            (folder / name).mkdir()
            self.variables[name] = str(folder / name)
        subprocess.run([python, "-m", "venv", str(folder / "env")], check=True)

    def run(self, *arguments: str, check: bool = True) -> int:
        """Run Python in a process group of its own, of which nothing is left behind, whatever ends it."""
        process = subprocess.Popen([self.python, *arguments], env=self.variables, cwd=ROOT, start_new_session=True)
        try:
            if process.wait() and check:
                sys.exit(f"error: python {' '.join(arguments)} ended with {process.returncode}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode

    def install(self, *what: str, check: bool = True) -> bool:
        options = ("-qq", "--disable-pip-version-check", "--no-cache-dir")
        return self.run("-m", "pip", "install", *options, *what, check=check) == 0

    def make(self, lightning: str, torch: str, libraries: str) -> None:
        """The test extra beside exactly these; where torch has no torchvision (yet), that of another torch."""
        pins = [f"lightning=={lightning}", f"pytorch-lightning=={lightning}", f"torch=={torch}"]
        matching = f"torchvision==0.{int(torch.split('.')[1]) + 15}.*"  # 0.24 belongs to torch 2.9, and so on
        self.install(*pins)
        vision = self.install(*pins, matching, check=False)
        if libraries == "oldest":
            pins += [f"{name}=={oldest(name)}" for name in LIBRARIES]
        pins += ["torchao<0.17"] if torch.startswith("2.9.") else []  # later ones import what it does not have
        later = [each for each in (*requirements("test"), *pins) if not vision and each.startswith(NEEDS_TORCHVISION)]
        self.install("--editable", ".", *sorted({*requirements("test"), *pins} - {*later}))
        if not vision:
            self.install("--no-deps", "torchvision", *later)
        self.run(".ci/torchvision_cpu.py")

    def versions(self) -> dict[str, str]:
        """What is really installed; no entry for what is not."""
        listed = subprocess.check_output([self.python, "-m", "pip", "list", "--format=json"], env=self.variables)
        python = subprocess.check_output([self.python, "-c", "import platform; print(platform.python_version())"])
        found = {each["name"]: each["version"] for each in json.loads(listed)} | {"python": python.decode().strip()}
        return {name: found[name] for name in REPORTED if name in found}


def outcome(junit: Path) -> dict[str, Any]:
    """Counts, the names of what failed and why tests were skipped, of a report that pytest has written."""
    cases = list(ET.parse(junit).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [skip for case in cases if (skip := case.find("skipped")) is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "failed": len(failed),
        "skipped": len(skipped),
        "failures": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        "skips": dict(sorted(Counter(skip.get("message", "") for skip in skipped).items())),
    }


def parsed(combination: str) -> tuple[str, str, str, str, str]:
    """Python's version and command, the versions of Lightning and torch, and which libraries."""
    if not re.fullmatch(r"([^:]+:){3}(oldest|newest)", combination):
        sys.exit(
            "error: a combination is python:lightning:torch:libraries, the last of them oldest or newest, such as"
            f" {COMBINATIONS[0]}, got {combination}"
        )
    python, lightning, torch, libraries = combination.split(":")
    named = {"oldest": oldest, "newest": newest}
    lightning, torch = (
        named[version](package) if version in named else version
        for package, version in (("lightning", lightning), ("torch", torch))
    )
    if lightning in COMPROMISED:
        sys.exit(f"error: lightning {lightning} is a compromised release and is not installed, got {combination}")
    if (command := interpreter(python)) is None:
        sys.exit(f"error: there is no python{python} with the modules ensurepip and venv, got {combination}")
    return python, command, lightning, torch, libraries


def measure(combination: str) -> dict[str, Any]:
    """The outcome of the fast tests with ``python:lightning:torch:libraries``."""
    python, command, lightning, torch, libraries = parsed(combination)
    with tempfile.TemporaryDirectory(prefix="versions-", ignore_cleanup_errors=True) as name:
        environment, report = Environment(Path(name), command), Path(name) / "junit.xml"
        print(f"Python {python}, lightning {lightning}, torch {torch}: installing in {name}", flush=True)
        environment.make(lightning, torch, libraries)
        print(environment.versions(), flush=True)
        environment.run("-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", f"--junitxml={report}", check=False)
        return {"versions": environment.versions(), **outcome(report)}


def record(result: dict[str, Any]) -> None:
    """Put a result into the committed file, in place of an older one of the same versions, and write the page."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [row for row in rows if key(row) != key(result)]
    RESULTS.write_text(json.dumps(sorted([*rows, result], key=key), indent=2) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def key(row: dict[str, Any]) -> list[list[int]]:
    """The versions that tell a row from others, by which rows are sorted."""
    versions = row["versions"] | {"python": row["versions"]["python"].rsplit(".", 1)[0]}
    return [[*map(int, re.findall(r"\d+", versions[name])[:3])] for name in ("python", "lightning", "torch", "timm")]


def page(rows: list[dict[str, Any]]) -> str:
    """docs/versions.md."""
    lines = [
        "# Versions",
        "",
        "The fast tests with Python 3.10 to 3.14, and the oldest and newest torch, Lightning and optional libraries:",
        "`make test-versions` makes each environment, runs them and writes this page from",
        "`benchmarks/results/versions.json`. A Python that is not installed is named and left out.",
        '`make test-versions ONLY="3.10:oldest:oldest:oldest 3.12:2.6.6:2.13.0:newest"` runs some (as',
        "`python:lightning:torch:libraries`). The oldest are the lower limits in `pyproject.toml`.",
        "",
        "torch 2.9 is the oldest that is supported: FSDP2 on CPU, with which sharding is tested, does not run in 2.6,",
        "and sums gradients that it should average in 2.7 and 2.8. A torch without a torchvision (yet) is tested with",
        "that of another torch, for timm: its operators are declared, not there. torch 2.9 needs `torchao<0.17`: later",
        "ones import what it does not have, and transformers imports them. peft 0.18 needs `torchao<0.18`.",
        "",
        "| " + " | ".join([*REPORTED, "passed", "failed", "skipped"]) + " |",
        "|---" * (len(REPORTED) + 3) + "|",
    ]
    if not rows:
        lines[-2:] = ["No combination has been recorded yet."]
    for row in rows:
        versions = [row["versions"].get(name, "none") for name in REPORTED]
        counts = [str(row[name]) for name in ("passed", "failed", "skipped")]
        lines.append("| " + " | ".join([*versions, *counts]) + " |")
    for row in rows:
        python, lightning, torch = (row["versions"][name] for name in ("python", "lightning", "torch"))
        lines += ["", f"## Python {python}, lightning {lightning}, torch {torch}", ""]
        lines += [f"- failed: `{name}`" for name in row["failures"]] or ["- nothing failed"]
        lines += [f"- skipped {count}: {reason}" for reason, count in row["skips"].items()]
    return "\n".join(lines) + "\n"


def stopped(*_: Any) -> None:
    """At SIGTERM: an exception, so that what was begun is removed."""
    sys.exit("error: terminated")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stopped)
    missing = [each for each in COMBINATIONS if interpreter(each.split(":")[0]) is None] if len(sys.argv) == 1 else []
    if missing:
        print("left out, since there is no such Python with the modules ensurepip and venv:", *missing, flush=True)
    chosen = sys.argv[1:] or [each for each in COMBINATIONS if each not in missing]
    for combination in chosen:  # before the first of them takes its time
        parsed(combination)
    results = []
    for combination in chosen:
        results.append(measure(combination))
        record(results[-1])
    sys.exit(any(result["failed"] for result in results))
