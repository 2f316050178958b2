"""Adapters: LoRA beside peft by hand in a plain loop of torch, peft by hand in a stock Trainer, and full training.

``step`` is a training step with AdamW, ``peak memory`` what a fit or a loop of some steps takes beyond weights and
inputs, and ``checkpoint`` the file: by hand it is what ``torch.save`` writes of the adapters and the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from fitted import QUIET, AdamNet, architecture, drawn, fit
from rows import Row, figure, ratio, row, rows_of, target
from settings import SEED, Settings
from space import memory
from timing import fits, in_turns
from torch import nn
from torch.utils.data import DataLoader

import lightning_tricks as lt

NAME = "lora"
PEERS = ("peft", "timm")
FULL, OURS, TRAINER, LOOP = (
    "full training",
    "lightning_tricks LoRA",
    "peft by hand, Trainer",
    "peft by hand, plain loop",
)
MIB, RANK = 2**20, 8


def network(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    if name == "tiny":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    return architecture(name, num_classes=4)


def layers(name: str) -> str:
    """The layers that get adapters, as a pattern of their names."""
    return r"0$" if name == "tiny" else r"attn\.qkv$"


def head(name: str) -> str:
    return r"^2\." if name == "tiny" else r"^head\."


def adapted(name: str) -> nn.Module:
    """With peft's adapters; besides them the head trains."""
    import re

    from peft import LoraConfig, inject_adapter_in_model

    net = network(name)
    chosen = [path for path, _ in net.named_modules() if re.search(layers(name), path)]
    net = inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=chosen), net)
    for path, weight in net.named_parameters():
        weight.requires_grad_("lora_" in path or re.search(head(name), path) is not None)
    return net


class Trainable(AdamNet):
    """Gives the optimizer what trains."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([weight for weight in self.parameters() if weight.requires_grad], lr=1e-3)


def callbacks(what: str, name: str) -> list[Any]:
    pattern = layers(name).replace("0$", r"net\.0$")
    return [lt.LoRA(pattern, r=RANK, train=head(name).replace("^", r"^net\."))] if what == OURS else []


def module(what: str, name: str) -> L.LightningModule:
    return Trainable(adapted(name) if what in (TRAINER, LOOP) else network(name))


def loop(net: nn.Module, batch: Any, steps: int) -> tuple[float, torch.optim.Optimizer]:
    """Microseconds of a step without a Trainer; the first one warms up."""
    optimizer = torch.optim.AdamW([weight for weight in net.parameters() if weight.requires_grad], lr=1e-3)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
        optimizer.step()
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times[1:]), optimizer


def step(what: str, name: str, batch: Any, steps: int) -> float:
    """Microseconds of a step."""
    made = module(what, name)
    if what == LOOP:
        return loop(made.net.to(batch[0].device).train(), batch, steps)[0]
    return fit(made, batch, steps, callbacks(what, name), every=1)


def size(what: str, name: str, batch: Any) -> float:
    """Bytes of a checkpoint after two steps."""
    made = module(what, name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "it.ckpt"
        if what == LOOP:
            _, optimizer = loop(made.net.to(batch[0].device), batch, 2)
            trained = {key: weight for key, weight in made.net.named_parameters() if weight.requires_grad}
            torch.save({"weights": trained, "optimizer": optimizer.state_dict()}, path)
        else:
            device = batch[0].device.type
            trainer = L.Trainer(accelerator=device, callbacks=callbacks(what, name), **QUIET)
            trainer.fit(made, DataLoader([batch] * 2, batch_size=None))
            trainer.save_checkpoint(path)
        return path.stat().st_size


def run(settings: Settings) -> list[Row]:
    """Step, memory, checkpoint."""
    name = settings.pick("network", "vit_tiny_patch16_224", "vit_tiny_patch16_224", "tiny")
    shape = (16, 32) if name == "tiny" else (8, 3, 224, 224)
    steps, rounds = settings.pick("steps", 5, 4, 4), settings.pick("fits", 7, 1, 1)
    batch = drawn(shape, 4, settings.device)
    kinds = (FULL, OURS, TRAINER, LOOP)
    timed: dict[str, Callable[[], float]] = {what: partial(step, what, name, batch, steps) for what in kinds}
    found = rows_of(f"step, {name}", in_turns(fits(timed), rounds, warm_up=0), LOOP, "ms")
    for what in kinds:
        made = module(what, name).to(settings.device)
        work = partial(loop, made.net, batch, 2) if what == LOOP else None
        work = work or partial(fit, made, batch, 3, callbacks(what, name), every=1)
        taken, _ = memory(work, settings.device, MIB)
        found.append(row(f"peak memory, {name}", what, [taken["peak"]], "MiB"))
    return [*found, *(row(f"checkpoint, {name}", what, [size(what, name, batch) / 1e6], "MB") for what in kinds)]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By peft's adapters made by hand."""
    name = rows[0].case.split(", ")[1]
    over = figure(rows, f"step, {name}", OURS, "over_floor")
    hand = figure(rows, f"step, {name}", TRAINER, "over_floor")
    found = []
    if name != "tiny":
        found.append(target("step over peft by hand in a Trainer", ratio(over, hand), "<=", 1.05))
    for case, other, limit in (("peak memory", TRAINER, 1.05), ("peak memory", FULL, 0.9), ("checkpoint", FULL, 0.2)):
        if name != "tiny" or other == TRAINER:
            share = ratio(*(figure(rows, f"{case}, {name}", what) for what in (OURS, other)))
            found.append(target(f"{case} over {other}", share, "<=", limit))
    return found
