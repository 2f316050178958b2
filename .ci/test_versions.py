"""Run the fast tests against the oldest and the newest Lightning and torch, one new environment after the other.

Each environment is made in a temporary folder with everything that is written while it works, and removed with it,
on a failure and on Ctrl-C, too. What was found goes to benchmarks/results/versions.json and docs/versions.md.

    python .ci/test_versions.py                         all combinations
    python .ci/test_versions.py 2.6.0:2.9.0 newest:newest    these, as lightning:torch
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"

OLDEST_LIGHTNING, OLDEST_TORCH = "2.6.0", "2.9.0"
COMBINATIONS = [
    f"{lightning}:{torch}" for lightning in (OLDEST_LIGHTNING, "newest") for torch in (OLDEST_TORCH, "newest")
]
COMPROMISED = {"2.6.2", "2.6.3"}  # releases of lightning that must not be installed
NEEDS_TORCHVISION = {"timm"}
REPORTED = ("python", "torch", "lightning", "torchvision", "timm", "transformers", "deepspeed", "torchmetrics")


def newest(package: str) -> str:
    """The newest release that pip finds."""
    found = subprocess.run([sys.executable, "-m", "pip", "index", "versions", package], capture_output=True, text=True)
    match = re.match(rf"{package} \((\S+)\)", found.stdout)
    if match is None:
        sys.exit(f"error: pip finds no {package}: {found.stderr.strip()}")
    return match[1]


def requirements(extra: str) -> Iterator[str]:
    """What an extra of the package needs, extras that it names included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for each in project["optional-dependencies"][extra]:
        if inner := re.fullmatch(rf"{project['name']}\[(.*)\]", each):
            for name in inner[1].split(","):
                yield from requirements(name)
        else:
            yield each


class Environment:
    """A virtual environment in a folder, and processes that leave nothing outside of the folder."""

    def __init__(self, folder: Path) -> None:
        self.python = str(folder / "env" / "bin" / "python")
        self.variables = {**os.environ, "PATH": f"{folder}/env/bin:{os.environ['PATH']}", "DS_BUILD_OPS": "0"}
        for name in ("TMPDIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            (folder / name).mkdir()
            self.variables[name] = str(folder / name)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)

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

    def make(self, lightning: str, torch: str) -> None:
        """The test extra beside exactly these; where torch has no torchvision (yet), that of another torch."""
        pins = [f"lightning=={lightning}", f"pytorch-lightning=={lightning}", f"torch=={torch}"]
        self.install(*pins)
        matching = f"torchvision==0.{int(torch.split('.')[1]) + 15}.*"  # 0.21 belongs to torch 2.6, and so on
        vision = self.install(*pins, matching, check=False)
        test = sorted({each for each in requirements("test") if vision or each not in NEEDS_TORCHVISION})
        pins += ["torchao<0.17"] if torch.startswith("2.9.") else []  # later ones import what it does not have
        self.install("--editable", ".", *pins, *test)
        if not vision:
            self.install("--no-deps", "torchvision", *NEEDS_TORCHVISION)
        self.run(".ci/torchvision_cpu.py")

    def versions(self) -> dict[str, str]:
        """What is really installed; no entry for what is not."""
        listed = subprocess.check_output([self.python, "-m", "pip", "list", "--format=json"], env=self.variables)
        found = {each["name"]: each["version"] for each in json.loads(listed)} | {"python": platform.python_version()}
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


def measure(combination: str) -> dict[str, Any]:
    lightning, torch = (
        newest(package) if version == "newest" else version
        for package, version in zip(("lightning", "torch"), combination.split(":"), strict=True)
    )
    if lightning in COMPROMISED:
        sys.exit(f"error: lightning {lightning} is a compromised release and is not installed, got {combination}")
    with tempfile.TemporaryDirectory(prefix="versions-", ignore_cleanup_errors=True) as name:
        environment, report = Environment(Path(name)), Path(name) / "junit.xml"
        print(f"lightning {lightning}, torch {torch}: installing in {name}", flush=True)
        environment.make(lightning, torch)
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
    return [[*map(int, re.findall(r"\d+", row["versions"][name])[:3])] for name in ("lightning", "torch")]


def page(rows: list[dict[str, Any]]) -> str:
    """docs/versions.md."""
    lines = [
        "# Versions",
        "",
        "The fast tests against the oldest and the newest Lightning and torch: `make test-versions` makes each",
        "environment, runs them and writes this page from `benchmarks/results/versions.json`;",
        '`make test-versions ONLY="2.6.0:2.9.0 newest:newest"` runs some (as `lightning:torch`).',
        "",
        "torch 2.9 is the oldest that is supported: FSDP2 on CPU, with which sharding is tested, does not run in 2.6,",
        "and sums gradients that it should average in 2.7 and 2.8. A torch without a torchvision (yet) is tested with",
        "that of another torch, for timm: its operators are declared, not there. torch 2.9 needs `torchao<0.17`: later",
        "ones import what it does not have, and transformers imports them.",
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
        lines += ["", f"## lightning {row['versions']['lightning']}, torch {row['versions']['torch']}", ""]
        lines += [f"- failed: `{name}`" for name in row["failures"]] or ["- nothing failed"]
        lines += [f"- skipped {count}: {reason}" for reason, count in row["skips"].items()]
    return "\n".join(lines) + "\n"


def stopped(*_: Any) -> None:
    """At SIGTERM: an exception, so that what was begun is removed."""
    sys.exit("error: terminated")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stopped)
    results = []
    for combination in sys.argv[1:] or COMBINATIONS:
        results.append(measure(combination))
        record(results[-1])
    sys.exit(any(result["failed"] for result in results))
