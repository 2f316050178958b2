"""EMA beside its peers: an update, showing and hiding the averages, a training step, memory.

The floor of an update is its traffic, of a swap likewise, at the bandwidth of one large copy in the same round: an
update reads two tensors and writes one, a swap reads and writes both, a copy reads one and writes one. The peers but
Lightning's have no swap: they keep a second module. Their step is that of a callback that updates them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from fitted import PLAIN, SETS, SMALL, Callbacks, Net, empty, tiny_fits
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from rows import Row, added_rows, figure, ratio, row, rows_of, target
from settings import SEED, Settings
from space import memory
from timing import Measured, Turn, Work, fits, in_turns, timed, works
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lightning_tricks as lt
from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.weights.local import LocalWeights
from lightning_tricks.core.weights.tensors import copies

NAME = "ema"
PEERS = ("timm", "ema-pytorch")
DECAY = 0.999
OURS, LIGHTNING, COPY = "lightning_tricks EMA", "Lightning EMAWeightAveraging", "one large copy"
TRAFFIC = "its traffic at the copy's bandwidth"
SIZES = {"update": 3 / 2, "swap": 4 / 2}  # traffic over that of a copy


def tracked(module: nn.Module) -> Averages:
    """Averages as the callback keeps them."""
    weights = LocalWeights(module)
    averages = Averages(weights)
    averages.track(weights.trainable())
    return averages


def lerp(module: nn.Module) -> Work:
    """The one operation of torch that an update is."""
    weights = [weight.detach() for weight in module.parameters()]
    averages = copies(weights)
    return lambda: torch._foreach_lerp_(averages, weights, 1 - DECAY)


def averaged_model(module: nn.Module, **options: Any) -> Work:
    model = AveragedModel(module, **options)
    return lambda: model.update_parameters(module)


def timm(module: nn.Module) -> Work:
    from timm.utils import ModelEmaV3

    model = ModelEmaV3(module, decay=DECAY)
    return lambda: model.update(module)


def ema_pytorch(module: nn.Module, **options: bool) -> Work:
    from ema_pytorch import EMA

    model = EMA(module, beta=DECAY, update_every=1, update_after_step=0, include_online_model=False, **options)
    return model.update


UPDATES: dict[str, Callable[[nn.Module], Work]] = {
    OURS: lambda module: partial(tracked(module).lerp, 1 - DECAY),
    "torch._foreach_lerp_": lerp,
    LIGHTNING: lambda module: averaged_model(module, use_buffers=True, avg_fn=get_ema_avg_fn(DECAY)),  # its defaults
    "torch AveragedModel(multi_avg_fn)": lambda m: averaged_model(m, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "timm ModelEmaV3": timm,
    "ema-pytorch": ema_pytorch,
    "ema-pytorch(use_foreach)": lambda module: ema_pytorch(module, use_foreach=True),
}


def our_swap(module: nn.Module, device: str) -> Turn:
    averages = tracked(module)
    averages.lerp(1 - DECAY)
    ways = {"show": partial(averages.show, "averaged"), "hide": partial(averages.show, "raw")}
    return {f"{OURS}, {way}": timed(work, device) for way, work in ways.items()}


def lightning_swap(module: nn.Module, device: str) -> Turn:
    callback = EMAWeightAveraging(decay=DECAY)
    callback.setup(None, module, "fit")
    ways = {"show": callback.on_validation_epoch_start, "hide": callback.on_validation_epoch_end}
    return {f"{LIGHTNING}, {way}": timed(partial(work, None, module), device) for way, work in ways.items()}


class Updates(Callback):
    """A peer in a Trainer."""

    def __init__(self, peer: Callable[[nn.Module], Work]) -> None:
        self.peer = peer

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self.update = self.peer(pl_module)

    def on_train_batch_end(self, *_: Any) -> None:
        self.update()


STEPS: dict[str, Callbacks] = {
    PLAIN: empty,
    OURS: lambda: [lt.EMA(DECAY)],
    LIGHTNING: lambda: [EMAWeightAveraging(decay=DECAY)],
    **{name: lambda name=name: [Updates(UPDATES[name])] for name in list(UPDATES)[3:]},
}


def copy(module: nn.Module) -> Work:
    """As many bytes as the weights, in one piece."""
    count = sum(weight.numel() for weight in module.parameters())
    source = torch.ones(count, device=next(module.parameters()).device)
    return partial(torch.empty_like(source).copy_, source)


def over_traffic(case: str, measured: Measured, size: float) -> list[Row]:
    """Rows with the traffic as the floor, of which the copy is the measure."""
    measured.times[TRAFFIC] = [size * time for time in measured.times.pop(COPY)]
    return rows_of(case, measured, TRAFFIC)


def of_set(name: str, settings: Settings, rounds: int) -> list[Row]:
    """Update, swap and memory on one set of weights."""
    torch.manual_seed(SEED)
    module = Net(SETS[name]()).to(settings.device)
    nbytes = sum(weight.nbytes for weight in module.parameters())
    contenders = {key: partial(make, module) for key, make in {COPY: copy, **UPDATES}.items()}
    found = over_traffic(f"update, {name}", in_turns(works(contenders, settings.device), rounds), SIZES["update"])
    swaps: dict[str, Callable[[], Turn]] = {
        **works({COPY: partial(copy, module)}, settings.device),
        OURS: partial(our_swap, module, settings.device),
        LIGHTNING: partial(lightning_swap, module, settings.device),
    }
    found += over_traffic(f"swap, {name}", in_turns(swaps, rounds), SIZES["swap"])
    for what in (OURS, LIGHTNING, "timm ModelEmaV3"):
        kept, work = memory(partial(UPDATES[what], module), settings.device, nbytes)
        peak, _ = memory(work, settings.device, nbytes)
        found.append(row(f"memory, {name}", f"{what}: kept", [kept["kept"]], "copies"))
        found.append(row(f"memory, {name}", f"{what}: peak of an update", [peak["peak"]], "copies"))
    return found


def run(settings: Settings) -> list[Row]:
    """All figures."""
    names = settings.pick("sets", tuple(SETS), ("200 x 64", "vit_tiny"), SMALL)
    rounds = settings.pick("rounds", 30, 5, 1)
    found = [each for name in names for each in of_set(name, settings, rounds)]
    steps = tiny_fits(STEPS, settings.pick("steps", 300, 120, 60), settings.device)
    measured = in_turns(fits(steps), settings.pick("fits", 10, 2, 1), warm_up=0)
    return [*found, *rows_of("step, tiny", measured, PLAIN), *added_rows("added to a step, tiny", measured, PLAIN)]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """An update by its one operation, a swap by its traffic, and a step."""
    found = []
    for case in dict.fromkeys(each.case for each in rows):
        kind, name = case.split(", ")
        if kind == "update":
            ours, lightning, lowest = (figure(rows, case, each) for each in (OURS, LIGHTNING, "torch._foreach_lerp_"))
            small = name in SMALL
            if not small:
                found.append(target(f"{name}: update over torch._foreach_lerp_", ratio(ours, lowest), "<=", 1.15))
            found.append(
                target(f"{name}: Lightning's update over ours", ratio(lightning, ours), ">=", 8 if small else 3)
            )
        if kind == "swap" and name not in SMALL:
            for way in ("show", "hide"):
                over = figure(rows, case, f"{OURS}, {way}", "over_floor")
                found.append(target(f"{name}: {way} over its traffic", over, "<=", 1.25))
    return [*found, target("tiny: us added to a step", figure(rows, "added to a step, tiny", OURS), "<=", 60)]
