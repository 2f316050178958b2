"""The forest plots of the cards: in every setting what a trick brings over plain training, with its 95% interval."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_tricks_cli.cards import forest as name
from lightning_tricks_cli.cards import gains_of
from lightning_tricks_cli.catalogue import Row

__all__ = ["draw", "name"]
COLOURS = ("#7c3aed", "#c2410c", "#0d9488", "#2563eb", "#a16207", "#be185d", "#4d7c0f", "#475569")
MARGIN = 4  # points beyond the largest gain and loss; longer intervals are cut off


def draw(path: Path, row: Row) -> None:
    """A line for each setting and variant: full if the interval leaves out 0, pale if not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gains = gains_of(row)
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for trick, of in gains.items():
        for each in of:
            settings.setdefault(each["setting"], {})[trick] = each
    lines = [(setting, trick) for setting, tricks in settings.items() for trick in tricks]
    order = {setting: place for place, setting in enumerate(settings)}
    heights = {line: place + order[line[0]] for place, line in enumerate(lines)}  # a gap between settings
    points = [each["points"] for of in gains.values() for each in of]
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 8}):
        figure, axis = pyplot.subplots(figsize=(7.2, 0.9 + 0.09 * (len(lines) + len(settings))), layout="constrained")
        axis.axvline(0, color="#999999", linewidth=1)
        for colour, (trick, of) in zip(COLOURS[: len(gains)], gains.items(), strict=True):
            mine = [heights[each["setting"], trick] for each in of]
            colours = [(colour, 1.0 if each["low"] > 0 or each["high"] < 0 else 0.3) for each in of]
            axis.hlines(mine, [each["low"] for each in of], [each["high"] for each in of], colours)
            axis.scatter([each["points"] for each in of], mine, 14, colours, linewidths=0)
            axis.plot([], [], "o", color=colour, label=trick, ms=4)
        places = [[heights[setting, trick] for trick in tricks] for setting, tricks in settings.items()]
        axis.set_yticks([fmean(mine) for mine in places], [*settings])
        axis.set_ylim(max(heights.values()) + 1, -1)
        axis.set_xlim(min(0, *points) - MARGIN, max(0, *points) + MARGIN)
        axis.set_xlabel("points over plain training (text, GPT: 0.01 nats), 95% intervals")
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        if len(gains) > 1:
            figure.legend(loc="outside upper right", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
