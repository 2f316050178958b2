"""The forest plots of the cards: in every setting what a trick brings over plain training, with its 95% interval."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from lightning_tricks_cli.cards import forest as name
from lightning_tricks_cli.cards import gains_of, settings_of
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
    drawn = {(each["setting"], trick) for trick, of in gains.items() for each in of}
    heights: dict[tuple[str, str], int] = {}  # from the top, with a gap after each setting
    settings = settings_of(gains)
    for place, setting in enumerate(settings):
        for trick in gains:
            if (setting, trick) in drawn:
                heights[setting, trick] = len(heights) + place
    points = [each["points"] for of in gains.values() for each in of]
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 8}):
        figure, axis = pyplot.subplots(figsize=(7.2, 0.9 + 0.09 * (len(heights) + len(settings))), layout="constrained")
        axis.axvline(0, color="#999999", linewidth=1)
        for colour, (trick, of) in zip(COLOURS[: len(gains)], gains.items(), strict=True):
            mine = [heights[each["setting"], trick] for each in of]
            colours = [(colour, 1.0 if each["low"] > 0 or each["high"] < 0 else 0.3) for each in of]
            axis.hlines(mine, [each["low"] for each in of], [each["high"] for each in of], colours)
            axis.scatter([each["points"] for each in of], mine, 14, colours, linewidths=0)
            axis.plot([], [], "o", color=colour, label=trick, ms=4)
        middles = [fmean(heights[line] for line in heights if line[0] == setting) for setting in settings]
        axis.set_yticks(middles, settings)
        axis.set_ylim(max(heights.values()) + 1, -1)
        axis.set_xlim(min(0, *points) - MARGIN, max(0, *points) + MARGIN)
        axis.set_xlabel("points over plain training (text, GPT: 0.01 nats), 95% intervals")
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        if len(gains) > 1:
            figure.legend(loc="outside upper right", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
