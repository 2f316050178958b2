"""What a step writes into weights by itself is restored or named, and attributes of TorchScript are restored."""

from __future__ import annotations

import gc
import random
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_tricks.core.replay.containers import run_all
from lightning_tricks.core.replay.module_state import ModuleState

Write = Callable[[Tensor, Tensor], object]


def assigned(x: Tensor, y: Tensor) -> None:
    x.data = x.data * 0.5 + y.data * 0.5


def in_place(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.lerp_(y, 0.5)


def clamped(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.clamp_(max=0.01)


THROUGH_DATA: dict[str, Write] = {
    "assigned": assigned,
    "operation": lambda x, y: x.data.lerp_(y.data, 0.5),
    "several": lambda x, y: torch._foreach_lerp_([x.data], [y.data], 0.5),
    "copied": lambda x, y: x.data.copy_(x.data * 0.5 + y.data * 0.5),
    "numpy": lambda x, y: x.data.numpy().fill(0.5),
    "assigned twice": lambda x, y: (assigned(x, y), assigned(x, y)),
}
BY_VERSION: dict[str, Write] = {
    "in place": in_place,
    "detached": lambda x, y: x.detach().lerp_(y.detach(), 0.5),
    "clamped": clamped,
}


class Taught(nn.Module):
    """A student, and a teacher that follows it: a module, one that is hidden in a list, or a list of tensors."""

    def __init__(self, write: Write, trains: bool = False, place: str = "registered") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(trains)
        self.write, self.held = write, [teacher]
        if place == "registered":
            self.teacher, self.held = teacher, []
        elif place == "tensors":
            self.held = [weight.detach().clone() for weight in teacher.parameters()]

    def own(self) -> list[Tensor]:
        if hasattr(self, "teacher"):
            return list(self.teacher.parameters())
        return list(self.held[0].parameters()) if isinstance(self.held[0], nn.Module) else self.held

    def step(self) -> None:
        for own, others in zip(self.own(), self.student.parameters(), strict=True):
            self.write(own, others)

    def values(self) -> list[list[float]]:
        return [weight.detach().flatten().tolist() for weight in self.own()]


places = pytest.mark.parametrize("place", ["registered", "hidden", "tensors"])


@places
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("write", THROUGH_DATA.values(), ids=THROUGH_DATA)
def test_what_is_written_through_data_is_restored(write: Write, trains: bool, place: str) -> None:
    module = Taught(write, trains, place)
    before, addresses = module.values(), [weight.data_ptr() for weight in module.own()]
    state = ModuleState(module)
    with state.watching():
        module.step()
    written = module.values()
    assert written != before
    state.refuse_writes()
    after = state.now()
    state.restore()
    assert module.values() == before
    assert [weight.data_ptr() for weight in module.own()] == addresses
    with after.watching():
        module.step()
    assert module.values() == written  # a second run begins where the first one did
    module.step()
    after.restore()
    assert module.values() == written


@places
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("write", BY_VERSION.values(), ids=BY_VERSION)
def test_what_is_written_in_other_ways_is_refused_by_its_path(write: Write, trains: bool, place: str) -> None:
    module = Taught(write, trains, place)
    state = ModuleState(module)
    with state.watching():
        state.refuse_writes()
        module.step()
    name = {"registered": "teacher.weight", "hidden": r"held\[0\].weight", "tensors": r"Taught.held\[0\]"}[place]
    kind = "tensor" if place == "tensors" else "parameter" if trains else "frozen parameter"
    with pytest.raises(MisconfigurationException, match=f"A step of Taught writes into the {kind} {name}, and a sec"):
        state.refuse_writes()
    assert str(state.written()).endswith(".held[0]" if place == "tensors" else ".weight")


def test_data_that_is_taken_after_another_write_does_not_hide_it() -> None:
    module = Taught(lambda x, y: (in_place(x, y), x.data.mul_(2)))
    state = ModuleState(module)
    with state.watching():
        module.step()
    with pytest.raises(MisconfigurationException, match=r"teacher\.weight"):
        state.refuse_writes()


def test_data_that_is_only_read_changes_nothing() -> None:
    module = Taught(lambda x, y: x.data.norm())
    state = ModuleState(module)
    with state.watching():
        module.step()
    assert state.written() is None
    state.refuse_writes()
    before = module.values()
    state.restore()
    assert module.values() == before


def test_outside_of_a_watch_weights_may_move_as_zero3_moves_them() -> None:
    module = Taught(assigned)
    state = ModuleState(module)
    module.step()
    before = module.values()
    state.refuse_writes()
    state.restore()
    assert module.values() == before


@pytest.mark.parametrize("write", [clamped, in_place, assigned])
def test_weights_of_one_number_may_be_written_in_any_way(write: Write) -> None:
    module = nn.ParameterDict({"number": nn.Parameter(torch.tensor(3.0)), "vector": nn.Parameter(torch.ones(1))})
    state = ModuleState(module)
    with state.watching():
        for weight in module.values():
            write(weight, torch.zeros_like(weight))
    state.refuse_writes()
    state.restore()
    assert (module["number"].item(), module["vector"].item()) == (3.0, 1.0)


@pytest.mark.parametrize("layer", [nn.Embedding(4, 3, max_norm=0.1), nn.EmbeddingBag(4, 3, max_norm=0.1)])
def test_an_embedding_may_bound_its_norms(layer: nn.Module) -> None:
    state = ModuleState(layer)
    with state.watching():
        layer(torch.tensor([[0, 1]]))
    state.refuse_writes()


class Replaced(nn.Module):
    """Makes a new parameter of its codebook, as an exponential moving average of VQ-VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.ones(3), requires_grad=False)

    def step(self) -> None:
        self.codes = nn.Parameter(self.codes * 0.5, requires_grad=False)
        self.more = nn.Parameter(torch.ones(2))


def test_a_parameter_that_is_replaced_is_there_again() -> None:
    module = Replaced()
    codes, state = module.codes, ModuleState(module)
    module.step()
    state.restore()
    assert module.codes is codes
    assert dict(module.named_parameters()).keys() == {"codes"}


def test_a_model_that_is_averaged_in_the_step_is_refused() -> None:
    module = nn.ModuleDict({"student": nn.Linear(3, 3)})
    module["average"] = AveragedModel(module["student"])
    state = ModuleState(module)
    with state.watching():
        module["average"].update_parameters(module["student"])
    with pytest.raises(MisconfigurationException, match=r"the parameter average\.module\.weight"):
        state.refuse_writes()


def test_the_weights_of_hidden_modules_are_copied_if_all_is() -> None:
    module = Taught(in_place, place="hidden")
    before, state = module.values(), ModuleState(module, deep=True)
    module.step()
    assert module.values() != before
    state.restore()
    assert module.values() == before


@pytest.mark.parametrize("write", [THROUGH_DATA["operation"], in_place])
@pytest.mark.parametrize("held", ["buffer", "weight"])
def test_a_change_is_seen_however_it_was_made(held: str, write: Write) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("seen", torch.ones(2))
    state = ModuleState(module, compared=True)
    with state.watching():
        assert state.changed() is None
        write(module.seen if held == "buffer" else module.weight, torch.zeros(2))
    assert state.changed() == ("Linear.seen" if held == "buffer" else "Linear.weight")


# -- classes of tensors, and TorchScript ------------------------------------------------------------------------------


class Table(Tensor):
    """Numbers with names of columns, which its own methods need."""

    columns: list[str]

    @staticmethod
    def of(values: Tensor, columns: list[str]) -> Table:
        made = values.as_subclass(Table)
        made.columns = columns
        return made

    def clone(self, **_: Any) -> Table:  # type: ignore[override]
        return Table.of(super().clone(), list(self.columns))

    def detach(self) -> Table:
        return Table.of(super().detach(), list(self.columns))


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("place", ["attribute", "buffer", "list"])
def test_a_tensor_whose_class_has_methods_of_its_own(place: str, deep: bool) -> None:
    module, table = nn.Module(), Table.of(torch.ones(2, 2), ["a", "b"])
    if place == "buffer":
        module.register_buffer("table", table)
    else:
        module.table = [table] if place == "list" else table
    state = ModuleState(module, deep=deep, compared=True)
    assert state.changed() is None
    with state.watching():
        table.data.mul_(3)
        if deep or place != "list":
            table.columns.append("c")
    assert state.changed() is not None
    state.restore()
    assert table.as_subclass(Tensor).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert table.columns == ["a", "b"]


class Counts(nn.Module):
    """Changes all kinds of attributes that TorchScript keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.carried = 0, torch.zeros(2)
        self.seen = torch.jit.Attribute([0], list[int])
        self.sums = torch.jit.Attribute({"all": 0}, dict[str, int])
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("anew", torch.zeros(2))
        self.register_buffer("moved", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.sums["all"] += self.calls
        self.carried = self.carried + 1
        self.anew = self.anew + 1
        self.moved += 1
        return self.norm(self.linear(x)) * self.calls


def held(module: Any) -> list[Any]:
    numbers = [module.calls, module.seen, module.sums, module.carried.tolist(), module.training]
    return [*numbers, *(buffer.tolist() for buffer in module.buffers())]


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_the_attributes_of_torchscript_modules_are_restored(deep: bool, loaded: bool, tmp_path: Any) -> None:
    inner: Any = torch.jit.script(Counts())
    if loaded:
        torch.jit.save(inner, tmp_path / "counts.pt")
        inner = torch.jit.load(tmp_path / "counts.pt")
    module, x = nn.Sequential(inner, nn.Linear(2, 2)), torch.randn(4, 2)
    module(x)
    before, state = held(inner), ModuleState(module, deep=deep, compared=True)
    assert state.changed() is None
    first = module(x)
    inner.eval()
    assert held(inner) != before
    state.refuse_writes()
    state.restore()
    assert held(inner) == before
    assert torch.equal(module(x), first)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_module_is_restored() -> None:
    x = torch.randn(4, 2)
    module = nn.Sequential(torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), x))
    before, state = [buffer.tolist() for buffer in module.buffers()], ModuleState(module)
    module(x)
    assert [buffer.tolist() for buffer in module.buffers()] != before
    state.restore()
    assert [buffer.tolist() for buffer in module.buffers()] == before


# -- restoring goes on ------------------------------------------------------------------------------------------------


def test_all_functions_run_and_the_first_error_is_raised() -> None:
    done: list[int] = []

    def fails(error: type[BaseException]) -> None:
        raise error

    with pytest.raises(KeyboardInterrupt):
        run_all(
            [lambda: done.append(1), lambda: fails(KeyboardInterrupt), lambda: fails(KeyError), lambda: done.append(2)]
        )
    assert done == [1, 2]


class Broken(random.Random):
    def setstate(self, state: Any) -> None:
        raise ValueError("planned")


def test_one_part_that_cannot_be_restored_leaves_no_other_out() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].numbers = Broken(0)
    state = ModuleState(module)
    module(torch.randn(4, 2))
    module[2].added = 1
    with pytest.raises(ValueError, match="planned"):
        state.restore()
    assert [int(layer.num_batches_tracked) for layer in module] == [0, 0, 0]
    assert not hasattr(module[2], "added")


def test_classes_that_a_program_has_dropped_are_not_kept_alive() -> None:
    """Those of a cell that is run again in a notebook, for instance."""

    def of_a_cell() -> list[Any]:
        class Own(dict):
            pass

        class Codes:
            def __init__(self) -> None:
                self.seen = Own(a=1)

        net = nn.Linear(1, 1)
        net.codes = Codes()
        ModuleState(net).restore()
        return [weakref.ref(Own), weakref.ref(Codes)]

    classes = of_a_cell()
    gc.collect()
    assert [found() for found in classes] == [None, None]


def test_the_numbers_of_an_array_are_compared_without_a_second_copy() -> None:
    net = nn.Linear(1, 1)
    net.counts = numpy.zeros(1_000_000)
    state = ModuleState(net, compared=True)
    tracemalloc.start()
    assert state.changed() is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * net.counts.nbytes
    net.counts[7] = 1
    assert state.changed() == "Linear.counts"
