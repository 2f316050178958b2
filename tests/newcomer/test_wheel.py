"""sdist and wheel: what is in them, what PyPI says of them, a fit with torch and the wheel alone; each extra alone.

Two minutes, and one or two more for each extra, most of them pip's.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_tricks import __version__
from tests.test_release import PROJECT

ROOT = Path(__file__).parents[2]
PACKAGES = {"lightning_tricks", "lightning_tricks_cli", "pytorch_lightning_tricks"}
DEMO = "lightning.pytorch.demos.boring_classes"
RAY = """
import lightning_tricks as lt
import ray
from lightning.pytorch.demos.boring_classes import BoringModel
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

def train():
    lt.ray_trainer("ddp_bf16", max_epochs=1, logger=False).fit(BoringModel())

ray.init(num_cpus=2, include_dashboard=False)
assert TorchTrainer(train, scaling_config=ScalingConfig(num_workers=1)).fit().error is None
"""
# What runs with an extra alone, or with those that a page asks for together: pages of docs/ and commands.
EXTRAS = {
    "pytorch-lightning": ["coming_from"],
    "plot": ["tricks/PostHocEMA", "tricks/LRSchedule", "tricks/find_lr"],
    "cli": [
        "lightning-tricks tricks EMA",
        "lightning-tricks memory 7B --strategy zero3_offload_bf16 --devices 8",
        "lightning-tricks completion fish",
        f"lightning-tricks fit --model {DEMO}.DemoModel --data {DEMO}.BoringDataModule --trainer.callbacks+=EMA"
        " --trainer.max_epochs 1 --trainer.accelerator cpu --trainer.logger false",
    ],
    "demo": ["README", "tricks/compare", "lightning-tricks demo --seeds 1 --epochs 1 --output demo"],
    "vision": ["tricks/Distill", "tricks/add_stochastic_depth", "speed"],
    "text": ["data", "losses", "recipes"],
    "optimizers": ["tricks/ScheduleFree", "tricks/optimizer", "optimizers", "integrations/fabric"],
    "8bit": ["tricks/QAT", "quantization"],
    "lora": ["tricks/LoRA"],
    "lora,8bit": ["lora"],
    "text,lora,8bit,vision": ["transfer"],
    "evaluation": ["tricks/cross_validate", "tricks/LabelErrors", "evaluation", "contrastive"],
    "pretrained": ["python benchmarks/finetune.py --reduced"],
    "deepspeed": ["choose", "scaling", "why_different"],
    "deepspeed,text": ["strategies"],
    "ray": [f"python -c {shlex.quote(RAY)}"],
    "notebooks": ["integrations/jupyter"],
    "notebooks,cli": ["python repository/.ci/notebooks.py 1_quick_start"],
    "bench": ["python benchmarks/run.py --reduced ema", "your_own_ema"],
    "docs": ["python -m mkdocs build --strict --config-file repository/mkdocs.yml --site-dir ../site"],
}
UNIONS = {"all", "test", "dev", "pages"}  # of others, and of what tests need


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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def alone(built: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with torch and the wheel."""
    folder = tmp_path_factory.mktemp("alone") / "env"
    pip = [made(folder), "-m", "pip", "install", "-q"]
    (wheel,) = built.glob("*.whl")
    subprocess.run([*pip, "--no-index", "--no-deps", "torch>=2.9"], env=environment)  # a machine's own, for CPUs
    run(*pip, wheel, folder=folder, environment=environment)
    return folder


@pytest.mark.slow
def test_with_torch_and_the_wheel_alone_it_trains(alone: Path, environment: dict[str, str], tmp_path: Path) -> None:
    python, command = alone / "bin" / "python", alone / "bin" / "lightning-tricks"
    told = run(python, ROOT / "tests" / "newcomer" / "wheel.py", folder=tmp_path, environment=environment)
    assert "the wheel works" in told
    version = run(command, "--version", folder=tmp_path, environment=environment)
    assert version == f"lightning-tricks {__version__}\n"


def test_no_extra_is_left_out() -> None:
    assert {extra for extras in EXTRAS for extra in extras.split(",")} == {
        *PROJECT["project"]["optional-dependencies"]
    } - UNIONS


@pytest.mark.slow
@pytest.mark.parametrize("extras", EXTRAS)
def test_an_extra_alone_is_all_that_its_pages_need(
    extras: str, alone: Path, built: Path, clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    shutil.copytree(alone, tmp_path / "env", copy_function=os.link, symlinks=True)  # torch fills no disk twice
    (wheel,) = built.glob("*.whl")
    torch = run(python, "-c", "import torch; print(torch.__version__)", folder=tmp_path, environment=environment)
    (tmp_path / "torch.txt").write_text(f"torch=={torch}")
    environment = {**environment, "PYTHONPATH": str(tmp_path), "DS_BUILD_OPS": "0", "LIGHTNING_TRICKS_FAST": "1"}
    pip = (python, "-m", "pip", "install", "-q", "--constraint", "torch.txt")
    run(*pip, f"lightning-tricks[{extras}] @ {wheel.as_uri()}", folder=tmp_path, environment=environment)
    if next((tmp_path / "env" / "lib").glob("*/site-packages/torchvision"), None):
        run(python, ROOT / ".ci" / "torchvision_cpu.py", folder=tmp_path, environment=environment)
    for name, source in {"tests": ROOT / "tests", "benchmarks": clone / "benchmarks"}.items():
        (tmp_path / name).symlink_to(source)
    for each in EXTRAS[extras]:
        words = shlex.split(each.replace("repository", str(clone)))
        if words[0] == "lightning-tricks":
            words = ["python", "-m", "lightning_tricks_cli.main", *words[1:]]
        elif words[0] != "python":
            page = ROOT / "README.md" if each == "README" else ROOT / "docs" / f"{each}.md"
            words = ["python", "-m", "tests.newcomer.page", str(page)]
        run(python, *words[1:], folder=tmp_path, environment=environment)
