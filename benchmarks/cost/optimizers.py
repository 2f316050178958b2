"""What the optimizers of ``optimizers()`` cost: ten steps beside AdamW's, and the bytes of their states for a weight.

Ten steps have one new basis of SOAP's; GaLore's comes every 200 steps and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fitted import architecture
from rows import Row, row, rows_of
from settings import SEED, Settings
from timing import Work, in_turns, works
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lightning_tricks as lt

NAME = "optimizers"
PEERS = ("timm", "pytorch-optimizer", "schedulefree", "bitsandbytes", "torchao")
FLOOR = "adamw"
STEPS, BYTES = "ten steps", "bytes of states for a weight"
NEEDED: dict[str, dict[str, Any]] = {"ranger21": {"num_iterations": 10_000}}


def made(name: str, device: str) -> tuple[torch.optim.Optimizer, int]:
    """An optimizer of a vision transformer of two blocks with gradients, and the number of its weights."""
    torch.manual_seed(SEED)
    network = architecture("vit_small_patch16_224", depth=2).to(device)
    for weight in network.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer = lt.optimizer(name, network, 1e-3, **NEEDED.get(name, {}))
    if name.startswith("schedulefree"):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer, sum(weight.numel() for weight in network.parameters())


def ten_steps(optimizer: torch.optim.Optimizer) -> None:
    """The work."""
    for _ in range(10):
        optimizer.step()


def run(settings: Settings) -> list[Row]:
    """All figures."""
    every = tuple(row["name"] for row in lt.optimizers())
    names = settings.pick("optimizers", every, (FLOOR, "sgd", "lion", "galore", "adafactor"), (FLOOR, "lion"))
    rounds = settings.pick("rounds", 10, 3, 1)
    held: list[Row] = []

    def work(name: str) -> Work:
        optimizer, weights = made(name, settings.device)
        ten_steps(optimizer)  # Lookahead has its slow weights then
        leaves = tree_leaves(optimizer.state_dict()["state"])
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) / weights
        held.append(row(BYTES, name, [size], "bytes"))
        return partial(ten_steps, optimizer)

    makers: dict[str, Callable[[], Work]] = {name: partial(work, name) for name in names}
    return [*rows_of(STEPS, in_turns(works(makers, settings.device), rounds), FLOOR, "ms"), *held]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """None: the arithmetic is the libraries'."""
    return []
