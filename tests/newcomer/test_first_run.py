"""From a new clone to an own run: make demo, the README's diff on thirty lines, YAML, resume, export, plain torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = (Path(__file__).parent / "own.py").read_text()

PLAIN_TORCH = """
import sys, torch
from sklearn.datasets import load_digits
from torch import nn

sizes = [int(size) for size in sys.argv[2:]]
layers = [layer for pair in zip(sizes, sizes[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
net = nn.Sequential(*layers[:-1])
net.load_state_dict(torch.load(sys.argv[1], weights_only=True))
x, y = load_digits(return_X_y=True)
print((net(torch.tensor(x, dtype=torch.float32) / 16).argmax(-1) == torch.tensor(y)).float().mean().item())
assert "lightning" not in sys.modules and "lightning_tricks" not in sys.modules
"""


def patched(text: str, diff: str) -> str:
    """``text`` with each run of ``-`` and ``+`` lines of a diff applied; lines that are only added come first."""
    for block in re.findall(r"(?:^[-+].*\n)+", diff, re.MULTILINE):
        old = "".join(re.findall(r"^-(.*\n)", block, re.MULTILINE))
        new = "".join(re.findall(r"^\+(.*\n)", block, re.MULTILINE))
        assert text.count(old) == 1 or not old, f"{old!r} is not in the script"
        text = text.replace(old, new) if old else new + text
    return text


def readme_diff() -> str:
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return diff


def test_the_diff_of_the_readme_fits_an_ordinary_script() -> None:
    own = patched(OWN, readme_diff())
    compile(own, "own.py", "exec")
    assert "callbacks=[lt.EMA()]" in own
    assert len(readme_diff().splitlines()) <= 5


@pytest.mark.slow
def test_from_a_clone_to_an_own_run(clone: Path, environment: dict[str, str], tmp_path: Path) -> None:
    def run(*command: str | Path, folder: Path = tmp_path) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    run("make", "demo", folder=clone)
    python, tricks = clone / ".venv/bin/python", clone / ".venv/bin/lightning-tricks"

    (tmp_path / "own.py").write_text(patched(OWN, readme_diff()))
    validated = float(run(python, "own.py").split("accuracy:")[1])
    run(tricks, "export", "net.ckpt", "-o", "net.pt", "--strip-prefix", "net.")
    accuracy = float(run(python, "-c", PLAIN_TORCH, "net.pt", "64", "128", "10"))
    assert min(validated, accuracy) > 0.95

    fit = (tricks, "fit", "-c", "configs/digits.yaml", "-c", "configs/tricks/ema_sam.yaml")
    run(*fit, f"--trainer.default_root_dir={tmp_path}/first", "--trainer.max_epochs=2", folder=clone)
    (first,) = (tmp_path / "first").rglob("*.ckpt")
    last = (*fit, f"--trainer.default_root_dir={tmp_path}/second", "--trainer.max_epochs=4", f"--ckpt_path={first}")
    run(*last, folder=clone)
    (second,) = (tmp_path / "second").rglob("*.ckpt")
    assert "epoch=3" in second.name
    for which in ("averaged", "raw"):
        run(tricks, "export", second, "-o", f"{which}.pt", "--which", which, "--strip-prefix", "network.")
        assert float(run(python, "-c", PLAIN_TORCH, f"{which}.pt", "64", "256", "256", "10")) > 0.3
    assert (tmp_path / "averaged.pt").read_bytes() != (tmp_path / "raw.pt").read_bytes()
