"""The forest plots of the cards: in every setting what a trick brings over plain training, with its 95% interval."""

from __future__ import annotations

from pathlib import Path

from lightning_tricks_cli.cards import forest as name
from lightning_tricks_cli.cards import gains_of
from lightning_tricks_cli.catalogue import Row

__all__ = ["draw", "name"]
COLOURS = ("#7c3aed", "#c2410c", "#0d9488", "#2563eb", "#a16207")
MARGIN = 4  # points beyond the largest gain and loss; longer intervals are cut off


def draw(path: Path, row: Row) -> None:
    """A line for each setting and variant: full if the interval leaves out 0, pale if not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gains = gains_of(row)
    settings = list(dict.fromkeys(each["setting"] for of in gains.values() for each in of))
    points = [each["points"] for of in gains.values() for each in of]
    height = 0.9 + len(settings) * (0.11 + 0.07 * len(gains))
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none", "font.size": 8}):
        figure, axis = pyplot.subplots(figsize=(7.2, height), layout="constrained")
        axis.axvline(0, color="#999999", linewidth=1)
        for number, (trick, of) in enumerate(gains.items()):
            shift = (number - (len(gains) - 1) / 2) * 0.7 / len(gains)
            heights = [settings.index(each["setting"]) + shift for each in of]
            colour = COLOURS[number % len(COLOURS)]
            colours = [(colour, 1.0 if each["low"] > 0 or each["high"] < 0 else 0.3) for each in of]
            axis.hlines(heights, [each["low"] for each in of], [each["high"] for each in of], colours)
            axis.scatter([each["points"] for each in of], heights, 14, colours, linewidths=0)
            axis.plot([], [], "o", color=colour, label=trick, ms=4)
        axis.set_yticks(range(len(settings)), settings)
        axis.set_ylim(len(settings) - 0.4, -0.6)
        axis.set_xlim(min(0, *points) - MARGIN, max(0, *points) + MARGIN)
        axis.set_xlabel("points of test accuracy over plain training, with 95% intervals")
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        if len(gains) > 1:
            figure.legend(loc="outside upper right", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
