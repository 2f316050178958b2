"""All callbacks together: what they add to a step of a tiny network under a stock Trainer, and of a real one.

``ALL`` is every callback that averages, schedules, looks and clips; ``MIXING`` is Mixup and CutMix, which by nature
compute a second loss. Their floor are ``empty hooks``: what Lightning itself takes to call as many stock callbacks that
do nothing. Left out are those that by nature run the network once more (SAM, HardExampleFilter,
ActivationCheckpointing; the first two have benchmarks of their own) or otherwise (Compile, ChannelsLast, HiddenMixup).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fitted import PLAIN, Batch, Callbacks, Net, architecture, drawn, empty, fit
from lightning.pytorch.callbacks import Callback
from rows import Row, added_rows, figure, rows_of, target
from settings import SEED, Settings
from timing import Measured, fits, in_turns
from torch import nn

import lightning_tricks as lt

NAME = "together"
REAL = "step, ViT-tiny"
OVER = "over empty hooks"
PEERS = ("timm",)
ONE: dict[str, Callable[[], Callback]] = {
    "EMA": lt.EMA,
    "SWA": lambda: lt.SWA(validate="raw", at_end="raw", recalibrate_batchnorm=False),
    "LRSchedule": lambda: lt.LRSchedule("flat_cos", warmup=0.05),
    "SkipNonFinite": lt.SkipNonFinite,
    "TerminateOnNonFinite": lt.TerminateOnNonFinite,
    "RewindOnSpike": lt.RewindOnSpike,
    "AdaptiveClip": lt.AdaptiveClip,
    "AutoClip": lt.AutoClip,
    "GradualUnfreeze": lambda: lt.GradualUnfreeze(at=[0], parameters=["^net"]),
    "BatchSizeWarmup": lambda: lt.BatchSizeWarmup(1, final=1),
    "Doctor": lt.Doctor,
}
MIX: dict[str, Callable[[], Callback]] = {"Mixup": lt.Mixup, "CutMix": lt.CutMix}  # of each batch one
USUAL = ("EMA", "SWA", "LRSchedule", "SkipNonFinite")
EVERYDAY, ALL, MIXING = " + ".join(USUAL), "ALL", "ALL + MIXING"


def made(kinds: Sequence[Callable[[], Callback]]) -> list[Callback]:
    return [kind() for kind in kinds]


SUMS: dict[str, Callbacks] = {
    EVERYDAY: partial(made, [ONE[name] for name in USUAL]),
    ALL: partial(made, list(ONE.values())),
    MIXING: partial(made, [*ONE.values(), lambda: lt.Mixup(prob=0.5), lambda: lt.CutMix(prob=0.5)]),
}
HOOKS = {name: f"empty hooks for {name}" for name in SUMS}
LIMITS = {EVERYDAY: 120, ALL: 350, MIXING: 600}  # microseconds over empty hooks; a mixed batch alone may take 250
TINY: dict[str, Callbacks] = {
    PLAIN: empty,
    **SUMS,
    **{HOOKS[name]: lambda each=each: [Callback() for _ in each()] for name, each in SUMS.items()},
    **{name: partial(made, [kind]) for name, kind in {**ONE, **MIX}.items()},
}


def tiny() -> nn.Module:
    """So small that what counts is what surrounds it; of images, since CutMix cuts them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


def step(network: Callable[[], nn.Module], batch: Batch, steps: int, lap: int, callbacks: Callbacks) -> float:
    """Microseconds of a step."""
    torch.manual_seed(SEED)
    return fit(Net(network()), batch, steps, callbacks(), every=lap)


def run(settings: Settings) -> list[Row]:
    """The tiny network with each and with all, the real one with all."""
    steps = settings.pick("steps", 400, 200, 60)
    small = drawn((32, 1, 8, 4), 4, settings.device)
    contenders = {name: partial(step, tiny, small, steps, 20, each) for name, each in TINY.items()}
    measured = in_turns(fits(contenders), settings.pick("fits", 8, 2, 1), warm_up=0)
    found = [*rows_of("step, tiny", measured, PLAIN), *added_rows("added to a step, tiny", measured, PLAIN)]
    for name, hooks in HOOKS.items():
        pair = Measured({each: measured.times[each] for each in (name, hooks)}, {})
        found += added_rows(OVER, pair, hooks)
    name = settings.pick("network", "vit_tiny_patch16_224", "vit_tiny_patch16_224", "")
    if name:
        batch = drawn(settings.pick("batch", (16, 3, 224, 224), (4, 3, 224, 224), ()), 4, settings.device)
        real = {PLAIN: empty, **SUMS}
        contenders = {key: partial(step, partial(architecture, name), batch, 5, 1, each) for key, each in real.items()}
        measured = in_turns(fits(contenders), settings.pick("fits of the real one", 15, 1, 1), warm_up=0)
        found += rows_of(REAL, measured, PLAIN, "ms")
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Microseconds added to the tiny step besides what empty hooks take, and the share of the real one."""
    found = [
        target(f"us added to a tiny step by {name}, {OVER}", figure(rows, OVER, name), "<=", limit)
        for name, limit in LIMITS.items()
    ]
    if any(each.case == REAL for each in rows):
        overs = {name: figure(rows, REAL, name, "over_floor") for name in SUMS}
        found += [
            target(f"a real step with {name}, over a plain one", over, "<=", 1.01) for name, over in overs.items()
        ]
    return found
