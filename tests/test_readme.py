"""README: its figures are those of the committed runs, its code runs, its links lead somewhere."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_tricks as lt
from lightning_tricks.cli.digits import SharpDigits

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def figure(folder: str, variant: str, key: str = "test_accuracy") -> str:
    """Mean and (population) standard deviation over the seeds, as the demo prints them."""
    runs = json.loads((RESULTS / folder / "results.json").read_text())["runs"][variant]
    values = [run[key] for run in runs]
    assert len(values) == 5
    return f"{statistics.fmean(values):.3f} ± {statistics.pstdev(values):.3f}"


def cost(name: str, what: str) -> list[dict[str, Any]]:
    """The rows of a contender in a benchmark of costs."""
    return [row for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"] if row["what"] == what]


@pytest.mark.parametrize(
    ("row", "variant"),
    [
        ("| plain training |", "plain"),
        ("| `EMA` |", "EMA"),
        ("| `SAMMixin`, `SAM` |", "SAM"),
        ("| `flat_cos` |", "flat_cos"),
        ("| all three |", "SAM + EMA + flat_cos"),
    ],
)
def test_the_trick_table_holds_the_committed_figures(row: str, variant: str) -> None:
    (line,) = [line for line in README.splitlines() if line.startswith(row) and "±" in line]
    assert figure("digits", variant) in line


def test_the_null_result_is_the_committed_one() -> None:
    text = " ".join(README.split())
    for variant in ("plain", "SAM", "SAM + EMA + flat_cos"):
        assert figure("digits_clean", variant) in text


def test_the_best_epochs_are_the_committed_ones() -> None:
    runs = json.loads((RESULTS / "digits" / "results.json").read_text())["runs"]
    plain, ema, tricks = (
        [statistics.fmean(epoch) for epoch in zip(*(run["val_accuracy"] for run in runs[variant]), strict=True)]
        for variant in ("plain", "EMA", "SAM + EMA + flat_cos")
    )
    text = " ".join(README.split())
    for curve in (plain, ema):
        assert f"{max(curve):.3f} at epoch {curve.index(max(curve)) + 1}" in text
    assert f"{tricks[-1]:.3f} at the end" in text


def test_the_radius_is_the_best_on_validation_and_the_default_is_reported() -> None:
    rows = json.loads((RESULTS / "digits_rho.json").read_text())["rows"]
    of_all = [row for row in rows if row["variant"] == "SAM + EMA + flat_cos"]
    assert max(of_all, key=lambda row: row["val_accuracy"])["rho"] == SharpDigits.sam.rho
    (default,) = [row["test_accuracy"] for row in of_all if row["rho"] == lt.SAM().rho]
    assert f"have {default:.3f})" in " ".join(README.split())


def test_the_import_costs_what_was_measured() -> None:
    assert f"adds {cost('import_time', 'lightning_tricks')[0]['median']:.2f} s to" in README


def test_the_batch_tricks_have_the_committed_figures() -> None:
    quality = json.loads((RESULTS / "batch_quality.json").read_text())
    text = " ".join(README.split())
    means = {
        labels: {name: 100 * row["test_mean"] for name, row in quality["digits"][labels].items()}
        for labels in ("noisy labels", "clean labels")
    }
    noisy, clean = (each["plain, 1/2 of the epochs"] - each["HardExampleFilter(keep=0.5)"] for each in means.values())
    mixup = [each["Mixup(alpha=0.2)"] - each["plain"] for each in means.values()]
    assert f"was [{noisy:.1f} points better]" in text
    assert f"on noisy digits and {clean:.1f} on clean ones" in text
    assert f"(`Mixup`: {mixup[0]:.1f} above plain, {mixup[1]:.1f} on clean ones)" in text
    (scaled,) = cost("hard_examples", "HardExampleFilter(0.5, score_scale=0.5)")
    assert f"[{scaled['over_floor']:.2f}](benchmarks/results/hard_examples.json)" in text


def test_the_guards_and_the_estimate_have_the_committed_figures() -> None:
    names = ("SkipNonFinite", "TerminateOnNonFinite", "RewindOnSpike")
    shares = [row["over_floor"] for name in names for row in cost("guards", name) if row["case"] != "step, tiny"]
    assert f"[{max(shares):.1f}](benchmarks/results/guards.json) clipping passes a step" in README
    memory = json.loads((RESULTS / "memory.json").read_text())
    error = max(abs(row["over_floor"] - 1) for row in memory["rows"])
    assert f"within [{error:.1%}](benchmarks/results/memory.json) of measured ones" in README


@pytest.mark.parametrize("code", blocks("python"))
def test_the_code_runs(code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_yaml_configures_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "config.yaml").write_text(text + "  accelerator: cpu\n  logger: false\nmodel: tests.nets.Net\n")
    monkeypatch.setattr("sys.argv", ["fit.py", "--config", str(tmp_path / "config.yaml")])
    trainer = LightningCLI(save_config_callback=None, seed_everything_default=0, run=False).trainer
    assert trainer.precision == "bf16-mixed"
    assert trainer.strategy.strategy_name == "ddp_bf16"
    assert {lt.EMA, lt.LRSchedule} <= {type(callback) for callback in trainer.callbacks}


def test_links_inside_the_repository_resolve() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_it_is_short() -> None:
    assert len(README.split()) <= 1200
