"""Groups split under a schedule follow it as groups that were there from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as of_torch

import lightning_tricks as lt
from lightning_tricks.schedules.split_groups import split_groups
from tests.nets import TORCH_2_9

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "CurveLR": lambda o: lt.cosine(o, total_steps=12, warmup=3)["lr_scheduler"]["scheduler"],
    "swa_tail": lambda o: lt.swa_tail(lt.cosine(o, total_steps=12), swa_lr=0.1)["lr_scheduler"]["scheduler"],
    "one_cycle": lambda o: lt.one_cycle(o, total_steps=12)["lr_scheduler"]["scheduler"],
    "PlateauLR": lambda o: lt.reduce_on_plateau(o, warmup=4, patience=1)["lr_scheduler"]["scheduler"],
    "LambdaLR": lambda o: of_torch.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: of_torch.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: of_torch.StepLR(o, 3),
    "MultiStepLR": lambda o: of_torch.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: of_torch.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: of_torch.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: of_torch.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: of_torch.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: of_torch.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: of_torch.CyclicLR(o, *rates(o, 0.1), step_size_up=3),
    "OneCycleLR": lambda o: of_torch.OneCycleLR(o, rates(o, 1.0)[0], total_steps=12),
    "ReduceLROnPlateau": lambda o: of_torch.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: of_torch.SequentialLR(
        o, [of_torch.LinearLR(o, total_iters=3), of_torch.CosineAnnealingLR(o, 5)], [3]
    ),
    "ChainedScheduler": lambda o: of_torch.ChainedScheduler(
        [of_torch.LinearLR(o, total_iters=3), of_torch.ExponentialLR(o, 0.9)]
    ),
}


def rates(optimizer: Optimizer, factor: float) -> tuple[list[float], list[float]]:
    """The learning rate of each group times a factor, and ten times that."""
    lrs = [float(group["lr"]) * factor for group in optimizer.param_groups]
    return lrs, [10 * lr for lr in lrs]


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((1,), float(n + 1))) for n in range(count)]


def lrs_of(optimizer: Optimizer, scheduler: Any, given: list[nn.Parameter], steps: int = 10) -> list[list[float]]:
    """The learning rate of each weight, in each step."""
    seen = []
    for step in range(steps):
        optimizer.step()  # a group that has joined gets its learning rate in here
        by_weight = {id(weight): float(group["lr"]) for group in optimizer.param_groups for weight in group["params"]}
        seen.append([by_weight[id(weight)] for weight in given])
        plateau = isinstance(scheduler, of_torch.ReduceLROnPlateau)
        scheduler.step(*([float(step)] if plateau else []))
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_split_group_follows_the_schedule_as_one_that_was_there(name: str) -> None:
    for lr in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        if TORCH_2_9 and isinstance(lr, torch.Tensor) and name == "SequentialLR":
            continue  # a limit of torch 2.9: its SequentialLR overwrites base learning rates that are Tensors
        split, whole = weights(4), weights(4)
        optimizer = SGD([{"params": split[:3]}, {"params": split[3:], "lr": lr * 0.2}], lr=lr, momentum=0.9)
        scheduler = SCHEDULES[name](optimizer)
        split_groups(optimizer, [scheduler], [([split[1]], 0.1), ([split[2], split[3]], 0.01)])
        groups = [(whole[0], 1.0), (whole[3], 0.2 * 0.01), (whole[1], 0.1), (whole[2], 0.01)]
        reference = SGD([{"params": [weight], "lr": 0.5 * factor} for weight, factor in groups], momentum=0.9, lr=0.5)
        expected = lrs_of(reference, SCHEDULES[name](reference), whole)
        for ours, theirs in zip(lrs_of(optimizer, scheduler, split), expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-12)
        tensors = [group["lr"] for group in optimizer.param_groups if isinstance(group["lr"], torch.Tensor)]
        assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)  # each group has its own


def test_settings_and_order_of_the_groups_stay() -> None:
    given = weights(5)
    groups = [{"params": given[:3], "name": "body", "weight_decay": 0.1}, {"params": given[3:], "name": "head"}]
    optimizer = Adam(groups, lr=1.0)
    split_groups(optimizer, [], [([given[0], given[4]], 0.5), ([given[1]], 0.25)])
    seen = [(group["name"], group["params"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert seen == [
        ("body", [given[2]], 1.0, 0.1),
        ("head", [given[3]], 1.0, 0),
        ("body_1", [given[0]], 0.5, 0.1),
        ("head_1", [given[4]], 0.5, 0),
        ("body_2", [given[1]], 0.25, 0.1),
    ]


def test_parameters_that_came_with_names_keep_them() -> None:
    layer = nn.Linear(2, 2)
    optimizer = SGD(layer.named_parameters(), lr=1.0)
    split_groups(optimizer, [], [([layer.bias], 0.5)])
    assert [group["param_names"] for group in optimizer.param_groups] == [["weight"], ["bias"]]
    assert optimizer.param_groups[1]["params"] == [layer.bias]


def test_a_scheduler_of_another_kind_is_refused() -> None:
    class Own(of_torch.LambdaLR):
        pass

    given = weights(2)
    optimizer = SGD(given, lr=1.0)
    for scheduler in (Own(optimizer, lambda step: 1.0), of_torch.ChainedScheduler([Own(optimizer, float)])):
        with pytest.raises(TypeError, match=r"a scheduler of torch.optim.lr_scheduler .*, got Own: use one"):
            split_groups(optimizer, [scheduler], [([given[0]], 0.5)])
    assert len(optimizer.param_groups) == 1


def test_an_optimizer_of_one_group_is_refused() -> None:
    given = weights(2)
    with pytest.raises(TypeError, match="LBFGS has one parameter group"):
        split_groups(torch.optim.LBFGS(given), [], [([given[0]], 0.5)])
