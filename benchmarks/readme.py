"""``make tables``: everything that is written from the catalogue, the docstrings and the committed figures.

The cards of ``docs/tricks`` and their pictures, the tables of ``docs/`` and ``benchmarks/README.md``, the gains.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import card_forest
import claims
import clients
import conflicts
import curves
import ema_curve
import evidence
import finetune
import finetune_images
import finetune_report
import forest
import gain_scaling
import illustrations
import language_model
import matrix
import optimizer_table
import quality_report
from run import discovered
from tables import grid, renew

from lightning_tricks_cli.cards import card, cards
from lightning_tricks_cli.catalogue import CATALOGUE

FOLDER = Path(__file__).parent.parent / "docs" / "tricks"
HEAD = """\
# Tricks

A card says what a trick does, when to take it and when not. It has the code, values to start with, what the trick
costs, what it brought on our tasks, where it works, and its pitfalls. `lightning-tricks tricks EMA` prints it.

In the code of the cards `L` is `lightning`, `lt` is `lightning_tricks`, `nn` and `F` are torch's. `Net` is your
LightningModule, here `self.model` has a stem, blocks and a head; `net = Net()`; loaders and `data` are yours.
"""


def index() -> str:
    """docs/tricks/README.md: a table for each group of cards."""
    parts = [HEAD]
    for group, rows in groupby(CATALOGUE, lambda row: row.group):
        lines = [(", ".join(f"`{name}`" for name in row.names), row.what, row.names[0]) for row in rows]
        table = grid(["trick", "what it does"], [(f"[{names}]({card}.md)", what) for names, what, card in lines])
        parts.append(f"## {group}\n\n{table}\n")
    return "\n".join(parts)


def pages() -> dict[Path, str]:
    """The index and the cards."""
    return {FOLDER / "README.md": index(), **{FOLDER / f"{name}.md": card(name) for name in cards()}}


if __name__ == "__main__":
    evidence.FILE.write_text(evidence.text())
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text)
    clients.PAGE.write_text(clients.page())
    conflicts.PAGE.write_text(conflicts.page())
    optimizer_table.PAGE.write_text(optimizer_table.page())
    matrix.PAGE.write_text(matrix.page())
    renew(list(discovered()))
    quality_report.renew(evidence.result("quality"))
    claims.renew(evidence.result("claims"), evidence.result("quality"))
    for larger in (finetune, finetune_images, language_model, gain_scaling):
        if (quality_report.RESULTS / f"{larger.__name__}.json").exists():
            finetune_report.renew(larger.__name__, larger.section(evidence.result(larger.__name__)))
    quality_report.draw(quality_report.PICTURE, evidence.result("quality"))
    for picture in forest.SCHEMES:
        forest.draw(quality_report.RESULTS / picture, evidence.result("quality"))
    curves.draw(curves.PICTURE)
    for picture in ema_curve.SCHEMES:
        ema_curve.draw(ema_curve.DOCS / picture, evidence.result("ema_curve"))
    for row in filter(card_forest.name, CATALOGUE):
        card_forest.draw(FOLDER / card_forest.name(row), row)
    for name in illustrations.PICTURES:
        illustrations.draw(illustrations.FOLDER / f"{name}.svg")
