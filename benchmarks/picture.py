"""The picture of the committed figures: what each trick adds to a step, beside its peers and its floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# panels: file, case, title; cases that a reduced run has, too
PANELS = (
    ("ema", "added to a step, tiny", "EMA: added to a tiny step"),
    ("ema", "update, vit_tiny", "EMA: an update, ViT-tiny"),
    ("sam", "step, resnet50", "SAM: a step, ResNet-50"),
    ("mixup", "Mixup, 128x3x64x64", "Mixup: a batch and its loss"),
    ("hard_examples", "step, resnet18", "Hard examples: a step, ResNet-18"),
    ("guards", "step, vit_tiny", "Guards: a step, ViT-tiny"),
    ("schedules", "1 group", "Schedules: a step"),
    ("together", "added to a step, tiny", "Together: added to a tiny step"),
)
OURS, FLOOR, OTHER = "#1f77b4", "#bbbbbb", "#ff7f0e"
PEERS = ("torch", "timm", "ema-pytorch", "pytorch-optimizer", "Lightning", "plain", "unmixed", "by hand")


def draw(results: Path) -> None:
    """Bars with limits, one panel a case, into ``overhead.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 2, figsize=(13, 15), layout="constrained")
    for axis, (name, case, title) in zip(axes.flat, PANELS, strict=True):
        result = json.loads((results / f"{name}.json").read_text())
        _panel(axis, [row for row in result["rows"] if row["case"] == case and row["median"] is not None], title)
    figure.suptitle("Medians, from the least to the most: ours blue, peers orange, floors grey")
    figure.savefig(results / "overhead.png", dpi=80)
    pyplot.close(figure)


def _panel(axis: Any, rows: list[dict[str, Any]], title: str) -> None:
    if not rows:
        axis.set_title(f"{title}: not measured", fontsize=10)
        return
    names, medians = [row["what"] for row in rows], [row["median"] for row in rows]
    limits = [[r["median"] - r["min"] for r in rows], [r["max"] - r["median"] for r in rows]]
    axis.barh(names, medians, xerr=limits, color=[_colour(row) for row in rows], error_kw={"lw": 1, "capsize": 2})
    axis.invert_yaxis()
    axis.set_xlim(left=0, right=1.6 * max(medians))
    axis.set_title(f"{title} ({rows[0]['unit']})", fontsize=10)
    axis.tick_params(labelsize=8)


def _colour(row: dict[str, Any]) -> str:
    if row["what"] == row["floor"]:
        return FLOOR
    return OTHER if any(peer in row["what"] for peer in PEERS) and "lightning_tricks" not in row["what"] else OURS
