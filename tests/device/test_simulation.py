"""The simulated device does what torch documents about devices, and finds every fault that is planted in a step.

https://docs.pytorch.org/docs/stable/notes/cuda.html and torch.cuda.set_sync_debug_mode; on a real device (``gpu``) the
same statements are checked, which wait under that mode "error".
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.device.python_names import simulated
from tests.device.simulation import Found, Simulation
from tests.nets import NormNet, build, fit

Statement = Callable[[Tensor], object]  # of a tensor (8, 2) on the device


def pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, pin_memory=True)


def copied_over(x: Tensor) -> Tensor:
    return pinned(x).copy_(x, non_blocking=True)


def overwritten(x: Tensor) -> None:
    source = torch.ones(3).pin_memory()
    source.to(x.device, non_blocking=True)
    source.zero_()


def waited_for(x: Tensor) -> float:
    host = copied_over(x)
    event = torch.cuda.Event()
    event.record()
    while not event.query():  # which does not stop the host
        pass
    return host.sum().item()


def assigned(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = torch.ones_like(x).flatten()
    return x


def filled(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = 0.0
    return x


WAITS: dict[str, Statement] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "if": lambda x: bool(x.isfinite().all()),
    "a number in a list": lambda x: torch.tensor([x[0, 0], 1.0]),
    "text": lambda x: f"{x.sum()}",
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(force=True),
    "pickle": lambda x: pickle.dumps(x.cpu()),
    "copy_ into host memory": lambda x: torch.empty(x.shape).copy_(x),
    "copy_ from host memory": lambda x: x.clone().copy_(torch.ones(8, 2)),
    "a blocking copy to the device": lambda x: torch.ones(3).to(x.device),
    "a list made a tensor": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "nonzero": lambda x: x.nonzero(),
    "where of one argument": lambda x: torch.where(x > 0),
    "an index that is a mask": lambda x: x[x > 0],
    "an assignment to a mask": assigned,
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x.clone()),
    "bincount": lambda x: torch.bincount((x[:, 0] > 0).long()),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > -9).long(), dim=0),
    "an index in host memory": lambda x: x[torch.tensor([0, 1])],
    "synchronize": lambda x: torch.cuda.synchronize(),
}
ERRORS: dict[str, Statement] = {
    "a tensor made without a device": lambda x: x + torch.zeros(8, 2),
    "written into host memory": lambda x: torch.zeros(8, 2).add_(x),
    "a number in host memory that is written to": lambda x: torch.tensor(0.0).add_(x.sum()),
    "stack": lambda x: torch.stack([x, torch.zeros(8, 2)]),
    "a sum that starts in host memory": lambda x: sum([x], torch.zeros(8, 2)),
    "targets in host memory": lambda x: F.cross_entropy(x, torch.zeros(8).long()),
    "weights in host memory": lambda x: nn.Linear(2, 3)(x),
    "an average in host memory": lambda x: torch.zeros(8, 2).lerp_(x, 0.5),
    "a list of tensors": lambda x: torch._foreach_add([x], [torch.zeros(8, 2)]),
    "a generator of the host": lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
    "indices on the device for a tensor in host memory": lambda x: torch.zeros(9)[x[0].long()],
    "numpy without a copy": lambda x: x.numpy(),
}
RACES: dict[str, Statement] = {
    "read too early": lambda x: x.to("cpu", non_blocking=True).sum(),
    "read too early in pinned memory": lambda x: copied_over(x).sum().item(),
    "a list read too early": lambda x: copied_over(x).tolist(),
    "overwritten too early": overwritten,
}
FINE: dict[str, Statement] = {
    "a number in host memory": lambda x: x * torch.tensor(2.0) + torch.tensor(1.0),
    "made on the device": lambda x: x + torch.zeros(8, 2, device=x.device) + torch.ones_like(x) + x.new_zeros(2),
    "a number made on the device": lambda x: torch.full((), 2.0, device=x.device) * x,
    "a copy that does not block": lambda x: x + torch.ones(8, 2).to(x.device, non_blocking=True),
    "a copy that has been waited for": waited_for,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "a number assigned to a mask": filled,
    "indices on the device": lambda x: x[torch.arange(3, device=x.device)],
    "sorting and the largest": lambda x: (x.sort(), x.topk(2), x.argmax(), x.quantile(0.5)),
    "dropout": lambda x: F.dropout(x),
    "norms of lists": lambda x: torch._foreach_norm([x, x]),
    "repeat_interleave of a known size": lambda x: x.repeat_interleave(
        torch.ones(8, dtype=torch.long, device=x.device), dim=0, output_size=8
    ),
}


class Plant(Callback):
    """Executes a statement in each training step, and notes what is found in the step."""

    def __init__(self, statement: Statement, simulation: Simulation) -> None:
        self.statement, self.simulation = statement, simulation
        self.found: list[Found] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.simulation.waits.clear()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            self.statement(pl_module.layers[-1].weight.new_ones(8, 2))

    def on_train_batch_end(self, *_: Any) -> None:
        self.found += [*self.simulation.waits, *self.simulation.races]
        self.simulation.races.clear()


def planted(statement: Statement, **device: Any) -> list[Found]:
    """What the simulation finds in two training steps with the statement in each."""
    with simulated(**device) as simulation:
        plant = Plant(statement, simulation)
        fit(build(NormNet), callbacks=[plant], accelerator="cuda", max_steps=2)
    return plant.found


@pytest.mark.few(8)
@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for_is_found(name: str) -> None:
    found = planted(WAITS[name])
    assert len(found) == 2
    assert all("test_simulation.py" in each.where for each in found)


@pytest.mark.parametrize("name", ERRORS)
def test_devices_that_do_not_agree_raise(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match="device"):
        planted(ERRORS[name])


@pytest.mark.parametrize("name", RACES)
def test_what_nobody_waits_for_is_found(name: str) -> None:
    found = [each for each in planted(RACES[name]) if "nobody has waited" in each.what]
    assert len(found) == 2
    assert all("test_simulation.py" in each.where for each in found)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", FINE)
def test_what_needs_no_wait_is_not_found(name: str) -> None:
    assert planted(FINE[name]) == []


@pytest.mark.parametrize(
    "statement",
    [
        lambda x: x.double(),
        lambda x: x.to(torch.float64),
        lambda x: torch.zeros(3, dtype=torch.float64, device=x.device),
        lambda x: torch.tensor(0.5, dtype=torch.float64).to(x.device),
    ],
)
def test_a_device_may_lack_types(statement: Statement) -> None:
    planted(statement)
    with pytest.raises(TypeError, match=r"Cannot convert a tensor to torch.float64"):
        planted(statement, lacks=[torch.float64])


def test_random_numbers_of_the_device_are_its_own() -> None:
    with simulated():
        torch.manual_seed(3)
        host = torch.get_rng_state()
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device="cuda")
        assert torch.equal(torch.get_rng_state(), host)
        torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), first)
        drawn = torch.rand(3, device="cuda", generator=torch.cuda.default_generators[0])
        assert drawn.device == torch.device("cuda", 0)


def test_where_a_tensor_is_goes_with_what_is_made_of_it() -> None:
    with simulated(index=1, count=2):
        x = torch.ones(8, 2, device="cuda")
        made = [x[0], x.T, x + 1, x.clone(), copy.deepcopy(x), torch.zeros_like(x), x.new_tensor([1.0]), x.sum()]
        module = copy.deepcopy(nn.Linear(2, 3).to(x))
        module(x).sum().backward()
        made += [weight.grad for weight in module.parameters()]
        assert {each.device for each in made} == {torch.device("cuda", 1)}
        assert all(each.is_cuda and not each.is_cpu and each.get_device() == 1 for each in made)
        assert {each.device.type for each in (x.cpu(), torch.zeros_like(x, device="cpu"))} == {"cpu"}


def test_nothing_of_it_remains() -> None:
    before = torch.Tensor.device, torch.zeros, torch.cuda.is_available()
    with pytest.raises(ZeroDivisionError), simulated():
        raise ZeroDivisionError
    assert (torch.Tensor.device, torch.zeros, torch.cuda.is_available()) == before


# -- on a device of either sort ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAITS)
def test_so_it_is_on_a_real_device(name: str) -> None:
    x = torch.ones(8, 2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            WAITS[name](x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
