"""What a step writes into weights by itself is restored or named, and attributes of TorchScript are restored."""

from __future__ import annotations

import array
import gc
import itertools
import random
import threading
import tracemalloc
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import lightning_tricks as lt
from lightning_tricks.core.replay.containers import run_all
from lightning_tricks.core.replay.module_state import ModuleState
from tests.batches import AttrDict, refused
from tests.nets import NormNet, PlainNet, assert_equal, build, fit, loader, trainer, weights

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
    remedy = "register it as a buffer" if place == "tensors" else "update it in on_train_batch_end"
    message = f"A step of Taught writes into the {kind} {name}, and a second run .*{remedy}"
    with pytest.raises(MisconfigurationException, match=message):
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


class Aux(PlainNet):
    """Loops over an OrderedDict in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = OrderedDict(l2=0.5, l1=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        for name, factor in self.aux.items():
            power = 2 if name == "l2" else 1
            loss = loss + 0.01 * factor * sum(p.abs().pow(power).sum() for p in self.parameters())
        return loss

    def memory(self) -> Any:
        return list(self.aux.items())


class Tagged(list):
    """A list with an attribute."""

    tag = 0


class Limited(OrderedDict):
    """Drops its oldest entries."""

    limit = 3

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > self.limit:
            self.popitem(last=False)


@dataclass
class Record:
    steps: int = 0
    losses: list[float] = field(default_factory=list)


Point = namedtuple("Point", ["seen", "other"])


class Remembers(NormNet):
    """Changes containers of every class in each step, and lets them into its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered, self.grouped, self.counted = OrderedDict(a=1.0, b=2.0), defaultdict(list), Counter()
        self.recent, self.tagged, self.limited = deque(maxlen=2), Tagged([1.0]), Limited(a=1, b=2)
        self.point, self.record, self.user = Point([0.0], {1}), Record(), UserDict(n=0)
        self.within = {"deep": [OrderedDict(x=[1.0])]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ordered.move_to_end(next(iter(self.ordered)))
        self.ordered["a"] += 0.1
        self.grouped[batch_idx % 2].append(1.0)
        self.counted["steps"] += 1
        self.recent.append(float(batch_idx))
        self.tagged.append(0.5)
        self.tagged.tag += 1
        self.limited[batch_idx] = 1
        self.point.seen.append(1.0)
        self.point.other.add(batch_idx)
        self.record.steps += 1
        self.record.losses.append(0.25)
        self.user["n"] += 1
        self.within["deep"][0]["x"].append(1.0)
        first = next(iter(self.ordered.values()))
        lengths = [len(self.grouped), len(self.tagged), self.tagged.tag, len(self.limited), len(self.point.seen)]
        lengths += [len(self.point.other), self.record.steps, len(self.record.losses), self.user["n"]]
        lengths += [self.counted["steps"], sum(self.recent), len(self.within["deep"][0]["x"]), first]
        return super().training_step(batch, batch_idx) * (1 + 0.01 * sum(lengths))

    def memory(self) -> list[Any]:
        return [
            *(list(self.ordered.items()), dict(self.grouped), self.grouped.default_factory, dict(self.counted)),
            *(list(self.recent), self.recent.maxlen, list(self.tagged), self.tagged.tag, list(self.limited.items())),
            *(self.point, self.record, dict(self.user), self.within),
        ]


class Hidden(PlainNet):
    """Counts in a container that is written in C."""

    def __init__(self) -> None:
        super().__init__()
        from multidict import MultiDict

        self.seen = MultiDict()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.add("step", "1")
        return super().training_step(batch, batch_idx)


def test_a_container_that_cannot_be_restored_is_refused_by_path_before_the_first_step() -> None:
    refused(Hidden, r"Hidden\.seen is a multidict.*MultiDict", [lt.SAMCallback(rho=0.1)])


class CountsInAttributes(PlainNet):
    """Its loss depends on what it has counted, in objects of several kinds."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.settings, self.seen = AttrDict(lr=lr), types.SimpleNamespace(steps=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.steps += 1
        return super().training_step(batch, batch_idx) * self.seen.steps * self.settings.lr

    def memory(self) -> Any:
        return self.seen.steps


class AverageMeter:
    """A mean as many projects compute it, in an object of a class of their own."""

    def __init__(self) -> None:
        self.total, self.values = 0.0, list[float]()

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


class LockedMeter(AverageMeter):
    """One that threads may share; a lock has no state that Python can restore."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def metered(kind: type[AverageMeter]) -> type[PlainNet]:
    class Metered(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.meters = {"loss": kind()}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = super().training_step(batch, batch_idx)
            self.meters["loss"].update(loss.item())
            return loss

        def memory(self) -> Any:
            return vars(self.meters["loss"])

    return Metered


class Ragged(PlainNet):
    """With a nested buffer."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), persistent=False)

    def memory(self) -> Any:
        return self.ragged.is_nested


class DrawsNumbers(PlainNet):
    """Draws from generators of its own in every step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.python, self.numpy, self.system = random.Random(0), numpy.random.default_rng(0), random.SystemRandom()
        self.nested = {"torch": torch.Generator().manual_seed(0), "numpy": numpy.random.RandomState(0)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = self.python.random() + self.numpy.random() + self.nested["numpy"].rand()
        return super().training_step(batch, batch_idx) * (drawn + torch.rand((), generator=self.nested["torch"]))

    def memory(self) -> Any:
        return self.python.getstate()


TRICKS: dict[str, Callable[[], list[Callback]]] = {
    "SAMCallback": lambda: [lt.SAMCallback(rho=0.0)],
    "HardExampleFilter": lambda: [lt.HardExampleFilter(keep=0.999)],  # which scores, and keeps all
    "find_lr": list,  # before the fit
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("kind", [Aux, Remembers, CountsInAttributes, metered(AverageMeter), Ragged, DrawsNumbers])
def test_what_a_step_changes_it_changes_once(kind: type[Any], trick: str) -> None:
    plain, tricked = build(kind), build(kind)
    if trick == "find_lr":
        begun = deepcopy(tricked.memory())
        lt.find_lr(trainer(), tricked, loader(), steps=10)
        assert tricked.memory() == begun
    fit(plain), fit(tricked, callbacks=TRICKS[trick]())
    assert_equal(weights(tricked), weights(plain))
    assert tricked.memory() == plain.memory()


def test_an_object_that_cannot_be_restored_is_refused_by_its_path() -> None:
    message = r"Metered\.meters\['loss'\] \(LockedMeter\) has changed .* cannot be set back"
    refused(metered(LockedMeter), message, [lt.SAMCallback()])
    refused(metered(LockedMeter), message, [lt.HardExampleFilter()])
    with pytest.raises(MisconfigurationException, match=message):
        lt.find_lr(trainer(), build(metered(LockedMeter)), loader())


def test_a_file_is_written_once_or_refused(tmp_path: Path) -> None:
    class Writes(PlainNet):
        hook = "training_step"

        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.log_file = log_file

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.write("training_step", batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.write("on_train_batch_end", batch_idx)

        def write(self, hook: str, batch_idx: int) -> None:
            if hook == self.hook:
                self.log_file.write(f"{batch_idx}\n")

    with (tmp_path / "refused.txt").open("w") as log_file:
        refused(Writes, r"Writes\.log_file \(TextIOWrapper\) has changed", [lt.SAMCallback()])
    Writes.hook = "on_train_batch_end"
    with (tmp_path / "losses.txt").open("w") as log_file:
        fit(build(Writes), callbacks=[lt.SAMCallback()], max_epochs=1)
    assert (tmp_path / "losses.txt").read_text() == "".join(f"{number}\n" for number in range(6))


@pytest.mark.parametrize(
    "made", [itertools.count, lambda: iter([1, 2]), lambda: (n for n in range(3)), lambda: itertools.cycle("ab")]
)
def test_an_iterator_is_refused_by_its_path(made: Callable[[], Iterator[Any]]) -> None:
    class Draws(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.source = made()

    refused(Draws, r"Draws\.source is an iterator", [lt.SAMCallback()])


# What a module holds in a list, what its backward pass changes, and the path of that.
BACKWARD: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "attribute": (None, lambda module: setattr(module, "backwards", getattr(module, "backwards", 0) + 1), "backwards"),
    "buffer": (None, lambda module: module.counts.add_(1), "counts"),
    "bytearray": (bytearray(1), lambda module: module.held[0].append(1), r"held\[0\]"),
    "array": (array.array("d", [0.0]), lambda module: module.held[0].append(1.0), r"held\[0\]"),
    "NumPy": (numpy.zeros(1), lambda module: module.held[0].__iadd__(1), r"held\[0\]"),
    "random.Random": (random.Random(0), lambda module: module.held[0].random(), r"held\[0\]"),
    "torch.Generator": (torch.Generator(), lambda module: torch.rand(1, generator=module.held[0]), r"held\[0\]"),
    "NumPy generator": (numpy.random.default_rng(0), lambda module: module.held[0].random(), r"held\[0\]"),
    "RandomState": (numpy.random.RandomState(0), lambda module: module.held[0].rand(), r"held\[0\]"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_state_that_backward_changes_is_refused_under_sam(name: str) -> None:
    held, change, path = BACKWARD[name]

    class Holding(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.held = [held]
            self.register_buffer("counts", torch.zeros(()))

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)
            change(self)

    refused(Holding, rf"Holding\.{path} is changed in the backward pass", [lt.SAMCallback()])


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", ["SAMCallback", "ActivationCheckpointing", "HardExampleFilter"])
def test_lazy_layers_are_refused_that_a_step_draws_before_it_runs_again(name: str) -> None:
    class Lazy(PlainNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.layers = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.Dropout(0.5), nn.Linear(16, 2))

    trick = lt.ActivationCheckpointing("layers") if name == "ActivationCheckpointing" else getattr(lt, name)()
    with pytest.raises(MisconfigurationException, match=r"makes the lazy tensor (layers\.)?0\.weight"):
        fit(build(Lazy), callbacks=[trick], max_epochs=1)
    drawn = build(Lazy)
    drawn(torch.zeros(2, 8))
    fit(drawn, callbacks=[trick], max_epochs=1)
