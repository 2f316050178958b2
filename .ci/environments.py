"""Virtual environments that the tests of one subject have for themselves, and processes in them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTEST = ["-m", "pytest", "-q", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "--tb=short"]


def run(python: Path, *arguments: str | Path, check: bool = True) -> int:
    done = subprocess.run([python, *arguments], cwd=ROOT, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    if check and done.returncode:
        sys.exit(f"error: python {' '.join(map(str, arguments))} ended with {done.returncode}")
    return done.returncode


def pip(python: Path, *what: str) -> None:
    run(python, "-m", "pip", "install", "-q", "--prefer-binary", *what)


def site(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)}))


def made(environment: Path) -> Path:
    """The Python of an environment, which is new if there was none."""
    python = environment / "bin" / "python"
    if not python.exists():
        run(Path(sys.executable), "-m", "venv", environment)
    return python


def versions(python: Path, *names: str) -> dict[str, str]:
    """The versions of installed packages, without what a build adds to them."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    found = subprocess.check_output([python, "-c", code, *names], text=True).split()
    return {name: number.split("+")[0] for name, number in zip(names, found, strict=True)}
