"""After a sweep everything is as before, bit for bit, and a fit is as if there had been none."""

from __future__ import annotations

import copy
import random
import signal
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import lightning_tricks as lt
from lightning_tricks.core.replay.undone_fit import ObjectState, TrainedModuleState
from lightning_tricks.schedules.lr_finder import find_lr
from tests.nets import Net, assert_equal, build, data, loader, spelled, trainer, weights

# -- a fit afterwards -------------------------------------------------------------------------------------------------


class Scheduled(Net):
    """With a schedule, counters, generators and lists of its own, which its steps change."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.register_buffer("scale", torch.ones(()))
        self.steps, self.history, self.carried = 0, [], torch.zeros(2)
        self.torch_numbers = torch.Generator().manual_seed(1)
        self.numpy_numbers, self.python_numbers = np.random.default_rng(1), random.Random(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.scale.mul_(0.99)
        self.carried += 1
        self.history.append(self.steps)
        noise = torch.rand((), generator=self.torch_numbers).item() + self.numpy_numbers.random()
        noise += self.python_numbers.random() + random.random() + np.random.random()
        return super().training_step(batch, batch_idx) * (self.scale + 0.01 * noise)

    def configure_optimizers(self) -> Any:
        return lt.cosine(torch.optim.AdamW(self.parameters(), lr=self.lr), self, warmup=3)


class Later(Scheduled):
    """With a layer that exists only once a fit has begun, and a hook on another."""

    def configure_model(self) -> None:
        if not hasattr(self, "later"):
            self.later = nn.Linear(2, 2)

    def setup(self, stage: str) -> None:
        self.layers[0].register_forward_hook(lambda module, args, out: out * 1.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.later(super().forward(x))


class Frozen(Scheduled):
    def on_train_start(self) -> None:
        self.layers[0].requires_grad_(False)
        self.layers[1].eval()


class Cached(Scheduled):
    """Makes its optimizer once."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "adam"):
            self.adam = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return lt.cosine(self.adam, self)


class Made(Scheduled):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.adam = torch.optim.AdamW(self.parameters(), lr=lr)

    def configure_optimizers(self) -> Any:
        return lt.cosine(self.adam, self)


class Sharp(lt.SAMMixin, Scheduled):
    sam = lt.SAM(rho=0.1)


def tricks() -> list[Callback]:
    return [lt.EMA(0.9), lt.Mixup(0.4), lt.HardExampleFilter(0.5), lt.SWA(at_end="raw", validate="raw")]


def shuffled(**settings: Any) -> DataLoader[Any]:
    return DataLoader(data(44), 8, shuffle=True, **settings)


class Shuffling(Sampler[int]):
    """Keeps an order that it shuffles in place, by generators of its own, and counts its epochs."""

    def __init__(self, size: int) -> None:
        self.order, self.array, self.epoch = list(range(size)), np.arange(size), 0
        self.numbers, self.numpy = random.Random(2), np.random.RandomState(2)

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        self.numbers.shuffle(self.order)
        self.numpy.shuffle(self.array)
        return iter([self.order[i] for i in self.array])

    def __len__(self) -> int:
        return len(self.order)


class Augmenting(Dataset[Any]):
    """Draws from a generator of its own, and counts."""

    def __init__(self) -> None:
        self.data, self.numbers, self.reads = data(44), np.random.default_rng(3), 0

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        self.reads += 1
        return x + 0.1 * self.numbers.random() + 1e-3 * self.reads, y

    def __len__(self) -> int:
        return len(self.data)


class Stream:
    """A loader of no class that anybody knows."""

    def __init__(self) -> None:
        self.numbers, self.epoch = random.Random(4), 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        for _ in range(5):
            indices = self.numbers.sample(range(44), 8)
            yield [part[indices] + 0 * self.epoch for part in data(44).tensors]


class Module(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        assert not hasattr(self, "train"), "set up twice"
        self.train = torch.utils.data.random_split(data(44), [40, 4])[0]

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, shuffle=True)


LOADERS: dict[str, Any] = {
    "shuffled": shuffled,
    "generator": lambda: shuffled(generator=torch.Generator().manual_seed(9)),
    "sampler": lambda: DataLoader(data(44), 8, sampler=Shuffling(44)),
    "dataset": lambda: DataLoader(Augmenting(), 8, shuffle=True),
    "combined": lambda: CombinedLoader(shuffled(), "max_size"),
    "stream": Stream,
    "module": Module,
    "workers": lambda: shuffled(num_workers=1, persistent_workers=True),
}


def trained(
    kind: type[L.LightningModule], loaders: Any, first: bool, spoil: str = "", **settings: Any
) -> tuple[Any, L.Trainer, list[Any]]:
    """A module after a fit, the Trainer, and random numbers drawn next; ``first`` with a sweep before."""
    module, run, mine = build(kind), trainer(**settings), loaders()
    L.seed_everything(7, verbose=False)
    source = {"datamodule": mine} if isinstance(mine, Module) else {"train_dataloaders": mine}
    if first:
        find_lr(run, module, steps=20, max_lr=10.0, **source)
    run.fit(module, val_dataloaders=None if isinstance(mine, Module) else loader(8), **source)
    return module, run, [torch.rand(1).item(), random.random(), np.random.random()]


def assert_same_fit(kind: type[L.LightningModule], loaders: Any, **settings: Any) -> None:
    callbacks = settings.pop("callbacks", list)
    (a, first, drawn), (b, second, expected) = (
        trained(kind, loaders, sweeps, callbacks=callbacks(), **settings) for sweeps in (True, False)
    )
    assert_equal(weights(a), weights(b))
    assert drawn == expected
    assert first.global_step == second.global_step > 0
    assert first.callback_metrics == second.callback_metrics
    assert first.optimizers[0].param_groups[0]["lr"] == second.optimizers[0].param_groups[0]["lr"]
    if isinstance(a, Scheduled):
        assert a.history == b.history
        assert torch.equal(a.carried, b.carried)
    for one, other in zip(first.callbacks, second.callbacks, strict=True):
        if isinstance(one, lt.EMA):
            assert_equal(one.averaged_state_dict(), other.averaged_state_dict())


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [Net, Scheduled, Later, Frozen, Cached, Made, Sharp])
def test_a_fit_after_a_sweep_is_as_one_without(kind: type[L.LightningModule]) -> None:
    assert_same_fit(kind, shuffled)


@pytest.mark.few(2)
@pytest.mark.parametrize("loaders", LOADERS)
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_whatever_the_loader(loaders: str) -> None:
    assert_same_fit(Net if loaders == "stream" else Scheduled, LOADERS[loaders])  # of which the length is unknown


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"callbacks": tricks},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1},
        {"max_steps": 9, "max_epochs": -1},
        {"min_epochs": 2, "limit_train_batches": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"reload_dataloaders_every_n_epochs": 1, "max_steps": 9, "max_epochs": -1},
    ],
    ids=spelled,
)
def test_whatever_the_trainer(settings: dict[str, Any]) -> None:
    assert_same_fit(Scheduled, shuffled, **settings)


def test_a_gradient_scaler_starts_anew() -> None:
    scales, ended = [], []
    for sweeps in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        module, run, mine = build(Net), trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler)]), shuffled()
        L.seed_everything(7, verbose=False)
        if sweeps:
            find_lr(run, module, mine, steps=20)
        assert scaler.state_dict()["scale"] == 4.0
        run.fit(module, mine, loader(8))
        scales.append(scaler.state_dict())
        ended.append(weights(module))
    assert scales[0] == scales[1]
    assert_equal(*ended)


@pytest.mark.slow
def test_a_compiled_module() -> None:
    class Silent(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

    ended = []
    for sweeps in (True, False):
        module, mine = build(Silent), shuffled()
        compiled: Any = torch.compile(module, backend="eager")
        before = set(vars(module))
        L.seed_everything(7, verbose=False)
        if sweeps:
            find_lr(trainer(), compiled, mine, steps=20)
            assert set(vars(module)) == before
        trainer().fit(compiled, mine, loader(8))
        ended.append(weights(module))
    assert_equal(*ended)


def test_a_sweep_between_two_fits_changes_nothing() -> None:
    ended = []
    for sweeps in (True, False):
        module, run, mine = build(Cached), trainer(callbacks=tricks()[:2]), shuffled()
        L.seed_everything(7, verbose=False)
        for epochs in (1, 3):
            run.fit_loop.max_epochs = epochs
            run.fit(module, mine, loader(8))
            if sweeps:
                find_lr(run, module, mine, steps=20)
        ended.append((weights(module), run.global_step))
    assert_equal(ended[0][0], ended[1][0])
    assert ended[0][1] == ended[1][1]


# -- everything, bit for bit ------------------------------------------------------------------------------------------


def picture(value: Any, seen: dict[int, int]) -> Any:
    """All that is reachable from a value, in plain data."""
    if value is None or isinstance(value, bool | int | float | str | bytes | type):
        return value
    if isinstance(value, Tensor):
        return (str(value.dtype), value.requires_grad, value.detach().tolist(), picture(value.grad, seen))
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    inside: Any = None
    if isinstance(value, dict):
        inside = [(picture(k, seen), picture(v, seen)) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        inside = [picture(each, seen) for each in value]
    elif isinstance(value, set):
        inside = sorted(map(str, value))
    ours = type(value).__module__.split(".")[0] in ("lightning", "lightning_tricks", "tests", "torch") and hasattr(
        value, "__dict__"
    )
    attributes = [(name, picture(each, seen)) for name, each in vars(value).items()] if ours else None
    return (type(value).__qualname__, inside, attributes)


def everything(*values: Any) -> Any:
    numbers = (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()))
    return [picture(value, {}) for value in values], numbers, signal.getsignal(signal.SIGINT)


class Breaks(Scheduled):
    when, error = "training_step", RuntimeError("planned")

    def _maybe(self, here: str) -> None:
        if here == self.when and self.steps in (0, 7):
            raise self.error

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.steps == 7:
            self._maybe("training_step")
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.steps == 7:
            self._maybe("backward")

    def setup(self, stage: str) -> None:
        self._maybe("setup")

    def configure_optimizers(self) -> Any:
        self._maybe("configure_optimizers")
        return super().configure_optimizers()


WHEN = ("never", "setup", "configure_optimizers", "training_step", "backward")


@pytest.mark.few(8)
@pytest.mark.parametrize("error", [RuntimeError("planned"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("when", WHEN)
def test_everything_is_as_before(when: str, error: BaseException, tmp_path: Any) -> None:
    module = build(Breaks)
    module.when, module.error = when, error
    for weight in module.layers[0].parameters():
        weight.grad = torch.ones_like(weight)
    callbacks = [*tricks(), EarlyStopping("val_loss"), ModelCheckpoint(tmp_path)]
    run = trainer(callbacks=callbacks, enable_checkpointing=True, default_root_dir=tmp_path, precision="bf16-mixed")
    mine = DataLoader(Augmenting(), 8, sampler=Shuffling(44), generator=torch.Generator().manual_seed(5))
    objects = (module, run, mine, callbacks)
    pointers = [weight.data_ptr() for weight in module.parameters()]
    before = everything(*objects)
    if when == "never":
        find_lr(run, module, mine, steps=20)
    else:
        with pytest.raises(type(error)):
            find_lr(run, module, mine, steps=20)
    assert everything(*objects) == before
    assert [weight.data_ptr() for weight in module.parameters()] == pointers
    assert run.global_step == run.current_epoch == 0
    assert not run.optimizers
    assert run.callbacks[: len(callbacks)] == callbacks
    assert not list(tmp_path.iterdir())


def test_the_picture_sees_a_fit() -> None:
    module, run, mine = build(Scheduled), trainer(), shuffled()
    for changes in (lambda: run.fit(module, mine, loader(8)), lambda: module.layers[0].weight.data.add_(1)):
        before = everything(module, run, mine)
        changes()
        assert everything(module, run, mine) != before


def test_after_a_ctrl_c_the_next_one_works() -> None:
    module = build(Breaks)
    module.error = KeyboardInterrupt()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            find_lr(trainer(), module, loader())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# -- its parts --------------------------------------------------------------------------------------------------------


def test_containers_and_objects_are_put_back() -> None:
    class Holder(Sampler[int]):
        pass

    holder = Holder()
    holder.list, holder.dict, holder.set, holder.tensor = [1, [2]], {"a": {"b": 1}}, {1}, torch.ones(2)
    expected, inner, state = copy.deepcopy(vars(holder)), holder.list[1], ObjectState()
    state.note(holder)
    holder.list[1].append(3)
    holder.list.insert(0, 0)
    holder.dict["a"]["b"] = holder.dict["c"] = 2
    holder.set.add(2)
    holder.tensor.add_(1)
    holder.new = 1
    state.restore()
    assert holder.list[1] is inner
    assert torch.equal(vars(holder).pop("tensor"), expected.pop("tensor"))
    assert vars(holder) == expected


def test_what_was_not_to_be_touched_is_not() -> None:
    class Owner(Sampler[int]):
        pass

    owner, other, state = Owner(), Owner(), ObjectState()
    owner.other, other.value = other, 1
    state.note(owner, without=[other])
    other.value = 2
    state.restore()
    assert other.value == 2


def test_a_module_gets_back_what_replaced_parts_of_it() -> None:
    module = build(Net)
    weight, norm, before = module.layers[0].weight, module.layers[1], weights(module)
    kept = TrainedModuleState(module, ObjectState())
    module.layers[0].weight = nn.Parameter(torch.zeros(16, 8))
    module.layers[1] = nn.Identity()
    module.layers[4].register_parameter("extra", nn.Parameter(torch.ones(1)))
    module.layers[4].weight.requires_grad_(False)
    module.layers[4].weight.data = module.layers[4].weight.data.half()
    module.train(False)
    weight.data.zero_()
    kept.restore()
    assert module.layers[0].weight is weight
    assert module.layers[1] is norm
    assert module.layers[4].weight.requires_grad
    assert module.training
    assert_equal(weights(module), before)


class Broken(random.Random):
    def setstate(self, state: Any) -> None:
        raise ValueError("planned")


@pytest.mark.parametrize("place", ["module", "trainer"])
def test_a_part_that_cannot_be_restored_leaves_no_other_out(place: str) -> None:
    module, run = build(Net), trainer(callbacks=[ModelCheckpoint()], enable_checkpointing=True)
    owner, callbacks, before = module if place == "module" else run, list(run.callbacks), weights(module)
    owner.broken = Broken(0)
    with pytest.raises(ValueError, match="planned"):
        find_lr(run, module, loader(), steps=20)
    assert_equal(weights(module), before)
    assert all(weight.grad is None for weight in module.parameters())
    assert run.callbacks == callbacks
    assert (run.global_step, run.fit_loop.max_epochs) == (0, 2)
