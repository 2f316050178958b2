"""Which radius of SAM the demo should use: validation accuracy at the end, mean of 5 seeds.

Run it with ``python benchmarks/digits_rho.py``; it writes ``benchmarks/results/digits_rho.json`` in a few minutes.
"""

from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from machine import machine
from rows import written

import lightning_tricks as lt
from lightning_tricks.examples.digits import DigitsData, SharpDigits
from lightning_tricks.examples.tasks import QUIET
from lightning_tricks_cli.runs.demo import EPOCHS, small_runs

RADII = (0.05, 0.1, 0.2, 0.3, 0.5)
VARIANTS = {"SAM": False, "SAM + EMA + flat_cos": True}  # whether with the others
SEEDS = range(5)
NOISE = 0.4
OUTPUT = Path(__file__).parent / "results" / "digits_rho.json"


def fit(rho: float, others: bool, folder: Path) -> tuple[Any, ...]:
    module = SharpDigits(schedule=others)
    module.sam = lt.SAM(rho)
    callbacks = [lt.EMA()] if others else []
    trainer = L.Trainer(max_epochs=EPOCHS, check_val_every_n_epoch=EPOCHS, callbacks=callbacks, **QUIET)
    return trainer, module, DigitsData(NOISE)


def main() -> None:
    cells = [(rho, variant) for rho in RADII for variant in VARIANTS]
    arms = {f"{variant}, {rho}": partial(fit, rho, VARIANTS[variant]) for rho, variant in cells}
    with small_runs(), TemporaryDirectory() as folder:
        runs = lt.compare(arms, metric="test_accuracy", mode="max", seeds=SEEDS, folder=folder).runs
    metrics = ("val_accuracy", "test_accuracy")
    rows = [
        {
            "rho": rho,
            "variant": variant,
            **{name: round(fmean(run["metrics"][name] for run in runs[f"{variant}, {rho}"]), 4) for name in metrics},
        }
        for rho, variant in cells
    ]
    settings = {"seeds": list(SEEDS), "epochs": EPOCHS, "noise": NOISE}
    result = {"benchmark": "digits_rho", "machine": machine("scikit-learn"), "settings": settings, "rows": rows}
    OUTPUT.write_text(written(result))


if __name__ == "__main__":
    main()
