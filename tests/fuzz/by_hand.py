"""What tricks at work should do, by hand: mixed labels, the hardest samples, steps of Muon, rates of a plateau."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.functional import mixup
from tests.conformance.trick import Enrolment
from tests.fuzz.labels import Second
from tests.fuzz.layers import BY_SAMPLE
from tests.fuzz.modules import SIZE, TRAINERS, VALIDATES, Generated, Spec, form_of, module_of, samples
from tests.fuzz.runs import Outcome, alike, data_for, run
from tests.nets import trainer
from tests.reference.muon import NaiveMuon


def bare(spec: Spec, **others: Any) -> Spec:
    """The description without what remembers, draws or writes, and without callbacks."""
    kept = {name: getattr(spec, name) for name in ("net", "batch", "loss", "second", "padded", "seed")}
    return Spec(**{**kept, **others})


# -- mixed labels -----------------------------------------------------------------------------------------------------


class Notes(Callback):
    """Notes the random numbers of every batch, behind the callback that draws them."""

    def __init__(self, mixing: Any) -> None:
        self.mixing, self.numbers = mixing, list[Any]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.numbers.append(self.mixing.drawn)


def mixing(name: str, second: Second) -> Any:
    """The trick, with what a user names."""
    if name == "Mixup":
        return lt.Mixup(1.0, inputs=second.inputs, target=second.target)
    return lt.HiddenMixup("layers.1", 1.0, target=second.target)


def by_numbers(spec: Spec, name: str, numbers: list[Any]) -> dict[str, Any]:
    """The methods of a module that mixes inputs or hidden features, and the losses of all labels, by given numbers."""
    batches = iter(numbers)

    def mix(module: Any, x: Tensor) -> Tensor:
        return mixup(x, module.drawn.lam, module.drawn.index) if module.training else x

    def made(module: Any) -> None:
        Generated.__init__(module)
        layer = module.layers if name == "Mixup" else module.layers[1]
        layer.register_forward_pre_hook(lambda _, args: (mix(module, args[0]),))

    def compute(module: Any, batch: Any) -> Any:
        module.drawn = next(batches)
        return Generated.compute(module, batch)

    def losses(module: Any, logits: Tensor, *labels: Tensor) -> Any:
        lam, index = module.drawn.lam, module.drawn.index
        stays = spec.second is not None and not spec.second.is_mixed  # the network sees it, and no loss does
        partners = [label if place and stays else label[index] for place, label in enumerate(labels)]
        one, other = (Generated.losses(module, logits, *each) for each in (labels, partners))
        if not isinstance(one, dict):
            return lam * one + (1 - lam) * other
        return {**one, "loss": lam * one["loss"] + (1 - lam) * other["loss"]}

    return {"__init__": made, "compute": compute, "losses": losses}


# torch.vmap takes tensors apart past all classes; a factor that tells "above" or not is one like a mask (see the docs).
UNSEEN = ("vmap", "ordinal")


def mixes(spec: Spec, name: str = "Mixup") -> bool:
    """Whether a trick mixes the losses of all labels of a batch by the numbers that it mixes the inputs by."""
    if spec.second is None or spec.second.use in UNSEEN or (spec.second.named == "both" and not spec.second.is_mixed):
        return False
    spec = bare(spec, loss="cross entropy" if spec.loss in ("sometimes None", "NumPy") else spec.loss, padded=None)
    callback = mixing(name, spec.second)
    notes = Notes(callback)

    def right(folder: Path) -> Outcome:
        return found if found.refused else run(spec, Enrolment(), folder, **by_numbers(spec, name, notes.numbers))

    with TemporaryDirectory() as folder:
        found = run(spec, Enrolment(callbacks={"off": lambda: [callback, notes]}), Path(folder))
    return alike(spec, (name,), right, lambda folder: found, tolerance=1e-4)


# -- the hardest samples ----------------------------------------------------------------------------------------------


# "prune" sums several losses without their factors, as its docs say, and samples count by their class weights; the norm
# of a sum is none of samples.
IN_STEPS = ("masked mean in two steps",)  # a sum over positions, and then over samples: each counts as one entry
NOT_SUMS = ("sometimes None", "library", "several", "weighted")


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def keeps_hardest(spec: Spec) -> bool:
    """Whether "prune" keeps those samples of a batch whose losses are the largest where each is alone."""
    spec = bare(spec, second=None, trainer="few batches")
    if spec.net not in BY_SAMPLE or (spec.loss in NOT_SUMS if spec.padded is None else spec.padded.loss in IN_STEPS):
        return False
    (make, read), (x, y), kept = form_of(spec), samples(spec), list[list[int]]()

    class Checks(module_of(spec)):  # type: ignore[misc]
        @torch.no_grad()
        def alone(self, ids: range) -> Tensor:
            found = []
            for number in ids:
                logits, _, *labels = Generated.embed(self, make(x[number : number + 1], y[number : number + 1]))
                found.append(loss_of(Generated.losses(self, logits, *labels)))
            return torch.stack(found)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if torch.is_grad_enabled():  # not in the run that compares samples
                ids = range(SIZE * batch_idx, SIZE * (batch_idx + 1))
                rows, losses = read(make(x[ids], y[ids]))[0], self.alone(ids)
                kept.append([int((rows == row).flatten(1).all(1).nonzero()) for row in read(batch)[0]])
                least, best = losses[kept[-1]].min(), losses.topk(len(kept[-1])).values.min()
                assert least >= best - 1e-4 * best.abs(), f"of {losses}, those of {kept[-1]} are kept"
            return super().training_step(batch, batch_idx)

    def test(folder: Path) -> bool:
        L.seed_everything(spec.seed, verbose=False)
        fit = trainer(callbacks=[lt.HardExampleFilter(0.5)], max_epochs=1, **TRAINERS[spec.trainer])
        fit.fit(Checks(), **data_for(spec))
        assert all(len(ids) == SIZE // 2 for ids in kept)
        return True

    return accepted_by(test, spec)


# -- optimizers and schedules -----------------------------------------------------------------------------------------


class MuonByHand(torch.optim.Optimizer):
    """Muon for the hidden matrices, and AdamW for all other weights, both at one learning rate."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        layers = [each for each in module.modules() if isinstance(each, nn.Linear | nn.GRU)]
        inner = [weight for layer in layers[:-1] for weight in layer.parameters()]
        hidden = [weight for weight in inner if weight.ndim == 2 and min(weight.shape) >= 4]
        others = [weight for weight in module.parameters() if all(weight is not each for each in hidden)]
        super().__init__([*module.parameters()], {"lr": lr})
        self.naive = [NaiveMuon(weight, 0.0) for weight in hidden]
        self.adamw = torch.optim.AdamW(others, lr, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.0)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        for naive in self.naive:
            naive.step(naive.weight.grad, self.adamw.defaults["lr"])
        self.adamw.step()
        return loss


MATRICES = ("linear", "cached", "recurrent", "double", "experts")  # nets that have some


def steps_as_muon(spec: Spec) -> bool:
    """Whether all weights go about as far as those that Muon and AdamW train by hand, at the same rate."""
    extras = tuple({*spec.extras} & {"embedding with max_norm", "scalar", "ParameterList"})
    settings = {"trainer": spec.trainer if spec.trainer in ("accumulate", "steps") else "plain", "extras": extras}
    spec = bare(spec, batch="tuple", second=None, padded=None, **settings)
    if spec.net not in MATRICES or spec.loss == "sometimes None":
        return False
    first, naive, made = (
        run(spec, Enrolment(), Path(), configure_optimizers=optimizer).weights
        for optimizer in (
            lambda module: torch.optim.SGD(module.parameters(), lr=0.0),
            lambda module: MuonByHand(module, 0.01),
            lambda module: lt.optimizer("muon", module, 0.01, weight_decay=0.0),
        )
    )
    for name, weight in first.items():
        if weight.is_floating_point() and "running" not in name:
            right, off = naive[name] - weight, made[name] - naive[name]
            assert off.norm() <= 0.5 * right.norm() + 1e-6, f"{spec}: {name} went {right}, but for {off}"
    return True


class Validations(Callback):
    """Counts validations, and the epochs with one that come to their end."""

    def __init__(self) -> None:
        self.all, self.epochs, self.is_new = 0, 0, False

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.all, self.is_new = self.all + 1, True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_last_batch:  # else training ends in the middle of the epoch
            self.epochs, self.is_new = self.epochs + self.is_new, False


def reduces(spec: Spec) -> bool:
    """Whether a metric that never improves reduces the rate after each epoch that validates, or each validation."""
    spec = bare(spec, batch="tuple", data=spec.data, in_data=spec.in_data, trainer=spec.trainer)
    if spec.trainer not in VALIDATES:
        return False
    counts, settings = Validations(), {"patience": 0, "threshold": 1e9, "factor": 0.5}
    plateau: Any = lambda module: lt.reduce_on_plateau(torch.optim.SGD(module.parameters(), 0.1), module, **settings)  # noqa: E731

    def test(folder: Path) -> bool:
        L.seed_everything(spec.seed, verbose=False)
        fit = trainer(callbacks=[counts], **{"max_epochs": 2, **TRAINERS[spec.trainer]})
        fit.fit(module_of(spec, configure_optimizers=plateau)(), **data_for(spec))
        times = counts.epochs or counts.all
        assert times, "no validation"
        rate = fit.optimizers[0].param_groups[0]["lr"]
        assert rate == 0.1 * 0.5**times, f"{times} times, and the rate is {rate}"
        return True

    return accepted_by(test, spec)


def accepted_by(test: Any, spec: Spec) -> bool:
    """Whether a test passes; False where it is refused."""
    try:
        with TemporaryDirectory() as folder:
            return bool(test(Path(folder)))
    except MisconfigurationException:
        return False
    except Exception as error:
        raise AssertionError(f"{spec}: {type(error).__name__}: {error}") from error
