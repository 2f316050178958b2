"""SAM beside its peers and the machine's own limits: perturbing and restoring, a whole training step, memory.

Run ``python benchmarks/sam.py`` (about five minutes); it prints tables and writes ``benchmarks/results/sam.json``. In
every round all contenders take their turn, shuffled, in one process. Times are medians over the rounds, ratios medians
of the ratios within a round: the load of a machine drifts.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from ema import SETS, Net, aim, architecture
from lightning.pytorch.callbacks import Callback
from machine import Laps, Work, in_turns, machine, memory, over, prepare, spread, table
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.core.weights import copy_
from lightning_tricks.modules.sam_rules import sam_perturb_

OUTPUT = Path(__file__).parent / "results" / "sam.json"
PEERS = ("timm", "pytorch-optimizer")
SEED, RHO = 0, 0.05
FLOOR, OURS, PLAIN = "foreach, the old weights kept", "lightning_tricks", "plain"
NAMES = ("200x64", "resnet50")  # of sets


# -- perturb and restore: each is set up for weights with gradients and gives what is timed ----------------------------


def floor(weights: list[Tensor]) -> Work:
    """Norm, copy, one fused add, copy back: 32 bytes of traffic for each weight."""
    gradients = [weight.grad for weight in weights]

    @torch.no_grad()
    def work() -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        old = [weight.clone() for weight in weights]
        torch._foreach_add_(weights, gradients, alpha=RHO / (norm.item() + 1e-12))
        torch._foreach_copy_(weights, old)

    return work


def ours(weights: list[Tensor]) -> Work:
    """As the mixin does it."""
    gradients = [weight.grad for weight in weights]

    def work() -> None:
        old = [weight.detach().clone() for weight in weights]
        sam_perturb_(weights, gradients, RHO)
        copy_(weights, old)

    return work


class Davda54(torch.optim.Optimizer):
    """The best-known SAM (github.com/davda54/sam, not on PyPI) in its own manner: loops over the tensors."""

    def __init__(self, params: list[Tensor], rho: float) -> None:
        super().__init__(params, {"rho": rho, "adaptive": False})

    @torch.no_grad()
    def first_step(self) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([(1.0 * p.grad).norm(p=2) for p in trained]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_((torch.pow(p, 2) if group["adaptive"] else 1.0) * p.grad * scale.to(p))

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]


def davda54(weights: list[Tensor]) -> Work:
    return in_two_steps(Davda54(weights, RHO))


def pytorch_optimizer(weights: list[Tensor], foreach: bool | None = None) -> Work:
    from pytorch_optimizer import SAM

    sam = SAM(weights, torch.optim.SGD, rho=RHO, foreach=foreach, lr=0.0)
    sam.base_optimizer.step = lambda: None  # which is not what is timed
    return in_two_steps(sam)


def in_two_steps(sam: Any) -> Work:
    def work() -> None:
        sam.first_step()
        sam.second_step()

    return work


CONTENDERS: dict[str, Callable[[list[Tensor]], Work]] = {
    FLOOR: floor,
    OURS: ours,
    "davda54-style": davda54,
    "pytorch-optimizer": pytorch_optimizer,
    "pytorch-optimizer(foreach)": partial(pytorch_optimizer, foreach=True),
}


def of_set(module: nn.Module, rounds: int) -> dict[str, Any]:
    """Time of perturb and restore, and the memory it takes, in copies of the weights."""
    nbytes = sum(weight.nbytes for weight in module.parameters())
    works, space = {}, {}
    for name, contender in CONTENDERS.items():
        weights = list(copy.deepcopy(module).parameters())
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        works[name] = contender(weights)
    times = in_turns([{name: work} for name, work in works.items()], rounds, FLOOR, "cpu")
    for name, work in works.items():
        space[name], _ = memory(work, "cpu", nbytes)
    size = {"tensors": len(list(module.parameters())), "megabytes": round(nbytes / 1e6, 2)}
    return {**size, "perturb_and_restore": times, "copies_of_the_weights": space}


# -- a whole training step ---------------------------------------------------------------------------------------------


class SharpNet(lt.SAMMixin, Net):
    sam = lt.SAM(rho=RHO)


MODULES: dict[str, type[Net]] = {PLAIN: Net, OURS: SharpNet}
# network, shape of its batch, steps of a fit and of a lap
STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "tiny": (lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), (32, 32), 300, 20),
    "resnet50": (lambda: architecture("resnet50"), (32, 3, 64, 64), 5, 1),
}


def fit(name: str, kind: type[Net], steps: int, *callbacks: Callback) -> None:
    """So many steps of a stock Trainer, the batch lying ready."""
    network, shape, _, _ = STEPS[name]
    torch.manual_seed(SEED)
    batch = torch.randn(shape), torch.randint(4, shape[:1])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(kind(network()), DataLoader([batch] * steps, batch_size=None))


def of_steps(name: str, fits: int) -> dict[str, dict[str, float]]:
    """Times of a step, their ratio to the plain one of the round, and memory at its peak."""
    times: dict[str, list[float]] = {each: [] for each in MODULES}
    shuffled = random.Random(SEED)
    _, _, steps, lap = STEPS[name]
    for _ in range(1 + fits):  # the first is not counted
        for each in shuffled.sample(list(MODULES), len(MODULES)):
            laps = Laps(every=lap)
            fit(name, MODULES[each], steps, laps)
            times[each].append(laps.step())
    times = {each: row[1:] for each, row in times.items()}
    nbytes = sum(weight.nbytes for weight in STEPS[name][0]().parameters())
    rows = {}
    for each, row in times.items():
        space, _ = memory(partial(fit, name, MODULES[each], 3), "cpu", nbytes)
        added = spread([sam - plain for sam, plain in zip(row, times[PLAIN], strict=True)])
        ratio = {"over_plain": over(row, times[PLAIN]), "added_median_us": added["median_us"]}
        rows[each] = {**spread(row), **ratio, "peak_copies": space["peak"]}
    return rows


# -- together ----------------------------------------------------------------------------------------------------------


def targets(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What came out, what was aimed at, and whether it was reached."""
    found = {}
    for name, row in result["sets"].items():
        found[f"{name}: perturb + restore / floor"] = aim(row["perturb_and_restore"][OURS]["over_floor"], "<=", 1.15)
        found[f"{name}: copies that it takes"] = aim(row["copies_of_the_weights"][OURS]["peak"], "<=", 1.01)
    step = result["steps"]["resnet50"]
    extra = round(step[OURS]["peak_copies"] - step[PLAIN]["peak_copies"], 3)
    found["resnet50: SAM step / plain step"] = aim(step[OURS]["over_plain"], "<=", 2.1)
    found["resnet50: copies more than a plain step"] = aim(extra, "<=", 1.01)
    return found


def measure(rounds: int, fits: int) -> dict[str, Any]:
    """All figures, printed as they come."""
    sets, steps = {}, {}
    for name in NAMES:
        torch.manual_seed(SEED)
        row = sets[name] = of_set(SETS[name](), rounds)
        for part in ("perturb_and_restore", "copies_of_the_weights"):
            table(f"{name} ({row['tensors']} tensors, {row['megabytes']} MB): {part}", row[part])
    for name in STEPS:
        steps[name] = of_steps(name, fits)
        table(f"training step, {name}", steps[name])
    settings = {"threads": torch.get_num_threads(), "seed": SEED, "rounds": rounds, "fits": fits}
    settings["batches"] = {name: list(shape) for name, (_, shape, _, _) in STEPS.items()}
    result = {"machine": machine(*PEERS), "settings": settings, "sets": sets, "steps": steps}
    result["targets"] = targets(result)
    table("targets", result["targets"])
    return result


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--fits", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not how fast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the figures go")
    args = parser.parse_args()
    prepare(PEERS, args.threads)
    rounds, fits = (2, 1) if args.quick else (args.rounds, args.fits)
    args.output.parent.mkdir(exist_ok=True)
    args.output.write_text(json.dumps(measure(rounds, fits), indent=1) + "\n")


if __name__ == "__main__":
    main()
