"""Which radius of SAM the demo should use: validation accuracy at the end, mean of 5 seeds.

Run it with ``python benchmarks/digits_rho.py``; it writes ``benchmarks/results/digits_rho.json`` in a few minutes.
"""

import statistics
from pathlib import Path

from machine import machine
from rows import written

import lightning_tricks as lt
from lightning_tricks.examples import digits
from lightning_tricks_cli.runs.demo import EPOCHS, small_runs

RADII = (0.05, 0.1, 0.2, 0.3, 0.5)
SEEDS = range(5)
NOISE = 0.4
OUTPUT = Path(__file__).parent / "results" / "digits_rho.json"


def main() -> None:
    rows = []
    with small_runs():
        for rho in RADII:
            digits.SharpDigits.sam = lt.SAM(rho)
            for variant in ("SAM", "SAM + EMA + flat_cos"):
                runs = [digits.run(digits.VARIANTS[variant], seed, epochs=EPOCHS, noise=NOISE) for seed in SEEDS]
                row = {
                    "rho": rho,
                    "variant": variant,
                    "val_accuracy": round(statistics.fmean(run["val_accuracy"][-1] for run in runs), 4),
                    "test_accuracy": round(statistics.fmean(run["test_accuracy"] for run in runs), 4),
                }
                print(row, flush=True)
                rows.append(row)
    settings = {"seeds": list(SEEDS), "epochs": EPOCHS, "noise": NOISE}
    result = {"benchmark": "digits_rho", "machine": machine("scikit-learn"), "settings": settings, "rows": rows}
    OUTPUT.write_text(written(result))


if __name__ == "__main__":
    main()
