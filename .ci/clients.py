"""Run the tests of ``tests/clients``: the tricks in other projects' models, each project in an environment of its own.

The environments are in .venv-clients/ and are kept. What is large and the same for all (torch, Lightning, this package)
is installed once, in .venv-clients/shared, which the others read. What was found goes to
benchmarks/results/clients.json and docs/clients.md.

    python .ci/clients.py               all projects
    python .ci/clients.py chemprop timm these
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / ".ci")]
import clients  # noqa: E402  # needs the standard library alone, as this file does
from environments import PYTEST, made, pip, run, site, versions  # noqa: E402

FOLDER = ROOT / ".venv-clients"
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"

PROJECTS = {  # what is imported, and what is installed
    "chemprop": ["chemprop"],
    "darts": ["darts"],
    "neuralforecast": ["neuralforecast"],
    "pytorch_forecasting": ["pytorch-forecasting"],
    "scvi": ["scvi-tools"],
    "segmentation_models_pytorch": ["segmentation-models-pytorch"],
    "timm": ["timm"],
    "torch_geometric": ["torch_geometric"],
    "torchgeo": ["torchgeo", "requests"],  # which it imports and does not ask for
    "transformers": ["transformers"],
}
SHARED = [
    *("lightning", "pytorch-lightning", "torchmetrics", "pytest", "matplotlib", "pandas", "scikit-learn", "pillow"),
    *("torchao", "--editable", ".[lora,optimizers]"),  # this package, with what LoRA, QAT and optimizer() need
]
REPORTED = ("torch", "lightning", "pytorch-lightning")


def constraints() -> list[str]:
    """The torch of .venv, and no release of Lightning that was compromised."""
    path, pins = FOLDER / "constraints.txt", ROOT / ".venv" / "torch.txt"
    torch = pins.read_text().strip().split("+")[0] if pins.exists() else "torch>=2.9"
    path.write_text(f"{torch}\nlightning!=2.6.2,!=2.6.3\npytorch-lightning!=2.6.2,!=2.6.3\n")
    return ["--constraint", str(path)]


def shared() -> Path:
    """The site-packages that all projects read."""
    environment, stamp = FOLDER / "shared", FOLDER / "shared" / ".made"
    python = made(environment)
    if not stamp.exists():
        print("installing what the projects share", flush=True)
        pip(python, *constraints(), "torch")
        version = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True)
        matching = f"torchvision==0.{int(version.split('.')[1]) + 15}.*"  # 0.24 belongs to torch 2.9, and so on
        pip(python, "--no-deps", matching)
        pip(python, *constraints(), *SHARED)
        run(python, ".ci/torchvision_cpu.py")
        stamp.touch()
    return site(environment)


def test(project: str) -> dict[str, Any] | None:
    """What was found in a project's models, by model and trick; None if its environment or its tests do not run."""
    environment, report = FOLDER / project, FOLDER / f"{project}.json"
    packages, stamp = shared(), environment / ".made"
    python = made(environment)
    if not stamp.exists():
        print(f"installing {project}", flush=True)
        (site(environment) / "shared.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
        pip(python, *constraints(), *PROJECTS[project])
        stamp.touch()
    print(f"testing {project}", flush=True)
    report.unlink(missing_ok=True)
    tests = f"tests/clients/test_{project}.py"
    options = ["--show-capture=no", "--confcutdir=tests/clients", tests, "--clients", report]
    failed = run(python, *PYTEST, *options, check=False)
    if not report.exists():
        return None
    numbers = versions(python, PROJECTS[project][0], *REPORTED)
    return {"versions": numbers, "failed": bool(failed), "models": json.loads(report.read_text())}


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PROJECTS)
    if unknown := set(chosen) - set(PROJECTS):
        sys.exit(f"error: no project {', '.join(sorted(unknown))}; there are {', '.join(PROJECTS)}")
    FOLDER.mkdir(exist_ok=True)
    failures = []
    for name in chosen:
        found = test(name)
        if found is None or found.pop("failed"):
            failures.append(name)
        if found is not None:
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.write_text(
                json.dumps(dict(sorted({**known, name: found}.items())), indent=1, ensure_ascii=False) + "\n"
            )
    clients.PAGE.write_text(clients.page())  # a new row is in the record of every project by now
    sys.exit(f"error: tests failed in {', '.join(failures)}" if failures else 0)
