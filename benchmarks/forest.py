"""The forest plot of ``quality.py``: what each trick brings over plain training, with its 95% interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quality_report import Column, Row, columns

# Of each picture its text, then its colours for wrong and for clean labels.
SCHEMES = {
    "gains.svg": ("#1f2328", "#c2410c", "#2563eb"),
    "gains-dark.svg": ("#d1d7e0", "#fb923c", "#60a5fa"),
}
TASKS = {
    "digits": "digits (images)",
    "textures": "textures (images)",
    "glosses": "glosses (text)",
    "text": "characters",
}
REGIMES = {"40% wrong labels": ("40% wrong labels", -0.16), "clean": ("clean labels", 0.16)}
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
    """A panel for each task: a point and a line for each trick and kind of labels, in the colours of that name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    text, *colours = SCHEMES[path.name]
    found = columns(result)
    style = {"svg.hashsalt": "gains", "svg.fonttype": "none", "font.size": 9}
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), text)
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(1, 4, figsize=(9.5, 5.2), sharey=True, layout="constrained")
        for axis, task in zip(axes, TASKS, strict=True):
            _panel(axis, task, found, colours)
        axes[0].set_yticks(range(len(TRICKS)), TRICKS)
        axes[0].invert_yaxis()
        label = "points of test accuracy over plain training (characters: 0.01 nats of loss), with 95% intervals"
        figure.supxlabel(label, fontsize=9)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8, frameon=False
        )
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        pyplot.close(figure)


def _panel(axis: Any, task: str, found: dict[Column, dict[str, Row]], colours: list[str]) -> None:
    axis.axvline(0, color="#999999", linewidth=1)
    for colour, (regime, (label, shift)) in zip(colours, REGIMES.items(), strict=True):
        tricks = found.get((task, regime), {})
        rows = [(height + shift, tricks[name]["gain"]) for height, name in enumerate(TRICKS) if name in tricks]
        for height, row in rows:
            axis.plot([row["low"], row["high"]], [height, height], color=colour, linewidth=1.6)
        points, heights = [row["points"] for _, row in rows], [height for height, _ in rows]
        axis.plot(points, heights, "o", color=colour, label=label, ms=4)
    axis.set_title(TASKS[task], fontsize=10)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
