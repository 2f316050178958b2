"""A fit with all that a fit may have, on the simulated device or on the CPU: what it ends with, and what waits."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from tests.conformance.runs import Gather, ShardedNet, fitted
from tests.conformance.test_resume import resumable
from tests.conformance.trick import NEEDS, Enrolment
from tests.device.devices import Device
from tests.device.simulation import Found
from tests.nets import Net, NormNet, data, weights

PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
SAVED = 4  # the optimizer step at which a checkpoint is saved, in the middle of the second epoch


@dataclass
class Fit:
    """What is left of a fit that logs each step, and of one that goes on from its checkpoint and does not log.

    Args:
        weights: The weights at the end.
        devices: Where weights, buffers and states of optimizers were then.
        logged: What the host waited for in each training step that logs, without the validation behind it.
        steps: The same of the steps that do not.
        races: What the host did with memory of copies that it had not waited for.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    devices: set[str] = field(default_factory=set)
    logged: list[list[Found]] = field(default_factory=list)
    steps: list[list[Found]] = field(default_factory=list)
    races: list[Found] = field(default_factory=list)


class Watch(Callback):
    """Notes the waits of each step and the devices at the end, and saves a checkpoint between two steps.

    Args:
        found: Where it notes them.
        there: The device.
        file: The checkpoint.
        still: Whether a real device must not be waited for, but for steps that log, the first one and the last.
    """

    def __init__(self, found: Fit, there: Device, file: Path, *, still: bool = False) -> None:
        self.found, self.there, self.file, self.still = found, there, file, still
        self.saved = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.steps = self.found.logged if trainer.loggers else self.found.steps
        loop.advance = partial(self._advance, type(loop).advance, loop)
        loop.on_advance_end = partial(self._end, trainer, loop.on_advance_end)  # which tricks may have wrapped

    def _advance(self, advance: Any, *args: Any) -> None:
        waits = self.there.simulation.waits if self.there.simulation else []
        before, middle = len(waits), 0 < len(self.found.steps) < 3
        with self.there.waits(0) if self.still and middle else nullcontext():
            advance(*args)
        self.steps.append(waits[before:])

    def _end(self, trainer: Any, on_advance_end: Any, *args: Any) -> None:
        on_advance_end(*args)
        if trainer.global_step == SAVED and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.file)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        states = [(weight, state) for one in trainer.optimizers for weight, state in one.state.items()]
        like_weights = [x for weight, state in states for x in state.values() if getattr(x, "shape", 0) == weight.shape]
        self.found.devices |= {x.device.type for x in (*pl_module.parameters(), *pl_module.buffers(), *like_weights)}

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for name in {"advance", "on_advance_end"} & vars(trainer.fit_loop.epoch_loop).keys():
            delattr(trainer.fit_loop.epoch_loop, name)


def fit(
    trick: Enrolment,
    precision: str,
    folder: Path,
    there: Device,
    base: type[Net] = NormNet,
    strategy: Callable[[], Any] = lambda: "auto",
    still: bool = False,
    **settings: Any,
) -> Fit:
    """Fit with accumulation and clipping, where the trick may, validate, log, save, and go on from the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    found, device = Fit(), there.name
    settings |= {} if "accumulate" in trick.refused else {"accumulate_grad_batches": 2}
    settings |= {} if "clip" in trick.refused else {"gradient_clip_val": 0.5}
    watch = Watch(found, there, folder / "middle.ckpt", still=still)
    sharded = issubclass(base, ShardedNet)
    gather = Gather() if sharded else Callback()
    for logs, path in (({"logger": CSVLogger(folder), "log_every_n_steps": 1}, None), ({}, watch.file)):
        if precision == "fp16":
            scaler = torch.amp.GradScaler(device, init_scale=64.0)
            settings["plugins"] = [MixedPrecision("16-mixed", device, scaler=scaler)]
        else:
            settings["precision"] = PRECISIONS[precision]
        module = fitted(
            trick.module(base, "on"),
            **{
                "callbacks": [*trick.make_callbacks("on"), watch, gather],
                "accelerator": there.accelerator,
                "strategy": strategy(),
                "train": loader(trick, pinned=there.name in ("cuda", "xpu")),
                "use_distributed_sampler": False,
                "ckpt_path": path,
                **logs,
                **settings,
            },
        )
        if trick.stops:  # which has gone on by itself
            break
    ended = gather.weights if sharded else weights(module)
    found.weights = {name: value.cpu() for name, value in ended.items()}
    found.races = there.simulation.races if there.simulation else []
    return found


def loader(trick: Enrolment, *, pinned: bool) -> DataLoader[Any]:
    """This rank's batches, in pinned memory, as for a GPU, or in ordinary memory.

    Six an epoch, none of which has as many samples as there are features, which could then be pairs of samples.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batches = resumable(trick, Subset(data(57 * ranks), range(rank, 57 * ranks, ranks)), batch_size=10)
    batches.pin_memory = pinned
    return batches


def bare(needs: tuple[bool, ...], refused: tuple[str, ...]) -> Enrolment:
    """No trick, in a network and with settings as for one: the arguments are ``needs_of(trick)``."""
    return Enrolment(**dict(zip(NEEDS, needs, strict=True)), refused=refused)


def needs_of(trick: Enrolment) -> tuple[tuple[bool, ...], tuple[str, ...]]:
    return tuple(getattr(trick, need) for need in NEEDS), trick.refused


def beyond(steps: list[list[Found]], plain: list[list[Found]]) -> int:
    """The most waits of a step, but for the first and the last, beyond those of a step of a plain fit."""
    return max(map(len, steps[1:-1]), default=0) - max(map(len, plain[1:-1]))
