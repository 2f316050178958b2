"""A model of another project: how it is made and fitted, and what a fit of it is compared with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

State = dict[str, Tensor]
Kind = type[Any]

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Weights(Callback):
    """What a fit did: the weights before the first batch, behind each one and at an error.

    What it has of the optimizer steps is filled in by ``Watch``.
    """

    def __init__(self) -> None:
        self.start: State = {}
        self.weights: list[State] = []
        self.at_error: State = {}
        self.losses: list[float] = []
        self.gradients: list[State] = []
        self.rates: list[float] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.start = parameters(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(parameters(pl_module))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.at_error = parameters(pl_module)


class Watch(Weights):
    """The same with the losses, gradients and learning rates of the optimizer steps."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(float(loss))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        mine = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.detach().clone() for name, p in named if p in mine})
        self.rates.append(optimizer.param_groups[0]["lr"])


class Seeded(Callback):
    """The random numbers of a fit and of each of its batches are the same, whatever was drawn before."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        torch.manual_seed(11)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        torch.manual_seed(trainer.fit_loop.total_batch_idx)


class Validated(Callback):
    """The validated losses, of the same random numbers."""

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.losses: list[float] = []

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.state = torch.get_rng_state()
        torch.manual_seed(5)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics[self.monitor]))
        torch.set_rng_state(self.state)


class Fit(NamedTuple):
    """The module after a fit, its Trainer, and what the fit did."""

    module: Any
    trainer: Any
    watch: Weights

    def end(self) -> State:
        return {name: each for name, each in self.module.state_dict().items() if isinstance(each, Tensor)}


def parameters(module: Any) -> State:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_equal(one: State, other: State) -> None:
    """Bit for bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def assert_gradients(one: State, other: State, tolerance: float = 1e-4) -> None:
    """Equal but for the order of sums: compared with the length of the whole gradient, for small parts cancel."""
    assert one.keys() == other.keys()
    length = torch.stack([g.double().norm() for g in other.values()]).norm()
    apart = torch.stack([(one[name].double() - other[name].double()).norm() for name in other]).norm()
    assert length > 0, "the oracle has no gradient"
    assert apart <= tolerance * length, f"gradients are {float(apart / length):.2g} of their length apart"


def trick(name: str) -> Any:
    """Marks the test that finds the cell of a trick."""
    return pytest.mark.trick(name)


NO_LINEAR = dict.fromkeys(("QAT", "quantize", "Float8(emulate=True)"), "has no nn.Linear layers")
FLOAT8 = {"Float8(emulate=True)": "must be multiples of 16 for products in float8"}


class Base:
    """A model of a project; a subclass says how it is made and fitted."""

    model: str  # as the table names it
    pl: Any = lightning.pytorch  # or pytorch_lightning, where the project imports that
    refused: dict[str, str] = {}  # a regular expression of what the refusal of a trick says
    none: dict[str, str] = {}  # why a trick has no meaning
    defects: dict[str, str] = {}  # what is known to be wrong
    inputs: str | Sequence[str] | None = None  # as Mixup is told
    target: str | Sequence[str] | None = None
    count: Callable[[Any], Any] | None = None  # what FitsMemory is told of a batch; None if it counts targets itself
    layer = ""  # whose input HiddenMixup mixes
    logits = ""  # the output layer of classes, or the model that has one, as LeanLoss is told
    blocks: str | None = None  # for ActivationCheckpointing
    adapted = "Linear"  # the layers that LoRA adapts
    exempt = "^$"  # a regular expression of the weights of which the model itself wants no weight decay
    output = ""  # one of the weights of output layers, if these are not the last layer
    stem = ""  # the weight that LayerFreezing stops, if not the first one
    images = False
    sequences = False  # whether its inputs are tokens
    folds = False  # whether loaders of its data set need nothing but their batch size
    schedule = ""  # the one that the project ships
    double: dict[str, Any] = {}  # settings for fp64, where differences of fp32 are amplified
    preset: dict[str, Any] = {}  # what goes with a preset's name where the project sets precision= itself
    steps = 1  # optimizer steps of a batch
    monitor = "val_loss"

    # what a project says

    def module(self) -> Any:
        raise NotImplementedError

    def loaders(self) -> tuple[Any, Any]:
        """For training and validation, always in the same order."""
        raise NotImplementedError

    def sample_losses(self, module: Any, batch: Any) -> Tensor:
        """The loss of each sample, (n,), with its gradient; by the parts of the project, not by training_step."""
        raise NotImplementedError

    def hard_loss(self, module: Any, batch: Any, plain: Callable[[Any], Tensor]) -> Tensor:
        """The mean loss of the harder half."""
        losses = self.sample_losses(module, batch)
        return losses.topk(len(losses) // 2).values.mean()

    def subset(self, batch: Any, kept: Tensor) -> Any:
        """A batch of some samples: by default every tensor is cut."""
        if isinstance(batch, Tensor):
            return batch[kept]
        if isinstance(batch, dict):
            return {key: self.subset(each, kept) for key, each in batch.items()}
        return type(batch)(self.subset(each, kept) for each in batch) if isinstance(batch, (list, tuple)) else batch

    def train(self, module: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        """Fit as the project's users do and hand back the Trainer."""
        trainer = self.pl.Trainer(**{**QUIET, **settings}, callbacks=list(callbacks))
        trainer.fit(module, *self.loaders(), ckpt_path=ckpt_path, weights_only=False)
        return trainer

    def recast(self, module: Any, kind: Callable[[Kind], Kind]) -> None:
        """Make the module one of another class, before it is trained."""
        module.__class__ = kind(type(module))

    def optimizers(self, make: Callable[[str], Any]) -> Any:
        """What ``configure_optimizers`` returns, where ``make`` is given a pattern of the weights of an optimizer."""
        return make(".")

    # what is the same for all

    @property
    def lt(self) -> Any:
        """The package of the namespace that the project imports."""
        return import_module(
            {"lightning.pytorch": "lightning_tricks"}.get(self.pl.__name__, "pytorch_lightning_tricks")
        )

    def fit(
        self,
        *callbacks: Any,
        kind: Callable[[Kind], Kind] | None = None,
        change: Callable[[Any], Any] | None = None,
        watch: Weights | None = None,
        **settings: Any,
    ) -> Fit:
        """A fit of a new model, from seeded weights, with seeded random numbers.

        Args:
            callbacks: Callbacks of the Trainer.
            kind: Makes another class of the module's own.
            change: Changes the new module.
            watch: What looks on; by default a ``Watch``.
            settings: Further arguments of the Trainer.
        """
        watch = Watch() if watch is None else watch
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others warn of is not tested
            self.pl.seed_everything(3, verbose=False)
            module = self.module()
            if kind is not None:
                self.recast(module, kind)
            if change is not None:
                change(module)
            self.pl.seed_everything(7, verbose=False)
            trainer = self.train(module, *callbacks, watch, **settings)
        return Fit(trainer.lightning_module, trainer, watch)

    def validated(self, run: Fit, module: Any, *callbacks: Any) -> float:
        """The loss of a module on the validation data of a fit."""
        seen = Validated(self.monitor)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = self.pl.Trainer(**QUIET, precision=run.trainer.precision, callbacks=[*callbacks, seen])
            trainer.validate(module, run.trainer.val_dataloaders, verbose=False)
        return seen.losses[0]

    def optimizing(self, make: Callable[[Any, str], Any]) -> Callable[[Kind], Kind]:
        """The module with other optimizers, which ``make`` makes of it and of a pattern."""

        def configure_optimizers(module: Any) -> Any:
            return self.optimizers(lambda pattern: make(module, pattern))

        return lambda kind: type(kind.__name__, (kind,), {"configure_optimizers": configure_optimizers})

    def refuses(
        self,
        *callbacks: Any,
        kind: Callable[[Kind], Kind] | None = None,
        change: Callable[[Any], Any] | None = None,
        **settings: Any,
    ) -> None:
        """Skip what has no meaning; what is refused, after the named error came before the first step."""
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")
        if self.name in self.refused:
            watch = Weights()
            with pytest.raises(Exception, match=self.refused[self.name]) as caught:
                self.fit(*callbacks, kind=kind, change=change, watch=watch, **settings)
            assert caught.type.__name__ in ("MisconfigurationException", "ValueError"), caught.type
            assert_equal(watch.at_error if watch.start else {}, watch.start)  # not refused too late
            pytest.skip(f"refused: {caught.value}")

    @pytest.fixture(autouse=True)
    def _cell(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # where projects write
        mark = request.node.get_closest_marker("trick")
        self.name = mark.args[0] if mark else ""
        if why := self.defects.get(self.name):
            request.applymarker(pytest.mark.xfail(reason=why, strict=True))

    def plain(self) -> Fit:
        return plain(type(self))

    def assert_plain(self, run: Fit) -> None:
        """The fit is bit-equal to one without the trick."""
        assert_same(run, self.plain())


def assert_same(run: Fit, other: Fit) -> None:
    """Two fits are bit-equal."""
    assert len(run.watch.weights) == len(other.watch.weights)
    for one, another in zip(run.watch.weights, other.watch.weights, strict=True):
        assert_equal(one, another)
    assert_equal(run.end(), other.end())


@cache
def plain(kind: type[Base]) -> Fit:
    """The fit without any trick."""
    return kind().fit()
