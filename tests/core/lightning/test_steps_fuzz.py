"""The count of optimizer steps against fits of random settings: it is what they take, or it refuses for a reason."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_tricks.schedules import UnknownTotalSteps, optimizer_steps
from tests.nets import trainer
from tests.ranks import run_ranks
from tests.schedules.recording import Tiny, ones

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),  # any data will do
    pytest.mark.filterwarnings("ignore:Length of IterableDataset"),  # streams that lie about theirs
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined"),
    pytest.mark.filterwarnings("ignore:Total length of"),  # loaders without a batch
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),  # on purpose
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled"),  # shuffling, which is random here too
]

# -- loaders: each notes that it was started ---------------------------------------------------------------------------

STARTS: list[str] = []


class Loader(DataLoader):
    def __iter__(self) -> Any:
        STARTS.append("loader")
        return super().__iter__()


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        STARTS.append("stream")
        return iter(torch.full((self.samples, 1), 0.1))


class LyingStream(Stream):
    """Says that it is twice as long, or half."""

    def __init__(self, samples: int, factor: float) -> None:
        super().__init__(samples)
        self.factor = factor

    def __len__(self) -> int:
        return max(1, int(self.factor * self.samples))


class Batches:
    """A loader that is no DataLoader."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        STARTS.append("batches")
        return iter(torch.full((self.batches, 1, 1), 0.1))


class SizedBatches(Batches):
    def __len__(self) -> int:
        return self.batches


@dataclass(frozen=True)
class Source:
    """What a loader is made of."""

    kind: str
    samples: int
    batch_size: int
    drop_last: bool
    shuffle: bool
    workers: int = 0

    @property
    def sized(self) -> bool:
        return self.kind in ("map", "sized batches")

    def build(self) -> Any:
        if self.kind == "sized batches":
            return SizedBatches(self.samples)
        if self.kind == "batches":
            return Batches(self.samples)
        options: dict[str, Any] = {
            "batch_size": self.batch_size, "drop_last": self.drop_last, "num_workers": self.workers
        }  # fmt: skip
        if self.kind == "map":
            return Loader(TensorDataset(torch.full((self.samples, 1), 0.1)), shuffle=self.shuffle, **options)
        lies = {"too long": 2.0, "too short": 0.5}
        stream = LyingStream(self.samples, lies[self.kind]) if self.kind in lies else Stream(self.samples)
        return Loader(stream, **options)


@dataclass(frozen=True)
class Resume:
    """A checkpoint of batch ``batch`` (of all), saved in ``hook``; resumed for so many more epochs."""

    batch: int
    hook: str
    more_epochs: int


@dataclass(frozen=True)
class Run:
    """The settings of a fit, plain data that goes to other processes; ``again``: it then fits so many epochs more."""

    sources: tuple[Source, ...]
    nesting: str
    mode: str | None
    accumulation: int | tuple[tuple[int, int], ...]
    trainer: dict[str, Any] = field(hash=False)
    manual: bool
    max_time: bool
    from_hook: bool
    resume: Resume | None
    again: int | None

    def loaders(self, growth: int = 0) -> Any:
        built = [replace(source, samples=source.samples + growth).build() for source in self.sources]
        tree: Any = built[0] if self.nesting == "one" else built
        if self.nesting == "dict":
            tree = {str(i): each for i, each in enumerate(built)}
        elif self.nesting == "nested":
            tree = {"first": built[0], "rest": [built[1:]]}
        return tree if self.mode is None else CombinedLoader(tree, self.mode)

    def settings(self, more_epochs: int = 0) -> dict[str, Any]:
        found = dict(self.trainer)
        if found.get("max_epochs", -1) >= 0:
            found["max_epochs"] += more_epochs
        if isinstance(self.accumulation, int):
            found["accumulate_grad_batches"] = self.accumulation
        else:
            found["callbacks"] = [GradientAccumulationScheduler(dict(self.accumulation))]
        return {**found, "max_time": timedelta(hours=1)} if self.max_time else found

    @property
    def countable(self) -> bool:
        """Whether nothing stands against a count, if there is a step at all."""
        if self.manual or self.max_time:
            return False
        if self.trainer.get("max_epochs") == -1 and not self.trainer.get("fast_dev_run"):
            return True
        return all(each.sized for each in self.sources) and not self.trainer.get("reload_dataloaders_every_n_epochs")


# -- settings ----------------------------------------------------------------------------------------------------------

KINDS = (*["map"] * 8, *["sized batches"] * 3, "stream", "too long", "too short", "batches")


@st.composite
def sources(draw: st.DrawFn, workers: int) -> Source:
    return Source(
        kind=draw(st.sampled_from(KINDS)),
        samples=draw(st.integers(1, 11)),
        batch_size=draw(st.integers(1, 3)),
        drop_last=draw(st.booleans()),
        shuffle=draw(st.booleans()),
        workers=draw(st.integers(0, workers)),
    )


def one_in(number: int) -> st.SearchStrategy[bool]:
    return st.sampled_from([*[False] * (number - 1), True])


def maybe(strategy: st.SearchStrategy[Any], else_: Any = None) -> st.SearchStrategy[Any]:
    """Mostly not."""
    return one_in(4).flatmap(lambda yes: strategy if yes else st.just(else_))


@st.composite
def lengths(draw: st.DrawFn) -> dict[str, Any]:
    """What ends training."""
    if draw(one_in(8)):
        return {"fast_dev_run": draw(st.sampled_from([True, 2, 3]))}
    if draw(one_in(4)):
        return {"max_epochs": -1, "max_steps": draw(st.integers(1, 9))}
    return {
        "max_epochs": draw(st.integers(1, 3)),
        "max_steps": draw(st.sampled_from([-1, -1, 1, 2, 5, 7, 1000])),
        "min_epochs": draw(maybe(st.integers(1, 3))),
        "min_steps": draw(maybe(st.integers(1, 9))),
    }


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """What shortens an epoch."""
    amount = st.one_of(st.integers(0, 6), st.sampled_from([1.0, 0.77, 0.5, 0.3]))
    if draw(one_in(5)):
        return {"overfit_batches": draw(amount)}
    return {"limit_train_batches": draw(amount)} if draw(st.booleans()) else {}


@st.composite
def validations(draw: st.DrawFn) -> dict[str, Any]:
    every = draw(st.sampled_from([1.0, 1.0, 0.5, 2]))
    return {"val_check_interval": every, **({"check_val_every_n_epoch": None} if isinstance(every, int) else {})}


@st.composite
def resumptions(draw: st.DrawFn, max_steps: int, accumulation: Any) -> Resume | None:
    """Those in which Lightning itself goes on where it was; the others have tests of their own below."""
    hooks = [
        *(["on_train_batch_end"] if isinstance(accumulation, int) else []),
        *(["on_train_epoch_end"] if max_steps == -1 else []),
    ]
    if not hooks:
        return None
    return Resume(draw(st.integers(1, 9)), draw(st.sampled_from(hooks)), draw(st.integers(0, 2)))


@st.composite
def runs(draw: st.DrawFn, workers: int = 0) -> Run:
    several = draw(one_in(3))
    made = draw(st.lists(sources(workers), min_size=2, max_size=3)) if several else [draw(sources(workers))]
    ends = draw(lengths())
    scheduled = st.dictionaries(st.integers(0, 3), st.integers(1, 4), min_size=1, max_size=3)
    accumulation: Any = draw(st.one_of(st.integers(1, 4), maybe(scheduled.map(lambda d: tuple(d.items())), 1)))
    if ends.get("max_epochs") == -1:  # what has no batch, or no full window, would go on forever
        made = [replace(each, drop_last=False) for each in made]
        if any(each.kind == "too long" for each in made) or (several and not all(each.sized for each in made)):
            accumulation = 1
    shortened = draw(limits())
    resume = draw(maybe(resumptions(ends.get("max_steps", -1), accumulation)))
    modes = [None, *["min_size", "max_size", "max_size_cycle"] * 4, "sequential"]
    reloads = {"reload_dataloaders_every_n_epochs": draw(st.sampled_from([*[0] * 8, 1, 2]))}
    return Run(
        sources=tuple(made),
        nesting=draw(st.sampled_from(["nested", "dict", "list"])) if several else "one",
        mode=draw(st.sampled_from(modes)) if several else None,
        accumulation=accumulation,
        trainer={**ends, **shortened, **draw(validations()), **reloads},
        manual=draw(one_in(20)) and accumulation == 1,
        max_time=draw(one_in(20)),
        from_hook=draw(one_in(4)),
        resume=resume,
        again=None if resume or not isinstance(accumulation, int) else draw(maybe(st.integers(0, 2))),
    )


# -- fits --------------------------------------------------------------------------------------------------------------


def random_numbers() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


class Asking(Tiny):
    """Asks twice in each fit, and trains whether there is an answer or not."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.automatic_optimization = run, not run.manual
        self.answers: list[int | str] = []

    def ask(self) -> None:
        before = random_numbers(), len(STARTS)
        try:
            self.answers.append(optimizer_steps(self.trainer))
        except UnknownTotalSteps as error:
            self.answers.append(error.reason)
        assert before == (random_numbers(), len(STARTS)), "asking drew random numbers or started a loader"

    def configure_optimizers(self) -> Any:
        self.ask()
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.ask()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            loss.backward()
            self.optimizers().step()  # type: ignore[union-attr]
        return loss

    def on_train_epoch_end(self) -> None:
        assert self.trainer.current_epoch < 100, "this would go on forever"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Bringing(Asking):
    """With loaders of its own, which take random numbers to make and grow when they are reloaded."""

    def train_dataloader(self) -> Any:
        torch.rand(1), np.random.rand(1), random.random()
        reloads = self.trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        return self.run.loaders(growth=self.trainer.current_epoch if reloads else 0)


class SaveOnce(Callback):
    def __init__(self, path: Path, resume: Resume) -> None:
        self.path, self.resume, self.batches, self.saved = path, resume, 0, False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.batches += 1
        self.save(trainer, "on_train_batch_end")

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.save(trainer, "on_train_epoch_end")

    def save(self, trainer: L.Trainer, hook: str) -> None:
        if hook == self.resume.hook and self.batches >= self.resume.batch and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)


@dataclass(frozen=True)
class Outcome:
    """What was answered and how many steps the whole training took."""

    answers: tuple[int | str, ...]
    steps: int


REFUSALS = ("Please increase the `limit", "must be `1.0` or an int", "must be time based", "does not support the `Comb")


def take(run: Run, path: Path, **more: Any) -> list[Outcome]:
    """The outcomes of the fit and of what follows it; none if Lightning itself refuses the settings."""
    try:
        return list(_take(run, path, more))
    except (MisconfigurationException, ValueError) as error:
        if any(refusal in str(error) for refusal in REFUSALS):
            return []
        raise


def _take(run: Run, path: Path, more: dict[str, Any]) -> Iterator[Outcome]:
    module, options = (Bringing if run.from_hook else Asking)(run), {**run.settings(), **more}
    train = None if run.from_hook else run.loaders()
    save = SaveOnce(path, run.resume) if run.resume else None
    first = trainer(**{**options, "callbacks": [*options.get("callbacks", []), *([save] if save else [])]})
    first.fit(module, train, ones(2))
    yield Outcome(tuple(module.answers), len(module.optimizer.lrs))
    if run.again is not None:
        if first.max_epochs != -1:
            first.fit_loop.max_epochs += run.again
        taken, module.answers = len(module.optimizer.lrs), []
        first.fit(module, train, ones(2))
        yield Outcome(tuple(module.answers), taken + len(module.optimizer.lrs))
    if run.resume and save and save.saved:
        module = type(module)(run)
        second = trainer(**{**options, **run.settings(run.resume.more_epochs), **more})
        second.fit(module, None if run.from_hook else run.loaders(), ones(2), ckpt_path=path, weights_only=True)
        taken = torch.load(path, weights_only=True)["global_step"]
        yield Outcome(tuple(module.answers), taken + len(module.optimizer.lrs))


def check(run: Run, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert len(set(outcome.answers)) == 1, outcome
        answer = outcome.answers[0]
        if run.countable and outcome.steps:
            assert answer == outcome.steps, outcome
        else:
            assert isinstance(answer, str), outcome


def examples(number: int, workers: int = 0, **more: Any) -> Any:
    """The same so many random runs each time."""
    fixed = settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        **more,
    )
    return lambda test: fixed(given(run=runs(workers))(test))


def fit_and_check(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(run, take(run, Path(folder) / "resume.ckpt"))


@examples(30)
def test_the_count_is_what_a_fit_of_any_settings_takes(run):
    fit_and_check(run)


@pytest.mark.slow
@examples(4000)
def test_the_count_is_what_many_more_fits_take(run):
    fit_and_check(run)


@pytest.mark.slow
@examples(100, workers=1)
def test_the_count_is_what_fits_with_workers_take(run):
    fit_and_check(run)


def some_runs(number: int) -> list[Run]:
    """Random runs as a list, for processes that are expensive to start."""
    found: list[Run] = []

    @examples(number, phases=[Phase.generate])
    def collect(run: Run) -> None:
        found.append(run)

    collect()
    return found


def _on_a_rank(made: list[Run], folder: Path) -> list[list[Outcome]]:
    torch.manual_seed(0)
    more = [{"strategy": "ddp", "devices": 2, "use_distributed_sampler": i % 4 > 0} for i in range(len(made))]
    return [take(run, folder / f"{i}.ckpt", **more[i]) for i, run in enumerate(made)]


def assert_two_ranks_count(number: int, folder: Path, timeout: float) -> None:
    made = some_runs(number)
    first, second = run_ranks(_on_a_rank, made, folder, timeout=timeout)
    assert first == second
    for run, outcomes in zip(made, first, strict=True):
        check(run, outcomes)


@pytest.mark.slow
def test_the_count_is_what_two_ranks_take_with_any_settings(tmp_path):
    assert_two_ranks_count(40, tmp_path, timeout=300)


@pytest.mark.slow
def test_the_count_is_what_two_ranks_take_with_many_more_settings(tmp_path):
    assert_two_ranks_count(600, tmp_path, timeout=600)


# -- where Lightning's own estimate is wrong, or no count can be right -------------------------------------------------


def four(kind: str) -> Source:
    """Four batches an epoch."""
    return Source(kind, samples=4, batch_size=1, drop_last=False, shuffle=False)


def run_of(source: Source | None = None, **changes: Any) -> Run:
    """Four batches an epoch, two epochs."""
    plain = Run(
        sources=(source or four("map"),),
        nesting="one",
        mode=None,
        accumulation=1,
        trainer={"max_epochs": 2},
        manual=False,
        max_time=False,
        from_hook=False,
        resume=None,
        again=None,
    )
    return replace(plain, **changes)


def outcome_of(run: Run, **more: Any) -> Outcome:
    (outcome,) = take(run, Path(), **more)
    return outcome


@pytest.mark.parametrize(
    ("reason", "steps", "run"),
    [
        ("no length that can be relied on", 8, run_of(four("too long"))),
        ("no length that can be relied on", 4, run_of(four("too short"))),
        ("no length that", 8, run_of(four("stream"), trainer={"max_epochs": 2, "limit_train_batches": 30})),
        # it grows when it is reloaded: 4 + 5 + 6 batches
        ("reloaded", 15, run_of(trainer={"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}, from_hook=True)),
        ("max_time", 3, run_of(trainer={"max_steps": 3}, max_time=True)),
        ("limit_train_batches=0", 0, run_of(trainer={"max_epochs": -1, "max_steps": 5, "limit_train_batches": 0})),
    ],
    ids=["too long", "too short", "shorter than the limit", "grows", "max_time", "no batches"],
)
def test_what_cannot_be_counted_is_refused_with_the_reason(reason, steps, run):
    outcome = outcome_of(run)
    assert outcome.steps == steps
    assert outcome.answers
    assert all(reason in str(answer) for answer in outcome.answers)


def test_max_steps_that_manual_optimization_overshoots_are_refused():
    class Twice(Asking):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.optimizers().step()  # type: ignore[union-attr]

    module = Twice(run_of(manual=True))
    trainer(max_steps=5).fit(module, ones(4), ones(2))
    assert len(module.optimizer.lrs) == 6
    assert "automatic_optimization=False" in str(module.answers[0])


class AccumulatesItself(SingleDeviceStrategy):
    """As DeepSpeed does, whose windows go on from epoch to epoch."""

    @property
    def handles_gradient_accumulation(self) -> bool:
        return True


@pytest.mark.parametrize(("accumulation", "answer"), [(1, 8), (2, "AccumulatesItself accumulates gradients")])
def test_a_strategy_that_accumulates_across_epochs_is_refused(accumulation, answer):
    run = run_of(accumulation=accumulation)
    (found, _) = outcome_of(run, strategy=AccumulatesItself(), accelerator="auto").answers
    assert found == answer if isinstance(answer, int) else answer in str(found)


def test_a_step_without_a_loss_counts():
    class NoLoss(Asking):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    module = NoLoss(run_of())
    trainer().fit(module, ones(4), ones(2))
    assert module.answers == [8, 8]
    assert len(module.optimizer.lrs) == 8


def test_an_epoch_that_a_hook_ends_is_not_foreseen():
    class Skips(Asking):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    module = Skips(run_of())
    trainer().fit(module, ones(4), ones(2))
    assert module.answers == [8, 8]
    assert len(module.optimizer.lrs) == 4


@pytest.mark.parametrize("empty", [0, 1])
@pytest.mark.parametrize(("mode", "steps"), [("max_size_cycle", 0), ("min_size", 0), ("max_size", 8)])
def test_an_empty_loader_cannot_be_cycled(mode, steps, empty):
    both = [four("map")]
    both.insert(empty, Source("map", 1, 2, drop_last=True, shuffle=False))
    run = run_of(sources=tuple(both), nesting="list", mode=mode)
    assert outcome_of(run).steps == steps
    check(run, take(run, Path()))


# -- where Lightning resumes elsewhere than it stopped: the count is that of the plan, as before the resume ------------


def test_lightning_loses_steps_when_it_resumes_an_end_of_epoch_checkpoint_with_max_steps(tmp_path):
    resume = Resume(1, "on_train_epoch_end", 0)
    whole, resumed = take(run_of(trainer={"max_epochs": 3, "max_steps": 100}, resume=resume), tmp_path / "resume.ckpt")
    assert whole == Outcome((12, 12), 12)
    assert resumed == Outcome((12, 12), 8), "if Lightning no longer loses steps, let the fuzz resume like this"


def test_lightning_forgets_scheduled_accumulation_when_it_resumes_within_an_epoch(tmp_path):
    resume = Resume(2, "on_train_batch_end", 0)
    whole, resumed = take(run_of(accumulation=((0, 2),), resume=resume), tmp_path / "resume.ckpt")
    assert whole == Outcome((4, 4), 4)
    assert resumed == Outcome((4, 4), 5), "if Lightning no longer forgets it, let the fuzz resume like this"
