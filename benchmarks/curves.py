"""The picture of the schedules' cards: every curve with its defaults, as the schedulers themselves draw it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lightning_tricks as lt

PICTURE = Path(__file__).parent.parent / "docs" / "tricks" / "curves.svg"
STEPS = 200
PLATEAUS = (60, 120, 170)  # the steps after which the metric of the picture has not improved for long enough
CURVES: dict[str, Callable[..., Any]] = {
    "flat_cos": lt.flat_cos,
    "one_cycle": lt.one_cycle,
    "cosine": lt.cosine,
    "cosine_restarts": lt.cosine_restarts,
    "linear": lt.linear,
    "polynomial": lt.polynomial,
    "inverse_sqrt": partial(lt.inverse_sqrt, warmup=0.05),
    "wsd": partial(lt.wsd, warmup=0.05),
    "step_decay": lt.step_decay,
    "constant": lt.constant,
    "swa_tail": lambda optimizer, total_steps: lt.swa_tail(
        lt.cosine(optimizer, total_steps=total_steps), swa_lr=0.5, anneal=0.05
    ),
}


def factors(make: Callable[..., Any]) -> list[float]:
    """The factor of the base learning rate in each step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer, total_steps=STEPS)["lr_scheduler"]["scheduler"]
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def plateaus() -> list[float]:
    """The factors of ``reduce_on_plateau``, with the metric of the picture."""
    return [0.1 ** sum(step >= plateau for plateau in PLATEAUS) for step in range(STEPS)]


def draw(path: Path) -> None:
    """A small panel for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 8}):
        figure, axes = pyplot.subplots(2, 6, figsize=(9.5, 2.8), sharex=True, sharey=True, layout="constrained")
        panels = {name: factors(make) for name, make in CURVES.items()} | {"reduce_on_plateau": plateaus()}
        for axis, (name, values) in zip(axes.flat, panels.items(), strict=True):
            axis.plot([step / STEPS for step in range(STEPS)], values, color="#7c3aed")
            axis.set_title(name, fontsize=9)
            axis.set_xticks([0, 1])
            axis.set_yticks([0, 1])
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        pyplot.close(figure)
