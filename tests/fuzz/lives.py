"""Lives of a run: a random stack of tricks, what happens to it, and a plain loop that lives the same life.

A life has legs. The first begins a run; each further one fits the same Trainer again, or resumes the last checkpoint in
a new one, with other settings. A leg may be stopped after some batches. The plain loop knows neither Lightning nor this
package: it writes its plan out, epoch by epoch, and looks up the step of the plan in that list.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from tests.nets import trainer
from tests.reference.tricks import CURVES

LR = 0.1
FACTORIES = {name: getattr(lt, name) for name in CURVES if name not in ("LRSchedule", "constant", "swa_tail")}
STOPS = ("error", "ctrl-c", "sigterm")
LENGTHS = (0.1, 0.2)  # of the averages of PostHocEMA


@dataclass(frozen=True)
class Leg:
    """One fit of a run.

    Args:
        begins: "fresh" in the first leg; then "again" on the same Trainer, or "resumed" in a new one.
        samples: The number of training samples.
        batch_size: The size of a batch.
        accumulated: The number of batches per optimizer step.
        limit: ``limit_train_batches``.
        max_epochs: The number of epochs, those before included; -1 for no limit.
        max_steps: The number of optimizer steps, those before included; -1 for no limit.
        stop: The batches after which it is stopped, and by what; None for a leg that ends as planned.
        stops_first: Whether what stops it comes before the tricks in the callbacks.
        validates: Whether the Trainer validates the module before the leg.
        reverses: Whether the callbacks are in the reversed order.
    """

    begins: str = "fresh"
    samples: int = 20
    batch_size: int = 4
    accumulated: int = 1
    limit: float = 1.0
    max_epochs: int = 2
    max_steps: int = -1
    stop: tuple[int, str] | None = None
    stops_first: bool = False
    validates: bool = False
    reverses: bool = False

    @property
    def batches(self) -> int:
        return int(-(-self.samples // self.batch_size) * self.limit)


@dataclass(frozen=True)
class Life:
    """A stack of tricks, by their names in ``TRICKS``, a schedule, and the legs of a run."""

    tricks: tuple[str, ...] = ()
    schedule: str = ""
    legs: tuple[Leg, ...] = (Leg(),)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator)
    return TensorDataset(x[:samples], (x[:, 0] > 0).long()[:samples])


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


# -- the run in a Trainer ---------------------------------------------------------------------------------------------

TRICKS: dict[str, Callable[[Path], L.Callback]] = {
    "EMA": lambda _: lt.EMA(0.9),
    "EMA(start=0.5)": lambda _: lt.EMA(0.8, warmup=False, start=0.5),
    "AutoClip": lambda _: lt.AutoClip(10),
    "PostHocEMA": lambda folder: lt.PostHocEMA(folder / "ema", sigma_rels=LENGTHS, every_n_steps=3),
    "SequenceLengthWarmup": lambda _: lt.SequenceLengthWarmup(0.5, stop=0.75, multiple_of=1),
    "TokenMean": lambda _: lt.TokenMean(),
}


class Net(L.LightningModule):
    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.schedule = schedule
        self.layers = network()
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(widened(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.rates.append(float(optimizer.param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        return FACTORIES[self.schedule](optimizer, self) if self.schedule else optimizer


class SAMNet(lt.SAMMixin, Net):
    sam = lt.SAM(rho=0.1)


def widened(x: Tensor) -> Tensor:
    """Shorter inputs with zeros at their end."""
    return F.pad(x, (0, 6 - x.shape[1]))


class Stops(L.Callback):
    """Stops a leg after some batches."""

    leg = Leg()
    seen = 0

    def on_train_start(self, *_: Any) -> None:
        self.seen = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1
        if self.leg.stop is None or self.leg.stop[0] != self.seen:
            return
        if self.leg.stop[1] == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise KeyboardInterrupt if self.leg.stop[1] == "ctrl-c" else Planned("planned")


class Planned(Exception):
    """What stops a leg."""


class Saves(L.Callback):
    """Saves after each optimizer step; the last checkpoint is the one that is resumed."""

    def __init__(self, path: Path) -> None:
        self.path, self.step = path, 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            trainer.save_checkpoint(self.path)


@dataclass
class Lived:
    """What came of a leg.

    Args:
        rates: The learning rate of every optimizer step that counts.
        weights: The weights at its end.
        averages: The averages of PostHocEMA, of one length after the other.
    """

    rates: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    averages: list[Tensor] = field(default_factory=list)


def lived(life: Life, folder: Path) -> list[Lived]:
    """What came of each leg of the life in a Trainer, up to one that Lightning refuses: its epochs are over."""
    kind, path, found = SAMNet if "SAM" in life.tricks else Net, folder / "last.ckpt", []
    module, run, stops = kind(life.schedule), trainer(), Stops()
    for number, leg in enumerate(life.legs):
        if leg.begins == "resumed":
            module = kind(life.schedule)
        if leg.begins == "resumed" or number == 0:
            tricks = [TRICKS[name](folder) for name in life.tricks if name != "SAM"][:: -1 if leg.reverses else 1]
            stops = Stops()
            callbacks = [stops, *tricks] if leg.stops_first else [*tricks, stops]
            run = trainer(callbacks=[*callbacks, Saves(path)], max_epochs=leg.max_epochs)
        stops.leg, begun = leg, len(module.rates)
        run.fit_loop.max_epochs, run.fit_loop.epoch_loop.max_steps = leg.max_epochs, leg.max_steps
        run.accumulate_grad_batches, run.limit_train_batches = leg.accumulated, leg.limit
        batches = DataLoader(data(leg.samples), leg.batch_size)
        if leg.validates:
            run.validate(module, batches, verbose=False)
        resumes = leg.begins == "resumed" and path.exists()
        try:
            run.fit(module, batches, ckpt_path=path if resumes else None, weights_only=True if resumes else None)
        except (Planned, SystemExit, SIGTERMException):
            assert leg.stop is not None
        except MisconfigurationException as error:
            if "You restored a checkpoint with current_epoch" not in str(error):
                raise
            return found
        running = [trick.running().values() for trick in tricks if isinstance(trick, lt.PostHocEMA)]
        averages = [tensor.clone() for each in running for one in each for tensor in one.tensors.values()]
        found.append(Lived(module.rates[begun:], [p.detach().clone() for p in module.parameters()], averages))
    return found


# -- the plain loop ---------------------------------------------------------------------------------------------------


class Plain:
    """The same run without Lightning and without this package."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.layers = network()
        self.optimizer = self.fresh_optimizer()
        self.average: list[Tensor] | None = None
        self.updates = 0
        self.powers: list[list[Tensor]] = [[] for _ in LENGTHS]
        self.counted = 0  # the steps in these averages
        self.norms: list[float] = []
        self.epoch = self.batch = self.taken = 0  # epochs that are over, batches of the next one, optimizer steps
        self.batches = 0  # in an epoch, at present
        self.targets = 0  # in the gradients of a window, so far
        self.waits = False  # whether a checkpoint is restored, and no batch was trained since
        self.saved: Plain | None = None

    def fresh_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers.parameters(), lr=LR, momentum=0.9)

    def snapshot(self) -> Plain:
        kept = copy(self)
        kept.saved = None
        kept.layers = deepcopy(self.layers)
        kept.optimizer = kept.fresh_optimizer()
        kept.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        kept.average, kept.norms, kept.powers = deepcopy(self.average), [*self.norms], deepcopy(self.powers)
        return kept

    def lived(self, leg: Leg) -> Lived:
        """What comes of a leg."""
        if leg.begins == "again":
            self.optimizer, self.norms = self.fresh_optimizer(), []
            self.batch = self.batch if self.waits else 0
        elif leg.begins == "resumed":
            saved, old = self.saved, Plain(self.life)
            vars(self).update(vars(old if saved is None else saved.snapshot()))
            self.saved, self.waits = saved, saved is not None
        over = self.epoch >= leg.max_epochs != -1 or self.taken >= leg.max_steps != -1
        if self.waits and not over:
            if self.batch == self.batches:
                self.epoch, self.batch = self.epoch + (self.batch > 0), 0
            elif self.batches != leg.batches:  # the same fraction of the epoch, in whole windows
                self.batch = self.batch * leg.batches // self.batches // leg.accumulated * leg.accumulated
        if over:  # nothing is trained, and nothing begins
            return Lived([], self.left(), self.powers_left())
        self.batches = leg.batches
        rates, ended = self.train(leg, *self.place(leg))
        weights = self.left() if ended else [p.detach().clone() for p in self.layers.parameters()]
        return Lived(rates, weights, self.powers_left())

    def left(self) -> list[Tensor]:
        """The weights in the module after a fit that was not interrupted."""
        if self.average is None or not self.updates:
            return [p.detach().clone() for p in self.layers.parameters()]
        return [average.float() for average in self.average]

    def powers_left(self) -> list[Tensor]:
        """The averages of PostHocEMA, of one length after the other."""
        return [average.clone() for averages in self.powers for average in averages]

    def place(self, leg: Leg) -> tuple[int, int]:
        """The number of planned steps, and those before the position at which the leg begins."""
        plan = [(e, b) for e in range(max(leg.max_epochs, 0)) for b in range(0, leg.batches, leg.accumulated)]
        step = sum(begun < (self.epoch, self.batch) for begun in plan) - (self.batch % leg.accumulated > 0)
        left = leg.max_steps - self.taken
        if leg.max_epochs == -1 or (leg.max_steps != -1 and left < len(plan) - step):
            return leg.max_steps, self.taken
        return len(plan), step

    def begin(self, total: int, step: int) -> None:
        """Begin the average with the first batch that is trained on, or when its start has come."""
        if "EMA" in self.life.tricks or ("EMA(start=0.5)" in self.life.tricks and step >= 0.5 * total):
            self.average = self.average or [p.detach().double().clone() for p in self.layers.parameters()]

    def train(self, leg: Leg, total: int, step: int) -> tuple[list[float], bool]:
        """The learning rates of the optimizer steps, and whether training has ended as planned."""
        rates: list[float] = []
        samples, seen = data(leg.samples), 0
        while leg.max_epochs == -1 or self.epoch < leg.max_epochs:
            for x, y in list(DataLoader(samples, leg.batch_size))[: leg.batches - self.batch]:
                if leg.max_steps != -1 and self.taken >= leg.max_steps:
                    break
                if not seen:
                    self.targets = 0
                    self.begin(total, step)
                if self.batch % leg.accumulated == 0:
                    self.optimizer.zero_grad()
                    self.targets = 0
                self.targets += len(y)
                share = len(y) if "TokenMean" in self.life.tricks else 1 / leg.accumulated
                self.descend(self.begun(x, total, step), y, share)
                self.batch, seen, self.waits = self.batch + 1, seen + 1, False
                if self.batch % leg.accumulated == 0 or self.batch == leg.batches:
                    rates.append(self.rate(total, step))
                    self.step(rates[-1])
                    self.taken, step = self.taken + 1, step + 1
                    self.follow(total, step)
                    self.follow_powers()
                    if leg.stop is None or leg.stop[0] != seen or leg.stop[1] == "sigterm":  # else it comes before
                        self.saved = self.snapshot()
                if leg.stop is not None and leg.stop[0] == seen:
                    over = self.batch == leg.batches or self.taken == leg.max_steps
                    if leg.stop[1] == "sigterm" and over:  # Lightning ends the epoch first
                        self.epoch += 1
                    return rates, False
            if leg.max_steps != -1 and self.taken >= leg.max_steps:
                self.epoch += self.batch > 0
                return rates, True
            self.epoch, self.batch = self.epoch + 1, 0
        return rates, True

    def rate(self, total: int, step: int) -> float:
        return LR * (CURVES[self.life.schedule](step, total) if self.life.schedule else 1)

    def begun(self, x: Tensor, total: int, step: int) -> Tensor:
        if "SequenceLengthWarmup" not in self.life.tricks or step >= 0.75 * total:
            return x
        share = 0.5 + 0.5 * step / (0.75 * total)
        return widened(x[:, : max(1, min(6, round(6 * share)))])

    def descend(self, x: Tensor, y: Tensor, share: float) -> None:
        weights = list(self.layers.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(self.layers(x), y), weights)
        if "SAM" in self.life.tricks:
            norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
            kept = [weight.detach().clone() for weight in weights]
            with torch.no_grad():
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight += 0.1 * gradient / norm
            gradients = torch.autograd.grad(F.cross_entropy(self.layers(x), y), weights)
            with torch.no_grad():
                for weight, before in zip(weights, kept, strict=True):
                    weight.copy_(before)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient * share + (0 if weight.grad is None else weight.grad)

    def step(self, rate: float) -> None:
        gradients = [weight.grad for weight in self.layers.parameters() if weight.grad is not None]
        if "TokenMean" in self.life.tricks:
            torch._foreach_div_(gradients, self.targets)
        if "AutoClip" in self.life.tricks:
            self.norms.append(math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients)))
            for gradient in gradients:
                gradient *= min(1.0, float(np.percentile(self.norms, 10)) / self.norms[-1])
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def follow(self, total: int, step: int) -> None:
        """Move the average after a step."""
        if "EMA(start=0.5)" in self.life.tricks and self.average is None:
            return self.begin(total, step)
        for average, weight in zip(self.average or [], self.layers.parameters(), strict=False):
            decay = 0.8 if "EMA(start=0.5)" in self.life.tricks else min(0.9, (1 + self.updates) / (10 + self.updates))
            average += (1 - decay) * (weight.detach().double() - average)
        self.updates += self.average is not None
        return None

    def follow_powers(self) -> None:
        """Move the averages of PostHocEMA after a step, by the exponents of the paper."""
        if "PostHocEMA" not in self.life.tricks:
            return
        self.counted += 1
        for length, averages in zip(LENGTHS, self.powers, strict=True):
            weights = [weight.detach().double().clone() for weight in self.layers.parameters()]
            averages += weights if not averages else []
            decay = (1 - 1 / self.counted) ** (np.roots([1, 7, 16 - length**-2, 12 - length**-2]).real.max() + 1)
            for average, weight in zip(averages, weights, strict=True):
                average += (1 - decay) * (weight - average)


def require_same(life: Life, folder: Path) -> None:
    """Raise unless every leg of a life has the plain loop's learning rates and weights at its end."""
    plain = Plain(life)
    for number, (leg, mine) in enumerate(zip(life.legs, lived(life, folder), strict=False)):
        theirs = plain.lived(leg)
        where = f"leg {number} of {life}"
        same = mine.rates == pytest.approx(theirs.rates, rel=1e-6, abs=1e-9)
        assert same, f"learning rates {mine.rates}, not {theirs.rates}, of {where}"
        for one, other in zip(mine.weights, theirs.weights, strict=True):
            assert torch.allclose(one, other, atol=1e-5, rtol=1e-5), f"weights of {where}: {one}, not {other}"
        for one, other in zip(mine.averages, theirs.averages, strict=True):
            assert torch.allclose(one, other.float(), atol=1e-5, rtol=1e-5), f"averages of {where}: {one}, not {other}"


# -- random lives -----------------------------------------------------------------------------------------------------


def legs() -> st.SearchStrategy[Leg]:
    lengths = st.sampled_from([(2, -1), (3, -1), (4, -1), (-1, 8), (-1, 13), (3, 7), (4, 11)])
    stops = st.none() | st.tuples(st.integers(1, 12), st.sampled_from(STOPS))
    return st.builds(
        lambda length, **given: Leg(max_epochs=length[0], max_steps=length[1], **given),
        lengths,
        begins=st.sampled_from(["again", "resumed"]),
        samples=st.sampled_from([20, 20, 24, 13, 40]),
        batch_size=st.sampled_from([4, 4, 8, 5]),
        accumulated=st.sampled_from([1, 1, 2, 3]),
        limit=st.sampled_from([1.0, 1.0, 0.5]),
        stop=stops,
        stops_first=st.booleans(),
        validates=st.booleans(),
        reverses=st.booleans(),
    )


def lives() -> st.SearchStrategy[Life]:
    averages = st.sampled_from([(), ("EMA",), ("EMA(start=0.5)",)])
    others = st.sets(st.sampled_from(["AutoClip", "PostHocEMA", "SequenceLengthWarmup", "SAM", "TokenMean"])).map(
        sorted
    )
    return st.builds(
        lambda average, other, schedule, first, rest: Life(
            (*average, *other), schedule, (replace(first, begins="fresh"), *rest)
        ),
        averages,
        others,
        st.sampled_from(["", *FACTORIES, *FACTORIES]),
        legs(),
        st.lists(legs(), min_size=1, max_size=3),
    ).filter(lambda life: life.tricks or life.schedule)  # Lightning alone loses batches where it goes on elsewhere
