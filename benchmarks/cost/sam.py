"""SAM beside its peers: perturbing and restoring the weights, a whole training step, memory.

The floor of perturbing and restoring is the same in fused operations of torch: norm, copy, one addition, copy back. The
floor of a step is two forward and backward passes in a bare loop. pytorch-optimizer's SAM is stepped by hand in a
Trainer with manual optimization, as its documentation has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from fitted import PLAIN, SETS, SMALL, Batch, Net, architecture, drawn, fit, tiny
from rows import Row, added_rows, figure, row, rows_of, target
from settings import SEED, Settings
from space import memory
from timing import Work, fits, in_turns, timed, works
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core.weights.tensors import copy_
from lightning_tricks.modules.sam.rules import sam_perturb_

NAME = "sam"
PEERS = ("timm", "pytorch-optimizer")
RHO = 0.05
FLOOR, OURS, PEER = "foreach, the old weights kept", "lightning_tricks SAM", "pytorch-optimizer SAM"
TWICE = "2 x forward and backward"


def floor(weights: list[Tensor]) -> Work:
    """Norm, copy, one fused addition, copy back: 32 bytes of traffic for each weight."""
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


def peer(weights: list[Tensor], foreach: bool | None = None) -> Work:
    from pytorch_optimizer import SAM

    sam = SAM(weights, torch.optim.SGD, rho=RHO, foreach=foreach, lr=0.0)
    sam.base_optimizer.step = lambda: None  # which is not what is timed

    def work() -> None:
        sam.first_step()
        sam.second_step()

    return work


CONTENDERS: dict[str, Callable[[list[Tensor]], Work]] = {
    FLOOR: floor,
    OURS: ours,
    PEER: peer,
    f"{PEER}(foreach)": partial(peer, foreach=True),
}


def with_gradients(module: nn.Module) -> list[Tensor]:
    weights = list(copy.deepcopy(module).parameters())
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def of_set(name: str, settings: Settings, rounds: int) -> list[Row]:
    """Time of perturbing and restoring, and the memory it takes."""
    torch.manual_seed(SEED)
    module = SETS[name]().to(settings.device)
    nbytes = sum(weight.nbytes for weight in module.parameters())
    contenders = {what: lambda make=make: make(with_gradients(module)) for what, make in CONTENDERS.items()}
    measured = in_turns(works(contenders, settings.device), rounds)
    found = rows_of(f"perturb and restore, {name}", measured, FLOOR)
    for what in (FLOOR, OURS, PEER):
        if what in measured.failed:
            continue
        taken, _ = memory(CONTENDERS[what](with_gradients(module)), settings.device, nbytes)
        found.append(row(f"peak memory, {name}", what, [taken["peak"]], "copies"))
    return found


class SharpNet(lt.SAMMixin, Net):
    sam = lt.SAM(rho=RHO)


class PeerNet(Net):
    """With pytorch-optimizer's SAM, which wants a closure."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Batch) -> None:
        optimizer = self.optimizers().optimizer

        def again() -> Tensor:
            loss = Net.training_step(self, batch)
            loss.backward()
            return loss

        again()
        optimizer.step(again)
        optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from pytorch_optimizer import SAM

        return SAM(self.parameters(), torch.optim.SGD, rho=RHO, lr=1e-3)


MODULES: dict[str, type[Net]] = {PLAIN: Net, OURS: SharpNet, PEER: PeerNet}
# network, shape of its batch, steps of a fit and of a lap
STEPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "tiny": (tiny, (32, 32), 300, 20),
    "resnet50": (lambda: architecture("resnet50"), (16, 3, 64, 64), 4, 1),
}


def stepped(name: str, kind: type[Net], device: str) -> float:
    """Microseconds of a step in a Trainer."""
    network, shape, steps, lap = STEPS[name]
    torch.manual_seed(SEED)
    return fit(kind(network()), drawn(shape, 4, device), steps, every=lap)


def twice(name: str, device: str) -> float:
    """Microseconds of two forward and backward passes without a Trainer."""
    network, shape, steps, _ = STEPS[name]
    torch.manual_seed(SEED)
    module, batch = Net(network()).to(device), drawn(shape, 4, device)

    def pass_() -> None:
        module.zero_grad()
        module.training_step(batch).backward()

    work = timed(pass_, device)
    return 2 * median([work() for _ in range(steps)][1:])


def of_step(name: str, rounds: int, settings: Settings) -> list[Row]:
    """Times of a step over the floor, and what is added to a plain one."""
    contenders = {TWICE: partial(twice, name, settings.device)}
    contenders |= {what: partial(stepped, name, kind, settings.device) for what, kind in MODULES.items()}
    measured = in_turns(fits(contenders), rounds, warm_up=0)
    unit = "us" if name == "tiny" else "ms"
    found = rows_of(f"step, {name}", measured, TWICE, unit)
    over_plain = rows_of(f"step over a plain one, {name}", measured, PLAIN, unit)
    return [*found, *over_plain[1:], *added_rows(f"added to a step, {name}", measured, PLAIN, unit)[1:]]


def run(settings: Settings) -> list[Row]:
    """All figures."""
    rounds = settings.pick("rounds", 30, 5, 1)
    names = settings.pick("sets", ("200 x 64", "resnet50"), SMALL, SMALL)
    found = [each for name in names for each in of_set(name, settings, rounds)]
    for name, count in settings.pick(
        "fits", {"tiny": 10, "resnet50": 3}, {"tiny": 2, "resnet50": 1}, {"tiny": 1}
    ).items():
        found += of_step(name, count, settings)
    return found


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Perturbing by its floor, a step by a plain one, memory by one copy."""
    found = []
    for name in [each.case.split(", ")[1] for each in rows if each.case.startswith("peak") and each.what == OURS]:
        over = figure(rows, f"perturb and restore, {name}", OURS, "over_floor")
        found.append(target(f"{name}: perturb and restore over the floor", over, "<=", 1.15))
        copies = figure(rows, f"peak memory, {name}", OURS)
        found.append(target(f"{name}: copies of the weights", copies, "<=", 1.05))
    if any(each.case == "step, resnet50" for each in rows):
        over = figure(rows, "step over a plain one, resnet50", OURS, "over_floor")
        found.append(target("resnet50: step over a plain one", over, "<=", 2.1))
    return found
