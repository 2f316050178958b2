"""A fit that is stopped anywhere and resumed has the samples, the random numbers and the weights of one that is not."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

import lightning_tricks as lt
from lightning_tricks.core.lightning.loaders import training_steps
from tests.few import few
from tests.nets import Stream, assert_equal, trainer, weights
from tests.ranks import run_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes"),
    pytest.mark.filterwarnings("ignore:The schedule of the checkpoint"),  # that of the earlier plan
]
SIZE, EPOCHS = 43, 3


class Numbered(Dataset[Any]):
    """Samples that know their number, with noise of all global generators and of one of their own."""

    def __init__(self, size: int = SIZE) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
        self.rng = np.random.default_rng(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return default_collate([self[number] for number in index])
        noise = 0.1 * torch.randn(8) + random.random() + float(np.random.rand()) + float(self.rng.random())
        return self.x[index] + noise, index


class Seen(L.LightningModule):
    """Has dropout, and notes the samples that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        several = any(isinstance(part, list | tuple) for part in batch)
        parts = [part for part in (batch if several else [batch]) if part is not None]
        self.seen.append([(self.trainer.current_epoch, number) for _, numbers in parts for number in numbers.tolist()])
        return sum(F.cross_entropy(self.layers(x), numbers % 2) for x, numbers in parts)  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Validated(Seen):
    """Is also validated, on samples with noise."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch[0]).mean())


class Lazy(Sampler[int]):
    """Draws from all generators whenever it is asked, and has state of its own."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.passes, self.rng, self.order = size, 0, random.Random(1), list(range(size))

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        self.rng.shuffle(self.order)  # in place
        for place in self.order:
            drawn = int(torch.randint(self.size, ())) + random.randrange(self.size) + int(np.random.randint(self.size))
            yield (place + drawn + self.passes + self.rng.randrange(3)) % self.size


class Eager(Sampler[int]):
    """Draws all at once when it is asked to begin, which torch does twice where there are workers."""

    def __init__(self, size: int = SIZE) -> None:
        self.size, self.state = size, {"passes": 0}

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.state["passes"] += 1
        return iter((torch.randperm(self.size) + self.state["passes"]).remainder(self.size).tolist())


class Batches(Sampler[list[int]]):
    """A batch sampler of a user, without a length, whose state is seen through ``state_dict`` only."""

    def __init__(self) -> None:
        self._hidden: Any = {"passes": [lambda: 0]}

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._hidden["passes"][0]()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._hidden["passes"] = [lambda: state_dict["passes"]]

    def __iter__(self) -> Iterator[list[int]]:
        passes = self._hidden["passes"][0]() + 1
        self._hidden["passes"] = [lambda: passes]
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(passes)).tolist()
        for first in range(0, SIZE - 3, 8):
            yield order[first : first + 8]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


Make = Callable[..., DataLoader[Any]]
LOADERS: dict[str, Make] = {
    "sequential": lambda **given: DataLoader(Numbered(), 8, **given),
    "shuffled": lambda **given: DataLoader(Numbered(), 8, shuffle=True, **given),
    "generator": lambda **given: DataLoader(Numbered(), 8, shuffle=True, generator=generator(), **given),
    "weighted": lambda **given: DataLoader(
        Numbered(), 8, sampler=WeightedRandomSampler(np.arange(1.0, SIZE + 1), SIZE), **given
    ),
    "replaced": lambda **given: DataLoader(
        Numbered(), 8, sampler=RandomSampler(range(SIZE), replacement=True, generator=generator()), **given
    ),
    "subset": lambda **given: DataLoader(Numbered(), 8, sampler=SubsetRandomSampler(range(40)), **given),
    "no batches": lambda **given: DataLoader(
        Numbered(), batch_size=None, sampler=BatchSampler(RandomSampler(range(SIZE)), 8, drop_last=True), **given
    ),
    "eager": lambda **given: DataLoader(Numbered(), 8, sampler=Eager(), **given),
    "buckets": lambda **given: DataLoader(Numbered(), 8, sampler=lt.LengthBuckets([*range(SIZE)], 8), **given),
    "drawn": lambda **given: DataLoader(
        Numbered(), 8, sampler=lt.DistributedWeightedSampler(np.arange(1.0, SIZE + 1)), **given
    ),
    "lazy": lambda **given: DataLoader(Numbered(), 8, sampler=Lazy(), **given),
    "without a length": lambda **given: DataLoader(Numbered(), batch_sampler=Batches(), **given),
}
DRAWS_LATER = {"lazy"}


class Save(Callback):
    """Saves in hooks, and notes how many steps the checkpoint has behind it."""

    def __init__(self, folder: Path, *hooks: str) -> None:
        self.folder = folder
        self.steps: dict[str, int] = {}
        for hook in hooks:
            setattr(self, hook, lambda run, *_, name=hook, **__: self.save(run, name))

    def save(self, run: L.Trainer, hook: str) -> None:
        name = f"{hook}-{run.current_epoch}-{run.fit_loop.epoch_loop.batch_progress.total.ready}"
        if name not in self.steps:
            self.steps[name] = len(run.lightning_module.seen) - (hook == "on_before_backward")  # which is not taken
            run.save_checkpoint(self.folder / name)


def fit(train: Any, *callbacks: Callback, ckpt_path: Path | None = None, kind: Any = Seen, **settings: Any) -> Any:
    """A module after a fit with seeded weights and random numbers, which a resumed fit need not have."""
    L.seed_everything(3, verbose=False)
    kind = Validated if "val_check_interval" in settings else kind
    module, run = kind(), trainer(**{"max_epochs": EPOCHS, "callbacks": [*callbacks], **settings})
    L.seed_everything(7 if ckpt_path is None else 8, verbose=False)
    val = DataLoader(Numbered(8), 4) if "val_check_interval" in settings else None
    run.fit(module, train, val, ckpt_path=ckpt_path)
    return module


def check(make: Callable[[], Any], folder: Path, *hooks: str, every: int = 1, **settings: Any) -> Any:
    """Compare a fit without a stop with those that are resumed from its checkpoints."""
    save = Save(folder, *hooks)
    whole = fit(make(), lt.ExactResume(), save, **settings)
    for name, steps in [*save.steps.items()][::every]:
        resumed = fit(make(), lt.ExactResume(), ckpt_path=folder / name, **settings)
        assert resumed.seen == whole.seen[steps:], name
        assert_equal(weights(resumed), weights(whole))
    return whole


# -- one process, any sampler -----------------------------------------------------------------------------------------

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 2, "prefetch_factor": 1},
    {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 3},
    {"num_workers": 1, "worker_init_fn": lambda worker: random.seed(10 + worker)},
]


@pytest.mark.parametrize("name", few(LOADERS, 4))
def test_an_unbroken_fit_is_the_same_with_and_without_it(name: str) -> None:
    plain, exact = fit(LOADERS[name]()), fit(LOADERS[name](), lt.ExactResume())
    assert (exact.seen == plain.seen) == (name not in DRAWS_LATER)
    if name not in DRAWS_LATER:
        assert_equal(weights(exact), weights(plain))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", few(LOADERS, 4))
def test_a_fit_goes_on_exactly_wherever_it_was_saved(name: str, tmp_path: Path) -> None:
    hooks = ("on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start", "on_before_backward")
    check(LOADERS[name], tmp_path, *hooks, every=5)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["shuffled", "lazy"])
def test_so_it_does_with_workers(name: str, tmp_path: Path) -> None:
    check(lambda: LOADERS[name](num_workers=2), tmp_path, "on_train_batch_end", every=8)


@pytest.mark.parametrize(("before", "now"), few([(0, 2), (2, 1), (1, 0)], 1))
@pytest.mark.parametrize("name", ["eager", "lazy"])
def test_the_samples_are_the_same_with_other_workers(name: str, before: int, now: int, tmp_path: Path) -> None:
    whole = fit(LOADERS[name](num_workers=before), lt.ExactResume(), Save(tmp_path, "on_train_batch_end"))
    path = tmp_path / "on_train_batch_end-1-9"
    assert fit(LOADERS[name](num_workers=now), lt.ExactResume(), ckpt_path=path).seen[:3] == whole.seen[9:12]


class Early(Seen):
    """Has its loaders made before the checkpoint is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == EPOCHS * 6
        return super().configure_optimizers()


@pytest.mark.parametrize("name", few(["shuffled", "sequential", "lazy", "eager", "buckets"], 2))
def test_so_it_does_where_loaders_are_made_before_the_checkpoint_is_restored(name: str, tmp_path: Path) -> None:
    check(LOADERS[name], tmp_path, "on_train_batch_end", "on_train_epoch_end", every=4, kind=Early)


def test_a_generator_that_validation_draws_from_goes_on(tmp_path: Path) -> None:
    class Shared(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.generator = generator()

        def train_dataloader(self) -> Any:
            return DataLoader(Numbered(), 8, shuffle=True, generator=self.generator, num_workers=1)

        def val_dataloader(self) -> Any:
            return DataLoader(Numbered(8), 4, generator=self.generator)

    save = Save(tmp_path, "on_validation_end")
    settings: dict[str, Any] = {"kind": Shared, "num_sanity_val_steps": 0}
    whole = fit(None, lt.ExactResume(), save, **settings)
    assert save.steps
    for name, steps in save.steps.items():
        assert fit(None, lt.ExactResume(), ckpt_path=tmp_path / name, **settings).seen == whole.seen[steps:]


def test_no_workers_are_left_behind(tmp_path: Path) -> None:
    given = {"num_workers": 2, "persistent_workers": True}
    fit(LOADERS["shuffled"](**given), lt.ExactResume(), Save(tmp_path, "on_train_batch_end"))
    assert not multiprocessing.active_children()
    for kind in (Seen, Early):
        fit(LOADERS["shuffled"](**given), lt.ExactResume(), ckpt_path=tmp_path / "on_train_batch_end-1-9", kind=kind)
        assert not multiprocessing.active_children()


def test_what_is_saved_by_hand_after_an_interruption_goes_on(tmp_path: Path) -> None:
    class Interrupts(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 9:
                raise KeyboardInterrupt

    module, run = Recorded(), trainer(max_epochs=EPOCHS, callbacks=[lt.ExactResume(), Interrupts()])
    with pytest.raises(SystemExit):
        run.fit(module, LOADERS["lazy"]())
    run.save_checkpoint(tmp_path / "by_hand.ckpt")
    whole = fit(LOADERS["lazy"](), lt.ExactResume())
    resumed = fit(LOADERS["lazy"](), lt.ExactResume(), ckpt_path=tmp_path / "by_hand.ckpt")
    assert resumed.seen == whole.seen[9:]
    assert_equal(weights(resumed), weights(whole))


def test_trials_leave_the_fit_as_it_is() -> None:
    plain, module = fit(LOADERS["shuffled"]()), Recorded()
    run = trainer(max_epochs=EPOCHS, callbacks=[lt.ExactResume()])
    lt.find_lr(run, module, LOADERS["sequential"](), steps=10)
    lt.find_batch_size(run, module, LOADERS["sequential"](), max_size=4)
    module.seen.clear()
    L.seed_everything(7, verbose=False)
    run.fit(module, LOADERS["shuffled"]())
    assert module.seen == plain.seen
    assert_equal(weights(module), weights(plain))


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, *WORKERS], ids=str)
@pytest.mark.parametrize("name", LOADERS)
def test_so_it_does_with_all_loaders_workers_and_stops(name: str, given: dict[str, Any], tmp_path: Path) -> None:
    hooks = ("on_train_start", "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end")
    plain, whole = fit(LOADERS[name](**given)), check(lambda: LOADERS[name](**given), tmp_path, *hooks)
    assert (whole.seen == plain.seen) == (name not in DRAWS_LATER)


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{"accumulate_grad_batches": 2}, {"val_check_interval": 2}], ids=str)
def test_so_it_does_with_accumulation_and_validations(settings: dict[str, Any], tmp_path: Path) -> None:
    hook = "on_validation_end" if "val_check_interval" in settings else "on_train_epoch_end"
    save = Windows(tmp_path)
    whole = fit(LOADERS["shuffled"](), lt.ExactResume(), save, Save(tmp_path, hook), **settings)
    for path in sorted(tmp_path.iterdir()):
        resumed = fit(LOADERS["shuffled"](), lt.ExactResume(), ckpt_path=path, **settings)
        assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :], path.name
        assert_equal(weights(resumed), weights(whole))


class Windows(Callback):
    """Saves after whole windows of accumulated batches, but for those that end an epoch or begin a validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % 2 == (trainer.accumulate_grad_batches == 1) and not trainer.is_last_batch:
            trainer.save_checkpoint(self.folder / f"window-{trainer.global_step}")


def test_a_step_that_has_failed_is_taken_again(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 11:  # the last of an epoch
                raise RuntimeError("the power is gone")

    save = ModelCheckpoint(tmp_path, "failed", every_n_epochs=9, save_on_exception=True)
    with pytest.raises(RuntimeError, match="the power is gone"):
        fit(LOADERS["lazy"](), lt.ExactResume(), save, Fails(), enable_checkpointing=True)
    whole = fit(LOADERS["lazy"](), lt.ExactResume())
    resumed = fit(LOADERS["lazy"](), lt.ExactResume(), ckpt_path=tmp_path / "failed.ckpt")
    assert resumed.seen == whole.seen[11:]
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.few(1)
@pytest.mark.parametrize("limit", [{"max_steps": 14}, {"limit_train_batches": 4}], ids=str)
def test_so_it_does_where_steps_end_training_or_the_epoch(limit: dict[str, Any], tmp_path: Path) -> None:
    hooks = ("on_train_batch_end", "on_train_epoch_end")
    check(LOADERS["lazy"], tmp_path, *hooks, every=2, **{"max_epochs": -1 if "max_steps" in limit else 3, **limit})


@pytest.mark.parametrize("name", few(LOADERS, 2))
def test_a_loader_that_was_read_before_goes_on_as_a_new_one(name: str, tmp_path: Path) -> None:
    loader, save = LOADERS[name](), Save(tmp_path, "on_train_batch_end")
    whole = fit(loader, lt.ExactResume(), save)
    resumed = fit(loader, lt.ExactResume(), ckpt_path=tmp_path / "on_train_batch_end-0-3")
    assert resumed.seen == whole.seen[3:]
    assert_equal(weights(resumed), weights(whole))


class Reads(Callback):
    """Reads the training samples once more, with random numbers of its own."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        with isolate_rng():
            assert len([*training_steps(trainer, pl_module)]) == trainer.num_training_batches


BESIDE: dict[str, tuple[Callable[[], list[Callback]], dict[str, Any]]] = {
    "larger batches": (lambda: [lt.BatchSizeWarmup(initial=1, final=4, over=2, grow="loader")], {}),
    "more batches": (lambda: [lt.BatchSizeWarmup(initial=1, final=4, over=2)], {}),
    "another pass": (lambda: [Reads()], {}),
    "data wait": (lambda: [lt.DataWait()], {}),
    "SWA": (lambda: [lt.SWA(start=0.5)], {}),
    "overfit": (lambda: [], {"overfit_batches": 3}),
}


@pytest.mark.parametrize("case", few(BESIDE, 3))
@pytest.mark.filterwarnings("ignore:Training waits for data", "ignore:You requested to overfit")
def test_it_works_beside_what_looks_at_the_loaders(case: str, tmp_path: Path) -> None:
    callbacks, settings = BESIDE[case]
    save = Save(tmp_path, "on_train_batch_end")
    plain = fit(LOADERS["shuffled"](), *callbacks(), **settings)
    whole = fit(LOADERS["shuffled"](), lt.ExactResume(), *callbacks(), save, **settings)
    assert whole.seen == plain.seen
    for name, steps in [*save.steps.items()][1::4]:
        resumed = fit(LOADERS["shuffled"](), lt.ExactResume(), *callbacks(), ckpt_path=tmp_path / name, **settings)
        assert resumed.seen == whole.seen[steps:], name
        if case != "more batches":  # whose gradients no checkpoint holds
            assert_equal(weights(resumed), weights(whole))


def test_loaders_that_are_made_anew_go_on(tmp_path: Path) -> None:
    class Made(Seen):
        def train_dataloader(self) -> Any:
            return LOADERS["lazy"]()

    check(lambda: None, tmp_path, "on_train_batch_end", every=4, kind=Made, reload_dataloaders_every_n_epochs=1)


# -- several loaders, and those with a state of their own -------------------------------------------------------------


def several(mode: Any, *names: str) -> CombinedLoader:
    return CombinedLoader([LOADERS[name]() if name != "short" else short() for name in names], mode)


def short() -> DataLoader[Any]:
    return DataLoader(Numbered(19), 8, sampler=Lazy(19))


@pytest.mark.parametrize("mode", few(["max_size_cycle", "max_size", "min_size"], 1))
@pytest.mark.parametrize("names", [("shuffled", "short"), ("short", "without a length")], ids=str)
def test_several_loaders_go_on_together(names: tuple[str, ...], mode: str, tmp_path: Path) -> None:
    whole = check(lambda: several(mode, *names), tmp_path, "on_train_batch_end", every=3)
    assert len(whole.seen) == EPOCHS * (3 if mode == "min_size" else 6 - ("shuffled" not in names))


class Stateful(DataLoader[Any]):
    """As torchdata's loader: goes on where its state was, and is ahead of the fit by what Lightning has fetched."""

    def __init__(self, sized: bool) -> None:
        super().__init__(Numbered(), 8)
        self.given, self.first, self.sized = 0, 0, sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("not known")
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self.given, self.first = self.first, 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        for indices in torch.arange(SIZE).split(8)[self.given :]:
            self.given += 1
            yield default_collate([self.dataset[int(index)] for index in indices])

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first = state_dict["given"]


@pytest.mark.few(1)
@pytest.mark.parametrize("sized", [True, False])
def test_a_loader_with_a_state_goes_on_by_it(sized: bool, tmp_path: Path) -> None:
    def make() -> Stateful:
        loader = Stateful(sized)
        loader.dataset.rng = random  # type: ignore[attr-defined]  # nobody restores a generator of its own
        return loader

    check(make, tmp_path, "on_train_batch_end", "on_before_backward", every=3)


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore")
def test_so_does_that_of_torchdata(workers: int, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    make = lambda: stateful.StatefulDataLoader(list(range(SIZE)), 8, shuffle=True, num_workers=workers)  # noqa: E731

    class Numbers(Seen):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch[:, None].float().expand(-1, 8) / SIZE, batch], batch_idx)

    check(make, tmp_path, "on_train_batch_end", every=5, kind=Numbers)


# -- what a checkpoint holds ------------------------------------------------------------------------------------------


def test_its_checkpoint_loads_without_code_and_stays_small(tmp_path: Path) -> None:
    fit(LOADERS["lazy"](num_workers=2), lt.ExactResume(), Save(tmp_path, "on_train_batch_end"), max_epochs=1)
    fit(LOADERS["lazy"](num_workers=2), Save(tmp_path, "on_train_epoch_end"), max_epochs=1)
    with_it, without = (tmp_path / name for name in ("on_train_batch_end-0-5", "on_train_epoch_end-0-6"))
    checkpoint = torch.load(with_it, weights_only=True)
    assert with_it.stat().st_size - without.stat().st_size < 90_000
    (mine,) = checkpoint["loops"]["fit_loop"]["lightning_tricks"]["reading"]["ranks"]
    torch.save([deepcopy(mine) for _ in range(64)], tmp_path / "64")
    assert (tmp_path / "64").stat().st_size < 6_000_000


def test_a_fit_without_it_reads_its_checkpoint_as_any_other(tmp_path: Path) -> None:
    fit(LOADERS["shuffled"](), lt.ExactResume(), Save(tmp_path, "on_train_batch_end", "on_train_epoch_end"))
    assert len(fit(LOADERS["shuffled"](), ckpt_path=tmp_path / "on_train_epoch_end-1-12").seen) == 6
    with pytest.warns(UserWarning, match="your dataloader is not resumable"):
        assert len(fit(LOADERS["shuffled"](), ckpt_path=tmp_path / "on_train_batch_end-1-9").seen) == 9


def test_other_code_sees_the_loader_as_it_was() -> None:
    class Looks(Callback):
        def on_train_batch_end(self, run: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found = run.train_dataloader
            assert type(found).__name__ == "DataLoader"
            assert isinstance(found, DataLoader)
            assert found.sampler is loader.sampler
            assert found.batch_sampler is loader.batch_sampler
            assert found.collate_fn is loader.collate_fn
            assert len(found) == 6
            assert type(copy(found)) is DataLoader
            assert pickle.loads(pickle.dumps(copy(found))).batch_size == 8
            assert sum(len(numbers) for _, numbers in found) == SIZE  # another pass, amid the fit's

    loader = LOADERS["sequential"]()
    plain, looked = fit(LOADERS["sequential"]()), fit(loader, lt.ExactResume(), Looks())
    assert looked.seen == plain.seen


# -- refused by name --------------------------------------------------------------------------------------------------


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class Fetches(Seen):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(next(dataloader_iter)[0], 0)


class Listed:
    """Batches that are there already."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter([*LOADERS["sequential"]()])


UNKNOWN: dict[str, tuple[Callable[[], Any], type, str]] = {
    "stream": (
        lambda: DataLoader(Stream(Numbered()), 8),
        Seen,
        "of type DataLoader with an IterableDataset, Stream. Use torchdata's StatefulDataLoader",
    ),
    "listed": (Listed, Seen, "of type Listed, which iterates in a way of its own. Give it state_dict and load_state"),
    "own": (lambda: Own(Numbered(), 8), Seen, "of type Own, which iterates in a way of its own"),
    "order": (
        lambda: LOADERS["sequential"](num_workers=1, in_order=False),
        Seen,
        "with in_order=False, whose batches come as workers are done. Leave in_order out",
    ),
    "fetches": (LOADERS["sequential"], Fetches, r"Fetches.training_step\(dataloader_iter\), which fetches batches"),
}
begins_again = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")


@pytest.mark.few(3)
@begins_again
@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter`")
def test_what_has_no_known_position_is_refused_and_preemption_warns_of_it(case: str, tmp_path: Path) -> None:
    make, kind, told = UNKNOWN[case]
    with pytest.raises(MisconfigurationException, match=f"ExactResume cannot find its place in .*{told}"):
        fit(make(), lt.ExactResume(), kind=kind)
    fit(make(), lt.Preemption(tmp_path), Save(tmp_path, "on_train_batch_end"), kind=kind)
    names = sorted(path.name for path in tmp_path.iterdir())
    with pytest.warns(UserWarning, match=f"from the beginning of its order: its place is lost in .*{told}"):
        fit(make(), lt.Preemption(tmp_path), kind=kind, ckpt_path=tmp_path / names[2])


@begins_again
def test_a_checkpoint_of_another_fit_is_refused_amid_an_epoch_only(tmp_path: Path) -> None:
    fit(LOADERS["shuffled"](), Save(tmp_path, "on_train_batch_end", "on_train_epoch_end"))
    with pytest.raises(MisconfigurationException, match="amid an epoch with a checkpoint that was saved without it"):
        fit(LOADERS["shuffled"](), lt.ExactResume(), ckpt_path=tmp_path / "on_train_batch_end-1-9")
    assert len(fit(LOADERS["shuffled"](), lt.ExactResume(), ckpt_path=tmp_path / "on_train_epoch_end-1-12").seen) == 6
    with pytest.warns(UserWarning, match="goes on with samples from the beginning of its order"):
        fit(LOADERS["shuffled"](), lt.Preemption(tmp_path), ckpt_path=tmp_path / "on_train_batch_end-1-9")


class Hidden(Eager):
    """Has a state that nobody sees."""

    def __iter__(self) -> Iterator[int]:
        passes = self.__dict__.setdefault("hidden", {"passes": [lambda: 0]})["passes"]
        passes.append(lambda: 0)
        return iter(torch.arange(self.size).roll(len(passes)).tolist())


OTHERS: dict[str, tuple[Make, Make, str]] = {
    "hidden": (
        lambda: DataLoader(Numbered(), 8, sampler=Hidden()),
        lambda: DataLoader(Numbered(), 8, sampler=Hidden()),
        "first 3 batches .* are not those that it began with: .* Hidden has",
    ),
    "weighted": (
        LOADERS["weighted"],
        lambda: DataLoader(Numbered(), 4, sampler=WeightedRandomSampler(np.arange(1.0, SIZE + 1), SIZE)),
        "batch_size was 8, now 4. .*got WeightedRandomSampler. Resume with those settings, or from .* an epoch's end",
    ),
    "samples": (
        LOADERS["shuffled"],
        lambda: DataLoader(Numbered(50), 8, shuffle=True),
        "samples was 43, now 50. .*and the same number of them",
    ),
    "another": (LOADERS["lazy"], LOADERS["shuffled"], "sampler was 'Lazy', now 'RandomSampler'"),
    "lengths": (
        LOADERS["buckets"],
        lambda: DataLoader(Numbered(), 8, sampler=lt.LengthBuckets([2] * SIZE, 8)),
        "checksum of the lengths was",
    ),
    "loaders": (LOADERS["shuffled"], lambda: several("min_size", "shuffled", "lazy"), "1 loaders, .*now 2 loaders"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("trick", [lt.ExactResume, lambda: lt.Preemption("runs")], ids=["ExactResume", "Preemption"])
def test_other_samples_within_an_epoch_are_refused(case: str, trick: Any, tmp_path: Path) -> None:
    before, now, told = OTHERS[case]
    fit(before(), trick(), Save(tmp_path, "on_train_batch_end"))
    with pytest.raises(MisconfigurationException, match=told):
        fit(now(), trick(), ckpt_path=tmp_path / "on_train_batch_end-1-9")


# -- Preemption -------------------------------------------------------------------------------------------------------


class Stops(Callback):
    """Has a signal come in every so many batches."""

    def __init__(self, every: int) -> None:
        self.left = every

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGTERM)


def lives(make: Callable[[], Any], folder: Path, every: int, *more: Any, **settings: Any) -> tuple[list[Any], int, Any]:
    """The samples of a run that is ended every so many batches and begun again, the number of its lives, the module."""
    seen: list[Any] = []
    for life in range(1, 100):
        callbacks = [lt.Preemption(folder), Stops(every), *(trick() for trick in more)]
        module, run = Recorded(), trainer(**{"max_epochs": EPOCHS, "callbacks": callbacks, **settings})
        L.seed_everything(6 + life, verbose=False)
        try:
            run.fit(module, make(), ckpt_path="newest")  # type: ignore[arg-type]
        except SystemExit:
            seen += module.seen
        else:
            return [*seen, *module.seen], life, module
    raise AssertionError("it does not end")


class Recorded(Seen):
    def __init__(self) -> None:
        L.seed_everything(3, verbose=False)
        super().__init__()
        L.seed_everything(7, verbose=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [(), (lt.ExactResume,)], ids=["alone", "beside ExactResume"])
def test_a_run_of_many_lives_sees_every_sample_once_an_epoch(more: Any, tmp_path: Path) -> None:
    seen, count, module = lives(LOADERS["shuffled"], tmp_path, 1, *more, max_epochs=5)
    whole = fit(LOADERS["shuffled"](), max_epochs=5)
    assert count == 5 * 6 - 4  # at the end of an epoch, it goes on to the next
    assert seen == whole.seen
    assert_equal(weights(module), weights(whole))


def test_validations_and_windows_of_many_lives_are_those_of_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 4}
    seen, count, module = lives(LOADERS["lazy"], tmp_path, 3, **settings)
    whole = fit(LOADERS["lazy"](), lt.ExactResume(), **settings)
    assert count > 4
    assert seen == whole.seen
    assert_equal(weights(module), weights(whole))


@pytest.mark.parametrize("batch", [0, 1])
def test_a_validation_that_runs_again_draws_the_same_numbers(batch: int, tmp_path: Path) -> None:
    class Signals(Callback):
        def on_validation_batch_end(self, run: Any, module: Any, outputs: Any, data: Any, batch_idx: int) -> None:
            if run.global_step == 10 and batch_idx == batch:
                os.kill(os.getpid(), signal.SIGTERM)

    settings: dict[str, Any] = {"val_check_interval": 2}
    with pytest.raises(SystemExit):
        fit(LOADERS["lazy"](), lt.Preemption(tmp_path), Signals(), **settings)
    whole = fit(LOADERS["lazy"](), lt.ExactResume(), **settings)
    resumed = fit(LOADERS["lazy"](), lt.Preemption(tmp_path), ckpt_path="newest", **settings)
    assert resumed.seen == whole.seen[10 + batch :]  # behind its last batch the next step is taken first
    assert_equal(weights(resumed), weights(whole))


# -- several ranks ----------------------------------------------------------------------------------------------------


class Noted(Seen):
    """Notes the learning rate of each step, and the random numbers of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lrs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * torch.rand(()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.lrs.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        return lt.linear(super().configure_optimizers(), self)


def plain(batch_size: int = 4, shuffle: bool = True, **given: Any) -> DataLoader[Any]:
    return DataLoader(Numbered(), batch_size, shuffle=shuffle, **given)


def buckets(batch_size: int = 4) -> DataLoader[Any]:
    sampler = lt.LengthBuckets([1 + number % 9 for number in range(SIZE)], batch_size, pool=3)
    return DataLoader(Numbered(), batch_size, sampler=sampler)


def tokens(max_tokens: int = 30) -> DataLoader[Any]:
    sampler = lt.TokenBuckets([1 + number % 9 for number in range(SIZE)], max_tokens)
    return DataLoader(Numbered(), batch_size=None, sampler=sampler, collate_fn=lambda batch: batch)


def of_rank(make: Callable[[], Any], folder: Path, ckpt_path: Path | None, devices: int, **settings: Any) -> Any:
    """The samples, the learning rates and the weights of a fit on this rank, whose seed is its own."""
    rank = int(os.environ.get("RANK", 0))
    L.seed_everything(3, verbose=False)
    module, save = Noted(), Save(folder, "on_train_batch_end")
    given = {"max_epochs": EPOCHS, "callbacks": [lt.ExactResume(), save], "devices": devices, **settings}
    run = trainer(**{"strategy": DDPStrategy(process_group_backend="gloo") if devices > 1 else "auto", **given})
    L.seed_everything(7 + rank + 10 * (ckpt_path is not None), verbose=False)
    os.environ["PL_GLOBAL_SEED"] = "7"  # of the order, that of all ranks
    run.fit(module, make(), ckpt_path=ckpt_path)
    return module.seen, module.lrs, {name: value.numpy() for name, value in weights(module).items()}


def engine(name: str, **given: Any) -> dict[str, Any]:
    return lt.preset(name, precision="32-true", **given)


RANKED: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "workers": (partial(plain, num_workers=2), lambda: {"accumulate_grad_batches": 2}),
    "fsdp2": (plain, lambda: engine("fsdp2_bf16", process_group_backend="gloo")),
    "buckets": (buckets, dict),
    "weighted": (LOADERS["weighted"], dict),
    "zero1": (plain, lambda: engine("zero1_bf16")),
    "zero3": (plain, lambda: engine("zero3_bf16")),
}
QUICK = ("workers",)


def exact_on_ranks(case: str, folder: str) -> None:
    make, settings = RANKED[case]
    path = Path(folder, case)
    seen, lrs, end = of_rank(make, path, None, 2, **settings())
    steps = len(seen) // EPOCHS
    for batch in (steps + 2, 2 * steps):
        saved = path / f"on_train_batch_end-{(batch - 1) // steps}-{batch}"
        again = of_rank(make, path / "again", saved, 2, **settings())
        assert again[0] == seen[batch:]
        assert again[1] == lrs[len(lrs) - len(again[1]) :]
        assert all((again[2][name] == end[name]).all() for name in end)


@pytest.mark.parametrize("names", [QUICK, pytest.param({*RANKED} - {*QUICK}, marks=pytest.mark.slow)], ids=str)
def test_every_rank_goes_on_exactly(names: Any, tmp_path: Path) -> None:
    cases = run_cases(exact_on_ranks, sorted(names), str(tmp_path), timeout=300)
    for case in names:
        assert cases[case] == [None, None]


# -- with other ranks, or batches of another size ---------------------------------------------------------------------

KINDS: dict[str, tuple[Any, Any]] = {  # a loader, and the same with batches of another size
    "shuffled": (plain, partial(plain, 3)),
    "in order": (partial(plain, shuffle=False), partial(plain, 7, shuffle=False, drop_last=True)),
    "generator": (partial(plain, generator=generator()), partial(plain, 5, num_workers=1)),
    "buckets": (buckets, partial(buckets, 5)),
    "tokens": (tokens, partial(tokens, 40)),
}


def life(case: tuple[str, int], folder: str, ckpt_path: str | None, devices: int, window: int = 1) -> Any:
    """A fit that saves after each batch."""
    name, size = case
    saved = None if ckpt_path is None else Path(ckpt_path)
    return of_rank(KINDS[name][size], Path(folder), saved, devices, accumulate_grad_batches=window)


def seen_in(epoch: int, *lives: Any) -> list[int]:
    """The samples that all ranks of lives saw in an epoch."""
    batches = [batch for ranks in lives for seen in ranks for batch in seen]
    return sorted(number for batch in batches for at, number in batch if at == epoch)


def check_rest(first: list[Any], batches: int, second: list[Any], size: int, window: int) -> None:
    """Every sample comes once in the epoch that is interrupted, but for those that fill the ranks and batches."""
    (_, lrs, _), ranks = second[0], len(second)
    dropped = size == 7  # samples that fill no batch
    for epoch in range(EPOCHS):
        before = [seen[:batches] for seen, *_ in first]
        found = seen_in(epoch, before, [seen for seen, *_ in second])
        assert found.count(found[0]) <= 2
        assert len({*found}) == SIZE or (dropped and SIZE - len({*found}) < 7 * ranks)
        assert len(found) - SIZE < 12 * max(ranks, len(first)), epoch
    assert lrs == sorted(lrs, reverse=True)
    whole = [len(seen) for seen, *_ in second]
    assert len({*whole}) == 1
    planned = -(-len([0 for batch in second[0][0] if batch[0][0] == EPOCHS - 1]) // window)
    assert lrs[-1] == pytest.approx(0.1 / (planned * EPOCHS))  # the schedule ends where training does


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", few(KINDS, 2))
def test_the_samples_that_are_left_come_once_with_batches_of_another_size(
    name: str, size: int, window: int, tmp_path: Path
) -> None:
    first = life((name, 0), str(tmp_path), None, 1)
    steps = len(first[0]) // EPOCHS
    for batch in (1, steps + 3, 2 * steps - 1):
        saved = tmp_path / f"on_train_batch_end-{(batch - 1) // steps}-{batch}"
        second = life((name, size), str(tmp_path / "again"), str(saved), 1, window)
        check_rest([first], batch, [second], (4, {"in order": 7}.get(name, 4))[size], window)


def other_lives(case: tuple[str, int], folder: str) -> Any:
    """On two ranks: a life that goes on with that of one, one that goes on with this, and one from the beginning."""
    path = Path(folder, *map(str, case))
    later = life(case, str(path / "later"), str(path / "one" / "on_train_batch_end-1-14"), 2)
    third = life((case[0], 0), str(path / "third"), str(path / "later" / "on_train_batch_end-1-15"), 2)
    return later, third, life((case[0], 0), str(path / "two"), None, 2)


FEW = [("shuffled", 0), ("buckets", 1)]
MORE = [(name, size) for name in KINDS for size in (0, 1) if (name, size) not in (*FEW, ("in order", 1))]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, MORE], ids=["few", "more"])
def test_so_they_do_on_another_number_of_ranks(cases: list[tuple[str, int]], tmp_path: Path) -> None:
    ones = {case: life((case[0], 0), str(Path(tmp_path, *map(str, case), "one")), None, 1) for case in cases}
    found = run_cases(other_lives, cases, str(tmp_path), timeout=300)
    for case in cases:
        later, third, two = zip(*found[case], strict=True)
        check_rest([ones[case]], 14, [*later], 4, 1)
        seen = [ones[case][0][:14]], [ranks[0][: 15 - 14] for ranks in later], [ranks[0] for ranks in third]
        assert len({*seen_in(1, *seen)}) == SIZE  # the rest of a rest
        if not case[1]:  # the same settings
            for (mine, _, weight), (others, _, other) in zip(third, later, strict=True):
                assert mine == others[1:]
                assert all((weight[name] == other[name]).all() for name in weight)
        path = Path(tmp_path, *map(str, case), "two")
        batch = len(two[0][0]) // EPOCHS + 2
        alone = life(case, str(path / "again"), str(path / f"on_train_batch_end-1-{batch}"), 1)
        check_rest([*two], batch, [alone], 4, 1)
