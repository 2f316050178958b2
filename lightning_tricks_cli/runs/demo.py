"""The demo: train the digits experiment in every variant and report the results."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.checks import check_count, check_range
from lightning_tricks.core.install import pip_install
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import is_ours, mark
from lightning_tricks.examples.digits import VARIANTS, run

EPOCHS = 15

Results = dict[str, list[dict[str, Any]]]


def demo(output: Path, *, seeds: int = 5, epochs: int = EPOCHS, noise: float = 0.4) -> Results:
    """Run every variant with every seed; print the table; write report.png, results.json and digits.ckpt.

    Args:
        output: The folder for the files, created if needed.
        seeds: The number of runs of each variant, at least 1.
        epochs: The number of epochs of each run, at least 1.
        noise: The fraction of wrong training labels, in [0, 1].

    Returns:
        The runs of each variant.

    Raises:
        ImportError: If scikit-learn, matplotlib or rich is missing.
        OSError: If the folder has other files of these names, or is a file.
    """
    check_count("seeds", seeds)
    check_count("epochs", epochs)
    check_range("noise", noise, 0.0, 1.0)
    try:
        import matplotlib  # noqa: F401  Raises here rather than after the training.
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        raise ImportError(f"the demo needs {error.name}: {pip_install('demo')}") from error
    _prepare(output)
    console = Console()
    console.print(f"scikit-learn's handwritten digits, {noise:.0%} of the training labels wrong, {epochs} epochs")
    results: Results = {name: [] for name in VARIANTS}
    jobs = [(name, seed) for seed in range(seeds) for name in VARIANTS]
    with small_runs():
        for name, seed in track(jobs, "training", console=console):
            last = (name, seed) == jobs[-1]
            checkpoint = output / "digits.ckpt" if last else None
            results[name].append(run(VARIANTS[name], seed, epochs=epochs, noise=noise, checkpoint=checkpoint))
    console.print(_table(results))
    _picture(results, output / "report.png")
    report = {"machine": machine(), "noise": noise, "epochs": epochs, "runs": results}
    with atomic_write(output / "results.json") as file:
        file.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"wrote {output}/report.png, {output}/results.json and {output}/digits.ckpt (the last run's weights)")
    return results


def _prepare(output: Path) -> None:
    """Make the folder; files of an earlier demo may be replaced, and no others."""
    folder_of("output", output).mkdir(parents=True, exist_ok=True)
    if is_ours(output, "demo"):
        return
    for name in ("report.png", "results.json", "digits.ckpt"):
        if os.path.lexists(output / name):
            raise FileExistsError(f"{output / name} is in the way: no demo has made it. Choose another --output.")
    mark(output, "demo")


def _table(results: Results) -> Any:
    from rich.table import Table

    title = f"mean and std of {len(results['plain'])} seeds; time as a multiple of plain training's"
    table = Table("training", "test accuracy", "over plain", "time", title=title)
    means = {name: statistics.fmean(run["test_accuracy"] for run in runs) for name, runs in results.items()}
    seconds = {name: statistics.median(run["seconds"] for run in runs) for name, runs in results.items()}
    for name, runs in results.items():
        spread = statistics.pstdev(run["test_accuracy"] for run in runs)
        gain = "" if name == "plain" else f"{100 * (means[name] - means['plain']):+.1f} points"
        table.add_row(name, f"{means[name]:.3f} ± {spread:.3f}", gain, f"{seconds[name] / seconds['plain']:.1f}")
    return table


def _picture(results: Results, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name in ("plain", "EMA", "SAM + EMA + flat_cos"):
        _draw(left, [r["val_accuracy"] for r in results[name]], name)
    for key, label in (("val_accuracy_raw", "raw weights"), ("val_accuracy", "averaged weights")):
        _draw(right, [r[key] for r in results["EMA"]], label)
    left.set(title="plain training, one trick and three", xlabel="epoch", ylabel="validation accuracy")
    right.set(title="EMA(): raw and averaged weights", xlabel="epoch")
    with atomic_write(path) as file:
        figure.savefig(file, dpi=120)


def _draw(axes: Any, curves: list[list[float]], label: str) -> None:
    values = torch.tensor(curves)
    mean, std = values.mean(0), values.std(0, correction=0)
    epochs = range(1, values.shape[1] + 1)
    axes.plot(epochs, mean, label=label)
    axes.fill_between(epochs, mean - std, mean + std, alpha=0.2)
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.3)


def machine() -> dict[str, Any]:
    """The machine and the versions on which figures were measured."""
    return {
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


@contextmanager
def small_runs() -> Iterator[None]:
    """Silence Lightning's messages and use one thread, which suits a tiny network."""
    logger = logging.getLogger("lightning.pytorch")
    level, threads = logger.level, torch.get_num_threads()
    logger.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(threads)
