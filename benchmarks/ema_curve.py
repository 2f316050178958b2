"""The curve on the first screen: test accuracy by epoch, plain training against ``EMA``, on digits with wrong labels.

``python benchmarks/ema_curve.py`` (half a minute) fits the runs of ``quality.py`` again, its seeds and its learning
rate, and tests after every epoch, where that tests at the end alone. It writes the figures to
``benchmarks/results/ema_curve.json``; ``make tables`` draws them, in the colours of light and of dark pages.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

import lightning_tricks as lt

FILE = Path(__file__).parent / "results" / "ema_curve.json"
QUALITY = FILE.with_name("quality.json")
DOCS = Path(__file__).parent.parent / "docs"
TASK, REGIME = "digits", "40% wrong labels"
ARMS = {"plain training": "plain", "with EMA": "EMA"}  # and what quality.py calls them
SCHEMES = {  # of each picture its text, then its lines
    "ema_curve.svg": ("#1f2328", "#6e7781", "#7c3aed"),
    "ema_curve-dark.svg": ("#d1d7e0", "#9198a1", "#b794f6"),
}


def measure() -> dict[str, Any]:
    """The accuracies of each arm, a list of epochs for each seed."""
    from machine import machine
    from quality import TRICKS, Data, Scale, fit, small_runs

    class TestedEachEpoch(Data):
        """Has its test data as validation data, too."""

        @override
        def val_dataloader(self) -> DataLoader[Any]:
            return self.test_dataloader()[0]

    class Curve(L.Callback):
        """Keeps what validation has logged."""

        def __init__(self, runs: list[list[float]]) -> None:
            self.values: list[float] = []
            runs.append(self.values)

        @override
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.state.fn == "fit":  # compare validates once more
                self.values.append(round(trainer.callback_metrics["val_accuracy"].item(), 4))

    def arm(name: str, folder: Path) -> tuple[Any, ...]:
        trainer, module, _ = fit(TASK, REGIME, TRICKS[ARMS[name]], lr, Scale(), folder)
        trainer.check_val_every_n_epoch = 1
        trainer.callbacks.append(Curve(runs[name]))
        return trainer, module, TestedEachEpoch(TASK, REGIME)

    finals = [run for run in json.loads(QUALITY.read_text())["runs"] if run["part"] == "finals"]
    of_plain = [run for run in finals if (run["task"], run["regime"], run["trick"]) == (TASK, REGIME, "plain")]
    lr, seeds = of_plain[0]["lr"], [run["seed"] for run in of_plain]
    runs: dict[str, list[list[float]]] = {name: [] for name in ARMS}
    with small_runs(), TemporaryDirectory() as folder:
        lt.compare(
            {name: partial(arm, name) for name in ARMS}, metric="val_accuracy", mode="max", seeds=seeds, folder=folder
        )
    # compare makes the first seed of each arm once more, to look at it
    runs = {name: [values for values in each if values] for name, each in runs.items()}
    return {"benchmark": "ema_curve", "machine": machine("lightning-tricks", "scikit-learn"), "lr": lr, "runs": runs}


def draw(path: Path, result: dict[str, Any]) -> None:
    """Means over the seeds, and a band from the worst seed to the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    text, *colours = SCHEMES[path.name]
    style = {"svg.hashsalt": "ema_curve", "svg.fonttype": "none", "font.size": 10, "text.color": text}
    style |= dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), text)
    with matplotlib.rc_context(style):
        figure, axis = pyplot.subplots(figsize=(7.2, 2.5), layout="constrained")
        for colour, (name, seeds) in zip(colours, result["runs"].items(), strict=True):
            values = 100 * torch.tensor(seeds)
            epochs = range(1, values.shape[1] + 1)
            axis.fill_between(epochs, values.amin(0), values.amax(0), color=colour, alpha=0.18, linewidth=0)
            axis.plot(epochs, values.mean(0), color=colour, linewidth=2)
            end = values.mean(0)[-1].item()
            axis.text(epochs[-1] + 0.2, end, f"{name}: {end:.0f}%", color=colour, va="center", weight="bold")
        axis.set(xlim=(1, epochs[-1]), ylim=(68, 94), xticks=(1, 5, 10, 15), xlabel="epoch", ylabel="test accuracy, %")
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)


if __name__ == "__main__":
    from rows import written

    FILE.write_text(written(measure()))
