"""EMA beside its peers and the machine's own limits: update, swap, training step and memory.

Run ``python benchmarks/ema.py`` (about three minutes; ``--device cuda`` on a GPU); it prints tables and writes
``benchmarks/results/ema.json`` (``ema_cuda.json``). In every round all contenders take their turn, shuffled, in one
process. Times are medians over the rounds, ratios medians of the ratios within a round: the load of a machine drifts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from machine import Work, fit, in_turns, machine, memory, prepare, spread, table
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import lightning_tricks as lt
from lightning_tricks.core.averages import Averages
from lightning_tricks.core.shards import LocalWeights
from lightning_tricks.core.weights import copies

RESULTS = Path(__file__).parent / "results"
PEERS = ("timm", "ema-pytorch")
SEED, DECAY = 0, 0.999
STEPS = 300  # of a fit
LERP, COPY, EMPTY = "_foreach_lerp_", "_foreach_copy_", "empty callback"
OURS, LIGHTNING = "lightning_tricks", "Lightning EMAWeightAveraging"


# -- contenders: each is set up for a module and gives what is timed --------------------------------------------------


def foreach(module: nn.Module, operation: Callable[..., None], *fraction: float) -> Work:
    weights = [weight.detach() for weight in module.parameters()]
    averages = copies(weights)
    return lambda: operation(averages, weights, *fraction)


def tracked(module: nn.Module) -> Averages:
    weights = LocalWeights(module)
    averages = Averages(weights)
    averages.track(weights.trainable())
    return averages


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
    LERP: lambda module: foreach(module, torch._foreach_lerp_, 1 - DECAY),
    COPY: lambda module: foreach(module, torch._foreach_copy_),
    OURS: lambda module: partial(tracked(module).lerp, 1 - DECAY),
    LIGHTNING: lambda module: averaged_model(module, use_buffers=True, avg_fn=get_ema_avg_fn(DECAY)),  # its defaults
    "torch AveragedModel(multi_avg_fn)": lambda m: averaged_model(m, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "timm ModelEmaV3": timm,
    "ema-pytorch": ema_pytorch,
    "ema-pytorch(use_foreach)": lambda module: ema_pytorch(module, use_foreach=True),
}


def our_swap(module: nn.Module) -> tuple[Work, Work]:
    averages = tracked(module)
    averages.lerp(1 - DECAY)
    return partial(averages.show, "averaged"), partial(averages.show, "raw")


def lightning_swap(module: nn.Module) -> tuple[Work, Work]:
    callback = EMAWeightAveraging(decay=DECAY)
    callback.setup(None, module, "fit")
    show, hide = callback.on_validation_epoch_start, callback.on_validation_epoch_end
    return partial(show, None, module), partial(hide, None, module)


SWAPS = {OURS: our_swap, LIGHTNING: lightning_swap}


# -- what they work on ------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """A network with the loss and the optimizer of any classifier."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def architecture(name: str) -> nn.Module:
    import timm

    return timm.create_model(name)


SETS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: architecture("resnet50"),
    "vit_tiny": lambda: architecture("vit_tiny_patch16_224"),
    "200x64": lambda: nn.ParameterList([torch.randn(64) for _ in range(200)]),
}
LARGE = ("resnet50", "vit_tiny")
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {  # each with the shape of its batch
    "tiny": (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), (32, 32)),
    "vit_tiny": (SETS["vit_tiny"], (16, 3, 224, 224)),
}
TRAINED = {"cpu": ("tiny",), "cuda": ("tiny", "vit_tiny")}


# -- figures ----------------------------------------------------------------------------------------------------------


def of_set(module: Net, rounds: int, device: str) -> dict[str, Any]:
    """Update, swap and memory on one set of weights."""
    weights = list(module.parameters())
    count, nbytes = sum(w.numel() for w in weights), sum(w.nbytes for w in weights)
    space, works = {}, {}
    for name, contender in UPDATES.items():
        space[f"{name}: track"], works[name] = memory(partial(contender, module), device, count)
    update = in_turns([{name: work} for name, work in works.items()], rounds, LERP, device)
    for name, work in works.items():
        space[f"{name}: update"], _ = memory(work, device, count)
        # a copy reads and writes, an update reads both and writes
        update[name]["GB_per_s"] = round((2 if name == COPY else 3) * nbytes / update[name]["median_us"] / 1e3, 2)

    turns = [{COPY: works[COPY]}]
    del works
    for name, contender in SWAPS.items():
        turns.append({f"{name}: swap {way}": work for way, work in zip(("in", "out"), contender(module), strict=True)})
        space.update({way: memory(work, device, count)[0] for way, work in turns[-1].items()})
    swap = in_turns(turns, rounds, COPY, device)
    size = {"tensors": len(weights), "megabytes": round(nbytes / 1e6, 2)}
    return {**size, "update": update, "swap": swap, "bytes_per_parameter": space}


def of_steps(name: str, fits: int, device: str) -> dict[str, dict[str, float]]:
    """Step times with each callback, and what it adds to an empty one in the same round."""
    network, shape = NETWORKS[name]
    batch = torch.randn(shape, device=device), torch.randint(4, shape[:1], device=device)
    callbacks = {EMPTY: Callback, OURS: lt.EMA, LIGHTNING: partial(EMAWeightAveraging, device=device)}
    if device == "cuda":
        callbacks[f"{OURS} EMA(device='cpu')"] = partial(lt.EMA, device="cpu")
    times: dict[str, list[float]] = {each: [] for each in callbacks}
    for _ in range(1 + fits):  # the first is not counted
        for each, callback in callbacks.items():
            torch.manual_seed(SEED)
            times[each].append(fit(Net(network()), batch, STEPS, callback(), device))
    rows = {}
    for each, steps in times.items():
        added = spread([step - empty for step, empty in zip(steps[1:], times[EMPTY][1:], strict=True)])
        rows[each] = {**spread(steps[1:]), **{f"added_{key}": value for key, value in added.items()}}
    return rows


def targets(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What came out, what was aimed at, and whether it was reached."""
    found = {}
    for name, row in result["sets"].items():
        update, swap = row["update"], row["swap"]
        if name in LARGE:
            found[f"{name}: our update / lerp floor"] = aim(update[OURS]["over_floor"], "<=", 1.15)
        faster = round(update[LIGHTNING]["over_floor"] / update[OURS]["over_floor"], 2)
        found[f"{name}: Lightning's update / ours"] = aim(faster, ">=", 3 if name in LARGE else 8)
        for way in ("in", "out"):
            found[f"{name}: our swap {way} / one copy"] = aim(swap[f"{OURS}: swap {way}"]["over_floor"], "<=", 2)
    found["tiny: us that EMA adds to a step"] = aim(result["steps"]["tiny"][OURS]["added_median_us"], "<=", 60)
    return found


def aim(value: float, sign: str, limit: float) -> dict[str, Any]:
    return {"value": value, "target": f"{sign} {limit}", "met": value <= limit if sign == "<=" else value >= limit}


def measure(rounds: int, fits: int, device: str) -> dict[str, Any]:
    """All figures, printed as they come."""
    sets, steps = {}, {}
    for name, network in SETS.items():
        torch.manual_seed(SEED)
        row = sets[name] = of_set(Net(network()).to(device), rounds, device)
        for part in ("update", "swap", "bytes_per_parameter"):
            table(f"{name} ({row['tensors']} tensors, {row['megabytes']} MB): {part}", row[part])
    for name in TRAINED[device]:
        steps[name] = of_steps(name, fits, device)
        table(f"training step, {name}", steps[name])
    place = torch.cuda.get_device_name() if device == "cuda" else device
    settings = {"device": place, "threads": torch.get_num_threads(), "seed": SEED, "rounds": rounds, "fits": fits}
    result = {"machine": machine(*PEERS), "settings": settings, "sets": sets, "steps": steps}
    result["targets"] = targets(result)
    table("targets", result["targets"])
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--fits", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, help="where the figures go")
    args = parser.parse_args()
    prepare(PEERS, args.threads)
    rounds, fits = (2, 1) if args.quick else (args.rounds, args.fits)
    output = args.output or RESULTS / ("ema.json" if args.device == "cpu" else "ema_cuda.json")
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(measure(rounds, fits, args.device), indent=1) + "\n")


if __name__ == "__main__":
    main()
