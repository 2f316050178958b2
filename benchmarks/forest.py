"""The forest plot of ``quality.py``: what each trick brings over plain training, with its 95% interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quality_report import Column, Row, columns
from tables import RESULTS

PICTURE = RESULTS / "gains.svg"
TASKS = {
    "digits": "digits (images)",
    "textures": "textures (images)",
    "glosses": "glosses (text)",
    "text": "characters",
}
REGIMES = {"40% wrong labels": ("40% wrong labels", "#c2410c", -0.16), "clean": ("clean labels", "#2563eb", 0.16)}
TRICKS = [
    "plain, twice the epochs",
    "EMA",
    "SWA",
    "flat_cos",
    "EMA + flat_cos",
    "one_cycle",
    "SAM",
    "SAM, rho 0.3",
    "ScheduleFree",
    "Lion",
    "Muon",
    "Mixup",
    "CutMix",
    "HiddenMixup",
    "label smoothing 0.1",
    "AdaptiveClip",
    "HardExampleFilter",
]


def draw(path: Path, result: dict[str, Any]) -> None:
    """A panel for each task: a point and a line for each trick and kind of labels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = columns(result)
    with matplotlib.rc_context({"svg.hashsalt": "gains", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(1, 4, figsize=(9.5, 5.2), sharey=True, layout="constrained")
        for axis, task in zip(axes, TASKS, strict=True):
            _panel(axis, task, found)
        axes[0].set_yticks(range(len(TRICKS)), TRICKS)
        axes[0].invert_yaxis()
        label = "points of test accuracy over plain training (characters: 0.01 nats of loss), with 95% intervals"
        figure.supxlabel(label, fontsize=9)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8, frameon=False
        )
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def _panel(axis: Any, task: str, found: dict[Column, dict[str, Row]]) -> None:
    axis.axvline(0, color="#999999", linewidth=1)
    for regime, (label, colour, shift) in REGIMES.items():
        tricks = found.get((task, regime), {})
        rows = [(height + shift, tricks[name]["gain"]) for height, name in enumerate(TRICKS) if name in tricks]
        for height, row in rows:
            axis.plot([row["low"], row["high"]], [height, height], color=colour, linewidth=1.6)
        points, heights = [row["points"] for _, row in rows], [height for height, _ in rows]
        axis.plot(points, heights, "o", color=colour, label=label, ms=4)
    axis.set_title(TASKS[task], fontsize=10)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
