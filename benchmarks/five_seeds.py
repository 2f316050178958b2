"""What five seeds tell, and fifteen: EMA over plain training on digits with wrong labels, as in ``quality.py``.

Run ``python benchmarks/five_seeds.py`` (a minute or two); it writes ``benchmarks/results/five_seeds.json``, of which
``docs/compare.md`` tells.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from machine import machine
from quality import RESULTS, Scale, Variant, fit
from quality_report import PLAIN, paired
from rows import written

import lightning_tricks as lt
from lightning_tricks_cli.runs.demo import small_runs

LR = 0.03  # the one that quality.py has chosen for plain training
PARTS = (range(5), range(5, 10), range(10, 15), range(15))
OUTPUT = RESULTS / "five_seeds.json"


def rows(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """The difference of some of the seeds, in points of test accuracy."""
    return [
        {"seeds": [*part], **paired(*([runs[name][seed] for seed in part] for name in ("EMA", PLAIN)))}
        for part in PARTS
    ]


def main() -> None:
    """Run, write."""
    arms = {name: partial(fit, "digits", "noisy labels", Variant(name, None, LR), Scale()) for name in (PLAIN, "EMA")}
    settings: dict[str, Any] = {"metric": "test_accuracy", "mode": "max", "seeds": [*PARTS[-1]]}
    with small_runs(), TemporaryDirectory() as folder:
        made = lt.compare(arms, folder=Path(folder), **settings)
    print(made)
    runs = {name: [{"test": round(value, 4)} for value in made.values(name)] for name in arms}
    result = {"benchmark": "five_seeds", "machine": machine("scikit-learn"), "settings": {**settings, "lr": LR}}
    OUTPUT.write_text(written({**result, "rows": rows(runs), "runs": runs}))


if __name__ == "__main__":
    main()
