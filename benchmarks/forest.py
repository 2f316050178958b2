"""The forest plot of ``quality.py``: what each trick brings over plain training, with its 95% interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tables import RESULTS

PICTURE = RESULTS / "gains.svg"
TASKS = ("digits", "textures", "glosses")
ORDER = (
    *("EMA", "SWA", "SAM", "flat_cos", "one_cycle", "Mixup", "CutMix", "HiddenMixup", "AutoClip"),
    *("HardExampleFilter, prune", "HardExampleFilter, loss", "SAM + EMA + flat_cos"),
)
COLOURS = {"40% wrong labels": "#c2410c", "clean labels": "#2563eb"}
LIMITS = {"digits": (-14, 8), "textures": (-42, 48), "glosses": (-24, 6)}  # the filter goes further on clean digits


def draw(path: Path, gains: dict[str, list[dict[str, Any]]]) -> None:
    """A panel for each task: a point and a line for each trick and kind of labels; intervals are cut at the limits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    assert set(ORDER) == set(gains)
    with matplotlib.rc_context({"svg.hashsalt": "gains", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(1, 3, figsize=(9.5, 4.2), sharey=True, layout="constrained")
        for axis, task in zip(axes, TASKS, strict=True):
            _panel(axis, task, gains)
        axes[0].set_yticks(range(len(ORDER)), ORDER)
        axes[0].invert_yaxis()
        figure.supxlabel("points of test accuracy over plain training, 95% interval of five seeds", fontsize=9)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8, frameon=False
        )
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)


def _panel(axis: Any, task: str, gains: dict[str, list[dict[str, Any]]]) -> None:
    low, high = LIMITS[task]
    axis.axvline(0, color="#999999", linewidth=1)
    for shift, (labels, colour) in zip((-0.16, 0.16), COLOURS.items(), strict=True):
        rows = [
            (height + shift, row)
            for height, trick in enumerate(ORDER)
            for row in gains[trick]
            if row["setting"] == f"{task}, {labels}"
        ]
        for height, row in rows:
            start, end = max(row["low"], low), min(row["high"], high)
            if start < end:
                axis.plot([start, end], [height, height], color=colour, linewidth=1.6)
        inside = [(height, row["points"]) for height, row in rows if low < row["points"] < high]
        outside = [(height, row["points"]) for height, row in rows if row["points"] <= low]
        axis.plot(
            [points for _, points in inside], [height for height, _ in inside], "o", color=colour, label=labels, ms=4
        )
        for height, points in outside:
            axis.plot(low + 0.02 * (high - low), height, "<", color=colour, ms=5)
            axis.text(low + 0.06 * (high - low), height, f"{points:.0f}", color=colour, fontsize=8, va="center")
    axis.set_title(f"{task} ({'text' if task == 'glosses' else 'images'})", fontsize=10)
    axis.set_xlim(low, high)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
