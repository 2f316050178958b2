"""What every trick must do in the module of another project: equal something that was computed without it.

A model of a project is a class that inherits from ``Client``, and with it a test for each trick. The oracles compare
whole fits bit for bit where the trick is at its no-op limit, and the gradients of the first optimizer step, before the
model's own optimizer makes signs of them, where it does something.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from tests.reference.averages import NaiveEMA
from tests.reference.swa import NaiveSWA

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


class Watch(Callback):
    """What a fit did: losses, gradients and learning rates of the optimizer steps, weights behind each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[State] = []
        self.rates: list[float] = []
        self.weights: list[State] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.losses.append(float(loss))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        mine = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.detach().clone() for name, p in named if p in mine})
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights.append(parameters(pl_module))


class Fit(NamedTuple):
    """The module after a fit, its Trainer, and what the fit did."""

    module: Any
    trainer: Any
    watch: Watch

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


# -- other classes of a module, made of the project's own -----------------------------------------------------------


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def stepping(
    step: Callable[[Any, Callable[[Any], Tensor], Any, int], Any], **attributes: Any
) -> Callable[[Kind], Kind]:
    """Subclasses whose ``training_step`` is ``step(module, the project's own, batch, number)``.

    The project's own draws the same random numbers each time that a step calls it.
    """

    def of(kind: Kind) -> Kind:
        own, count = kind.training_step, iter(range(10**9))

        @wraps(own)  # by whose signature Lightning knows what to pass
        def training_step(self: Any, batch: Any, *rest: Any) -> Any:
            state = torch.get_rng_state()

            def plain(other: Any) -> Tensor:
                torch.set_rng_state(state)
                return loss_of(own(self, other, *rest))

            return step(self, plain, batch, next(count))

        return type(kind.__name__, (kind,), {"training_step": training_step, **attributes})

    return of


def naive_sam(rho: float, losses: list[float]) -> Callable[[Kind], Kind]:
    """The gradient at ``w + rho * g / ||g||``, with the project's own training step and nothing of ours.

    Notes the losses at w, which is what is trained on as far as anyone sees.
    """

    def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
        trained = [p for p in module.parameters() if p.requires_grad]
        loss = plain(batch)
        losses.append(float(loss))
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        module.__dict__["_held"] = [(p, p.detach().clone()) for p in trained]
        norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        with torch.no_grad():
            for p, g in zip(trained, gradients, strict=True):
                if g is not None:
                    p.add_(rho * g / norm)
        return plain(batch)

    @torch.no_grad()
    def on_after_backward(self: Any) -> None:
        for p, before in self.__dict__.pop("_held"):
            p.copy_(before)

    return stepping(step, on_after_backward=on_after_backward)


def poisoned(number: int) -> Callable[[Kind], Kind]:
    """The losses of one batch are not numbers, in manual optimization too."""

    def of(kind: Kind) -> Kind:
        def step(module: Any, plain: Any, batch: Any, at: int) -> Any:
            module.__dict__["_factor"] = math.nan if at == number else 1.0
            loss = plain(batch)
            return loss if loss is None else loss * module.__dict__["_factor"]

        def manual_backward(self: Any, loss: Tensor, *rest: Any, **named: Any) -> None:
            kind.manual_backward(self, loss * self.__dict__["_factor"], *rest, **named)

        return stepping(step, manual_backward=manual_backward)(kind)

    return of


# -- batches ----------------------------------------------------------------------------------------------------------


def get(batch: Any, path: str) -> Any:
    for key in path.split("."):
        batch = batch[key] if isinstance(batch, dict) or hasattr(batch, "keys") else _item(batch, key)
    return batch


def _item(batch: Any, key: str) -> Any:
    return batch[int(key)] if key.isdigit() else getattr(batch, key)


def put(batch: Any, path: str, value: Any) -> Any:
    """A batch with another value at a path."""
    key, _, rest = path.partition(".")
    value = put(get(batch, key), rest, value) if rest else value
    if isinstance(batch, dict):
        return {**batch, key: value}
    if hasattr(batch, "_replace"):
        return batch._replace(**{batch._fields[int(key)] if key.isdigit() else key: value})
    if not key.isdigit():
        batch = copy(batch)
        setattr(batch, key, value)
        return batch
    return type(batch)(value if number == int(key) else each for number, each in enumerate(batch))


def paths(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


# -- the tests ---------------------------------------------------------------------------------------------------------


def trick(name: str) -> Any:
    """Marks the test that finds the cell of a trick."""
    return pytest.mark.trick(name)


NEUTRAL = {
    "TerminateOnNonFinite": lambda lt: lt.TerminateOnNonFinite(),
    "RewindOnSpike": lambda lt: lt.RewindOnSpike(every_n_steps=2),
    "Doctor": lambda lt: lt.Doctor(),
    "BatchSizeWarmup": lambda lt: lt.BatchSizeWarmup(1, final=1, over=1),
}


class Client:
    """A model of a project; a subclass says how it is made and fitted."""

    model: str  # as the table names it
    pl: Any = lightning.pytorch  # or pytorch_lightning, where the project imports that
    refused: dict[str, str] = {}  # a regular expression of what the refusal of a trick says
    none: dict[str, str] = {}  # why a trick has no meaning
    defects: dict[str, str] = {}  # what is known to be wrong
    inputs: str | Sequence[str] | None = None  # as Mixup is told
    target: str | Sequence[str] | None = None
    layer = ""  # whose input HiddenMixup mixes
    blocks: str | None = None  # for ActivationCheckpointing
    images = False
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

    # what is the same for all

    @property
    def lt(self) -> Any:
        """The package of the namespace that the project imports."""
        return import_module(
            {"lightning.pytorch": "lightning_tricks"}.get(self.pl.__name__, "pytorch_lightning_tricks")
        )

    def fit(self, *callbacks: Any, kind: Callable[[Kind], Kind] | None = None, **settings: Any) -> Fit:
        """A fit of a new model, from seeded weights, with seeded random numbers."""
        watch = Watch()
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others warn of is not tested
            self.pl.seed_everything(3, verbose=False)
            module = self.module()
            if kind is not None:
                self.recast(module, kind)
            self.pl.seed_everything(7, verbose=False)
            trainer = self.train(module, *callbacks, watch, **settings)
        return Fit(trainer.lightning_module, trainer, watch)

    def sam(self, rho: float) -> Callable[[Kind], Kind]:
        """The module with the mixin."""
        lt = self.lt
        return lambda kind: type(f"SAM{kind.__name__}", (lt.SAMMixin, kind), {"sam": lt.SAM(rho)})

    def refuses(self, *callbacks: Any, kind: Callable[[Kind], Kind] | None = None) -> None:
        """Skip what has no meaning; what is refused, after the named error came before the first step."""
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")
        if self.name in self.refused:
            watch = Watch()
            with pytest.raises(Exception, match=self.refused[self.name]) as caught:
                self.fit(*callbacks, watch, kind=kind)
            assert caught.type.__name__ == "MisconfigurationException", caught.type
            assert not watch.gradients, "refused too late"
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
        assert len(run.watch.weights) == len(self.plain().watch.weights)
        for one, other in zip(run.watch.weights, self.plain().watch.weights, strict=True):
            assert_equal(one, other)
        assert_equal(run.end(), self.plain().end())

    def test_the_project_alone_does_the_same_twice(self) -> None:
        """Without which no oracle says anything."""
        self.assert_plain(self.fit())

    @trick("EMA")
    def test_ema(self) -> None:
        self.refuses(self.lt.EMA(0.9))
        naive = NaiveEMA(0.9)
        run = self.fit(self.lt.EMA(0.9, warmup=False), naive)
        naive.assert_equals(run.module.state_dict())
        assert_equal(run.watch.weights[-1], self.plain().watch.weights[-1])
        self.assert_plain(self.fit(self.lt.EMA(0)))

    @trick("SWA")
    def test_swa(self) -> None:
        average = self.lt.SWA(start=1, every_n_steps=1, recalibrate_batchnorm=False)
        self.refuses(average)
        naive = NaiveSWA(1, 1)
        run = self.fit(average, naive)
        naive.assert_equals(run.module.state_dict())
        assert_equal(run.watch.weights[-1], self.plain().watch.weights[-1])

    @trick("SAM")
    def test_sam(self) -> None:
        """The callback against a naive one, the mixin at its no-op limit."""
        self.refuses(self.lt.SAMCallback(0.05))
        losses: list[float] = []
        sharp = self.fit(self.lt.SAMCallback(0.05), **self.double).watch
        naive = self.fit(kind=naive_sam(0.05, losses), **self.double).watch
        assert_gradients(sharp.gradients[0], naive.gradients[0])
        assert sharp.losses[:3] == pytest.approx(losses[:3], rel=1e-3, abs=1e-5)
        self.assert_plain(self.fit(self.lt.SAMCallback(0.0)))
        self.assert_plain(self.fit(kind=self.sam(0.0)))

    @trick("Mixup")
    def test_mixup(self) -> None:
        names = {"inputs": self.inputs, "target": self.target}
        mix = self.lt.Mixup(alpha=1.0, **names)
        self.refuses(mix)
        mixed = self.fit(mix, max_steps=1, **self.double).watch
        lam, index = mix.drawn.lam, mix.drawn.index

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            for path in paths(self.inputs or "0"):
                x = get(batch, path)
                batch = put(batch, path, lam * x + (1 - lam) * x[index])
            return lam * plain(batch) + (1 - lam) * plain(self.with_partners(batch, index))

        assert 0 < lam < 1
        assert_gradients(
            mixed.gradients[0], self.fit(kind=stepping(step), max_steps=1, **self.double).watch.gradients[0]
        )
        self.assert_plain(self.fit(self.lt.Mixup(alpha=0, **names)))

    def with_partners(self, batch: Any, index: Tensor) -> Any:
        """The batch with the targets of each sample's partner."""
        for path in paths(self.target or "1"):
            batch = put(batch, path, get(batch, path)[index])
        return batch

    @trick("CutMix")
    def test_cutmix(self) -> None:
        if not self.images:
            pytest.skip("none: the inputs are no images")
        names = {"inputs": self.inputs, "target": self.target}
        mix, seen = self.lt.CutMix(alpha=1.0, **names), []
        self.refuses(mix)

        def keep(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            seen.append(get(batch, self.inputs or "0").clone())
            return plain(batch)

        mixed = self.fit(mix, kind=stepping(keep), max_steps=1, **self.double).watch
        index, cut = mix.drawn.index, seen[0]

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            x, y = get(batch, self.inputs or "0"), get(batch, self.target or "1")
            box = (cut != x).any(1).any(0)  # of random pixels; the same in all samples
            assert torch.equal(cut, torch.where(box, x[index], x))
            batch = put(batch, self.inputs or "0", cut)
            if y.shape[-2:] == x.shape[-2:]:
                return plain(put(batch, self.target or "1", torch.where(box, y[index], y)))
            share = box.float().mean().item()
            return (1 - share) * plain(batch) + share * plain(self.with_partners(batch, index))

        assert_gradients(
            mixed.gradients[0], self.fit(kind=stepping(step), max_steps=1, **self.double).watch.gradients[0]
        )
        self.assert_plain(self.fit(self.lt.CutMix(alpha=0, **names)))

    @trick("HiddenMixup")
    def test_hidden_mixup(self) -> None:
        if not self.layer and self.name not in self.refused:
            pytest.skip("none: no layer whose input is one vector a sample")
        mix = self.lt.HiddenMixup(self.layer, alpha=1.0, target=self.target)
        self.refuses(mix)
        mixed = self.fit(mix, max_steps=1, **self.double).watch
        lam, index = mix.drawn.lam, mix.drawn.index

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            def blend(layer: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
                return lam * given[0] + (1 - lam) * given[0][index], *given[1:]

            handle = module.get_submodule(self.layer).register_forward_pre_hook(blend)
            loss = lam * plain(batch) + (1 - lam) * plain(self.with_partners(batch, index))
            handle.remove()
            return loss

        assert 0 < lam < 1
        assert_gradients(
            mixed.gradients[0], self.fit(kind=stepping(step), max_steps=1, **self.double).watch.gradients[0]
        )
        self.assert_plain(self.fit(self.lt.HiddenMixup(self.layer, alpha=0, target=self.target)))

    @trick("HardExampleFilter")
    def test_hard_examples(self) -> None:
        self._hard_examples("prune")

    @trick('HardExampleFilter(mode="loss")')
    def test_hard_losses(self) -> None:
        self._hard_examples("loss")

    def _hard_examples(self, mode: str) -> None:
        def make(keep: float) -> Any:
            return self.lt.HardExampleFilter(keep, mode=mode, inputs=self.inputs, target=self.target)

        self.refuses(make(0.5))
        filtered = self.fit(make(0.5), max_steps=1, **self.double).watch

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            if mode == "loss":
                return self.hard_loss(module, batch, plain)
            losses = self.sample_losses(module, batch)  # with the random numbers of the step
            return plain(self.subset(batch, losses.detach().topk(len(losses) // 2).indices.sort().values))

        assert_gradients(
            filtered.gradients[0], self.fit(kind=stepping(step), max_steps=1, **self.double).watch.gradients[0]
        )
        self.assert_plain(self.fit(make(1.0)))

    @trick("LRSchedule")
    def test_lr_schedule(self) -> None:
        """Refused beside the schedule of a project, unless it is to take its place."""
        self.refuses(self.lt.LRSchedule("cosine"))
        if self.schedule:
            with pytest.raises(
                Exception, match=f"{self.schedule} from configure_optimizers: both set the learning rate"
            ):
                self.fit(self.lt.LRSchedule("cosine"))
        run = self.fit(self.lt.LRSchedule("cosine", replace=bool(self.schedule)))
        rates, base = run.watch.rates, run.trainer.optimizers[0].defaults["lr"]
        assert rates == pytest.approx([base * (1 + math.cos(math.pi * t / len(rates))) / 2 for t in range(len(rates))])
        constant = self.fit(self.lt.LRSchedule("constant", replace=bool(self.schedule)))
        assert constant.watch.rates == pytest.approx([base] * len(rates))
        if not self.schedule:
            self.assert_plain(constant)

    @pytest.mark.parametrize("name", [pytest.param(name, marks=trick(name)) for name in NEUTRAL])
    def test_a_healthy_fit_is_left_alone(self, name: str) -> None:
        self.refuses(NEUTRAL[name](self.lt))
        self.assert_plain(self.fit(NEUTRAL[name](self.lt)))

    @trick("ActivationCheckpointing")
    def test_activation_checkpointing(self) -> None:
        callback = self.lt.ActivationCheckpointing(self.blocks)
        self.refuses(callback)
        self.assert_plain(self.fit(callback))

    @trick("SkipNonFinite")
    def test_skip_non_finite(self) -> None:
        self.refuses(self.lt.SkipNonFinite())
        self.assert_plain(self.fit(self.lt.SkipNonFinite()))
        run = self.fit(self.lt.SkipNonFinite(), kind=poisoned(2))
        assert_equal(run.watch.weights[2], run.watch.weights[1])
        assert any((run.watch.weights[3][name] != each).any() for name, each in run.watch.weights[2].items())
        assert all(each.isfinite().all() for each in run.watch.weights[-1].values())

    @trick("AutoClip")
    def test_auto_clip(self) -> None:
        """At the percentile 0 every gradient is clipped to the smallest norm that its optimizer has seen."""
        self.refuses(self.lt.AutoClip(100))
        before = Watch()
        after = self.fit(before, self.lt.AutoClip(0)).watch
        norms = [_norm(each) for each in before.gradients]
        smallest = [min(norms[number % self.steps : number + 1 : self.steps]) for number in range(len(norms))]
        assert [_norm(each) for each in after.gradients] == pytest.approx(smallest, rel=1e-3)
        self.assert_plain(self.fit(self.lt.AutoClip(100)))

    @trick("AdaptiveClip")
    def test_adaptive_clip(self) -> None:
        """No tensor's gradient is longer than the share of its weight: what holds for its units holds for all of it."""
        self.refuses(self.lt.AdaptiveClip(1e30))
        before = Watch()
        run = self.fit(before, self.lt.AdaptiveClip(1e-3), max_steps=1)
        start = self._start()
        for name, gradient in run.watch.gradients[0].items():
            unclipped, weight = before.gradients[0][name], start[name]
            assert torch.equal(gradient, unclipped) or gradient.norm() <= unclipped.norm()
            limit = 1e-3 * torch.maximum(weight.norm(), torch.tensor(1e-3 * weight.numel() ** 0.5))
            assert gradient.norm() <= limit * 1.001, name
        self.assert_plain(self.fit(self.lt.AdaptiveClip(1e30)))

    def _start(self) -> State:
        class Start(Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                self.weights = parameters(pl_module)

        start = Start()
        self.fit(start, max_steps=1)
        return start.weights

    @trick("GradualUnfreeze")
    def test_gradual_unfreeze(self) -> None:
        """The first trained tensor waits for two batches."""
        first = next(iter(self.plain().watch.gradients[0]))
        pattern = f"^{re.escape(first)}$"
        self.refuses(self.lt.GradualUnfreeze([2 * self.steps], parameters=[pattern]))
        weights = self.fit(self.lt.GradualUnfreeze([2 * self.steps], parameters=[pattern])).watch.weights
        start = self._start()[first]
        assert torch.equal(weights[1][first], start)
        assert not torch.equal(weights[2][first], start)
        self.assert_plain(self.fit(self.lt.GradualUnfreeze([0], parameters=[pattern])))

    @trick("single_bf16")
    def test_a_preset_is_its_precision(self) -> None:
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")
        preset, plain = self.fit(strategy="single_bf16", **self.preset), self.fit(precision="bf16-mixed")
        assert_equal(preset.end(), plain.end())

    @trick("find_lr")
    def test_find_lr_leaves_everything_as_it_was(self) -> None:
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")

        def sweep(module: Any) -> None:
            trainer, (train, _) = self.pl.Trainer(**QUIET), self.loaders()
            found = self.lt.find_lr(trainer, module, train, steps=10)
            assert len(found.losses) >= 2

        before = self.module

        def module() -> Any:
            made = before()
            sweep(made)
            return made

        self.module = module  # type: ignore[method-assign]
        self.assert_plain(self.fit())

    @trick("callbacks")
    def test_callbacks_of_the_project_stay_alive(self, tmp_path: Path) -> None:
        """Early stopping ends the fit, and the checkpoint has the averaged weights that were validated."""
        callbacks = self.pl.callbacks
        stop = callbacks.EarlyStopping(self.monitor, patience=1, min_delta=1e9)
        save = callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last", save_top_k=-1)
        naive = NaiveEMA(0.9)
        ours = [self.lt.EMA(0.9, warmup=False), self.lt.SkipNonFinite(), self.lt.Doctor()]
        run = self.fit(*ours, naive, stop, save, max_epochs=6, enable_checkpointing=True)
        assert run.trainer.current_epoch == 2
        assert {stop, save} <= set(run.trainer.callbacks)
        (path, *_) = sorted(tmp_path.glob("*.ckpt"), key=lambda each: each.stat().st_mtime, reverse=True)
        naive.assert_equals(torch.load(path, weights_only=False)["state_dict"])

    @trick("resume")
    def test_a_resumed_fit_is_the_projects_own_resume(self, tmp_path: Path) -> None:
        if why := self.none.get(self.name):
            pytest.skip(f"none: {why}")
        ends = []
        for number, own in enumerate(([], [self.lt.EMA(0.9, warmup=False), self.lt.SkipNonFinite()])):
            folder = tmp_path / str(number)
            naive = Resumed(0.9)
            save = self.pl.callbacks.ModelCheckpoint(dirpath=folder, filename="half", save_weights_only=False)
            self.fit(naive, *own, save, max_epochs=1, enable_checkpointing=True)
            (path,) = folder.glob("*.ckpt")
            again = [type(each)(0.9, warmup=False) if isinstance(each, self.lt.EMA) else type(each)() for each in own]
            naive = Resumed(0.9)
            ends.append((self.fit(naive, *again, ckpt_path=path), naive))
        (plain, reference), (tricked, _) = ends
        assert_equal(plain.watch.weights[-1], tricked.watch.weights[-1])
        reference.assert_equals(tricked.module.state_dict())


class Resumed(NaiveEMA):
    """The independent average, which goes on after a resume."""

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "updates": self.updates, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.kept = state_dict

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        vars(self).update(getattr(self, "kept", {}))


@cache
def plain(kind: type[Client]) -> Fit:
    """The fit without any trick."""
    return kind().fit()


def _norm(gradients: State) -> float:
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())
