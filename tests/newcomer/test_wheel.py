"""sdist and wheel: what is in them, what PyPI says of them, and a fit with torch and the wheel alone; two minutes."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_tricks import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = {"lightning_tricks", "lightning_tricks_cli", "pytorch_lightning_tricks"}
pytestmark = pytest.mark.slow


def made(folder: Path) -> Path:
    """The Python of a new environment."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def run(*command: str | Path, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(clone: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, the wheel built from the sdist; and twine's word that PyPI can show the description."""
    folder = tmp_path_factory.mktemp("built")
    python = made(folder / "tools")
    run(python, "-m", "pip", "install", "-q", "build", "twine", folder=folder, environment=environment)
    run(python, "-m", "build", "--outdir", folder / "dist", clone, folder=folder, environment=environment)
    checked = run(
        *(python, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir()),
        folder=folder,
        environment=environment,
    )
    assert checked.count("PASSED") == 2
    return folder / "dist"


def test_they_hold_what_they_should(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"lightning_tricks-{__version__}.dist-info"}
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert sources <= {*names}
    assert wheel.stat().st_size < 2_500_000
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", ".ci/stubs.py"} <= inside
    metadata = zipfile.ZipFile(wheel).read(f"lightning_tricks-{__version__}.dist-info/METADATA").decode()
    assert f"/blob/v{__version__}/docs/tricks/EMA.md" in metadata
    assert "](docs/" not in metadata


def test_with_torch_and_the_wheel_alone_it_trains(built: Path, environment: dict[str, str], tmp_path: Path) -> None:
    python = made(tmp_path / "env")
    (wheel,) = built.glob("*.whl")
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "--no-index", "--no-deps", "torch>=2.9"], env=environment)  # a machine's own, for CPUs
    run(*pip, wheel, folder=tmp_path, environment=environment)
    told = run(python, ROOT / "tests" / "newcomer" / "wheel.py", folder=tmp_path, environment=environment)
    assert "the wheel works" in told
    version = run(tmp_path / "env" / "bin" / "lightning-tricks", "--version", folder=tmp_path, environment=environment)
    assert version == f"lightning-tricks {__version__}\n"
