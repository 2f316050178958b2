"""Modules whose steps write weights by themselves: a teacher, a codebook, a decay. Every trick writes them once.

The reference is the fit without the trick, at the trick's limit in which it changes nothing. Where the writes cannot be
undone, the trick raises before the first step that would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset

import lightning_tricks as lt
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks

Write = Callable[[Tensor, Tensor], object]


def assigned(x: Tensor, y: Tensor) -> None:
    x.data = x.data * 0.5 + y.data * 0.5


def in_place(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.lerp_(y, 0.5)


THROUGH_DATA: dict[str, Write] = {
    "assigned": assigned,
    "operation": lambda x, y: x.data.lerp_(y.data, 0.5),
    "several": lambda x, y: torch._foreach_lerp_([x.data], [y.data], 0.5),
}
BY_VERSION: dict[str, Write] = {
    "in place": in_place,
    "detached": lambda x, y: x.detach().lerp_(y.detach(), 0.5),
}


class Taught(PlainNet):
    """Learns from a teacher, which follows it: from a step on, and in every so many."""

    write: Write = staticmethod(assigned)
    trains = False
    start, every = 0, 1

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).requires_grad_(self.trains)

    def follow(self) -> None:
        if self.global_step >= self.start and self.global_step % self.every == 0:
            for own, others in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                self.write(own, others)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        x, y = batch
        z = self(x)
        return F.cross_entropy(z, y) + (z - self.teacher(x).detach()).square().mean()


class Hidden(Taught):
    """Keeps the teacher out of its parameters, in a list."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.held = [self._modules.pop("teacher")]

    def __getattr__(self, name: str) -> Any:
        return vars(self)["held"][0] if name == "teacher" and "held" in vars(self) else super().__getattr__(name)


class Remade(Taught):
    """Makes new parameters for the teacher."""

    def follow(self) -> None:
        for own, others in zip(self.teacher[::2], self.layers[::2], strict=True):
            own.weight = nn.Parameter((own.weight * 0.5 + others.weight * 0.5).detach(), requires_grad=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=self.lr)


class Averaged(Taught):
    """Keeps an average of itself in torch's own wrapper."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.teacher = AveragedModel(self.layers)

    def follow(self) -> None:
        self.teacher.update_parameters(self.layers)


class Decays(PlainNet):
    """Decays the weights that it trains."""

    write: Write = staticmethod(lambda x, _: x.data.mul_(0.9))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for weight in self.layers.parameters():
            self.write(weight, weight)
        return super().training_step(batch, batch_idx)


def made(base: type[PlainNet], **attributes: Any) -> type[PlainNet]:
    own = {name: staticmethod(value) if callable(value) else value for name, value in attributes.items()}
    return type(base.__name__, (base,), own)


def half(x: Tensor, _: Tensor) -> None:
    x.data = x.data * 0.5


RIGHT = {
    **{f"{name}, {'trained' if trains else 'frozen'}": made(Taught, write=write, trains=trains)
       for name, write in THROUGH_DATA.items() for trains in (False, True)},
    "now and then": made(Taught, every=3),
    "late": made(Taught, start=5, write=THROUGH_DATA["operation"]),
    "hidden": Hidden,
    "remade": Remade,
    "decay": Decays,
    "decay, assigned": made(Decays, write=half),
}  # fmt: skip
REFUSED = {
    **{f"{name}, {'trained' if trains else 'frozen'}": (made(Taught, write=write, trains=trains), "teacher.0.weight")
       for name, write in BY_VERSION.items() for trains in (False, True)},
    "late": (made(Taught, start=5, write=in_place), "teacher.0.weight"),
    "hidden": (made(Hidden, write=in_place), r"held\[0\].0.weight"),
    "averaged": (Averaged, "teacher.module.0.weight"),
    "decay": (made(Decays, write=in_place), "layers.0.weight"),
}  # fmt: skip
TWICE: dict[str, Callable[[], Callback]] = {
    "SAM": lambda: lt.SAMCallback(rho=0.0),
    "SAM of micro-batches": lambda: lt.SAMCallback(rho=0.0, micro_batch_size=3),
    "prune": lambda: lt.HardExampleFilter(keep=0.999),
}
FEW: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}


def ended(module: Any) -> dict[str, Tensor]:
    """The weights, those of a hidden teacher included."""
    own = weights(module)
    return {**own, **weights(module.teacher)} if isinstance(module, Hidden) else own


@pytest.mark.few(7)
@pytest.mark.parametrize("trick", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("kind", RIGHT.values(), ids=RIGHT)
def test_a_step_that_is_run_twice_writes_once(kind: type[PlainNet], trick: Callable[[], Callback]) -> None:
    plain, ours = build(kind), build(kind)
    fit(plain, **FEW), fit(ours, callbacks=[trick()], **FEW)
    same = assert_close if trick is TWICE["SAM of micro-batches"] else assert_equal
    same(ended(ours), ended(plain))


class Steps(Callback):
    """What the module held after the last good step, and the number of steps."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = weights(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.kept = weights(pl_module)


@pytest.mark.parametrize("trick", TWICE.values(), ids=TWICE)
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_undone_is_refused_before_the_step(case: Any, trick: Callable[[], Callback]) -> None:
    (kind, path), steps = case, Steps()
    module = build(kind)
    with pytest.raises(MisconfigurationException, match=f"writes into the (frozen )?parameter {path}, and a second"):
        fit(module, callbacks=[trick(), steps], **FEW)
    trained = {name: value for name, value in weights(module).items() if name.startswith("layers")}
    if kind is not REFUSED["decay"][0]:  # which has written into these
        assert_equal(trained, {name: steps.kept[name] for name in trained})
    assert module.global_step == (5 if getattr(kind, "start", 0) else 0)


class Bounded(PlainNet):
    """Bounds its temperature in place, and the norms of its embeddings."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.words = nn.Embedding(3, 2, max_norm=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            self.temperature.clamp_(max=1.9)
        return F.cross_entropy(self.temperature * self(x) + self.words((x[:, 0] > 0).long()), y)


@pytest.mark.parametrize("trick", [TWICE["SAM"], TWICE["prune"]])
def test_bounds_of_a_temperature_and_of_embeddings_may_be_in_place(trick: Callable[[], Callback]) -> None:
    plain, ours = build(Bounded), build(Bounded)
    fit(plain, **FEW), fit(ours, callbacks=[trick()], **FEW)
    assert_equal(weights(ours), weights(plain))


def test_a_real_perturbation_is_of_the_weights_that_the_step_writes_once() -> None:
    rho, ours, plain = 0.1, build(Taught), build(Taught)
    fit(ours, callbacks=[lt.SAMCallback(rho=rho)], limit_train_batches=2, **FEW)

    def step(batch: Any) -> None:
        start = weights(plain)
        plain._trainer = Still()
        gradients = torch.autograd.grad(plain.training_step(batch, 0), list(plain.layers.parameters()))
        after, length = weights(plain), torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        plain.load_state_dict(start)
        for weight, gradient in zip(plain.layers.parameters(), gradients, strict=True):
            weight.data += rho * gradient / length
        gradients = torch.autograd.grad(plain.training_step(batch, 0), list(plain.layers.parameters()))
        plain.load_state_dict(after)
        optimizer.zero_grad()
        for weight, gradient in zip(plain.layers.parameters(), gradients, strict=True):
            weight.grad = gradient
        optimizer.step()

    optimizer = plain.configure_optimizers()
    for batch in [batch for batch, _ in zip(loader(), range(2), strict=False)]:
        step(batch)
    assert_close(weights(ours), weights(plain))


class Still:
    global_step = 0


class ByHand(Taught):
    """Taught, in manual optimization."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.descend(lambda: Taught.training_step(self, batch, batch_idx))
        optimizer.step()

    def descend(self, closure: Callable[[], Tensor]) -> None:
        self.manual_backward(closure())


class SharpByHand(lt.SAMMixin, ByHand):
    sam = lt.SAM(rho=0.0)

    def descend(self, closure: Callable[[], Tensor]) -> None:
        self.sam_backward(closure)


class SteppedByHand(lt.SAMMixin, ByHand):
    sam = lt.SAM(rho=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.sam_step(lambda: Taught.training_step(self, batch, batch_idx))


@pytest.mark.parametrize("kind", [SharpByHand, SteppedByHand])
def test_a_closure_of_manual_optimization_writes_once(kind: type[PlainNet]) -> None:
    plain, ours = build(ByHand), build(kind)
    fit(plain, **FEW), fit(ours, **FEW)
    assert_equal(weights(ours), weights(plain))
    with pytest.raises(MisconfigurationException, match=r"writes into the frozen parameter teacher\.0\.weight"):
        fit(build(made(kind, write=in_place)), **FEW)


# -- contrastive chunks -----------------------------------------------------------------------------------------------


class Momentum(L.LightningModule):
    """Contrasts a network with its momentum encoder."""

    write: Write = staticmethod(assigned)
    where = "before"

    def __init__(self) -> None:
        super().__init__()
        self.net, self.slow = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)

    def follow(self, where: str) -> None:
        if where == self.where:
            for own, others in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                self.write(own, others)

    def embed(self, batch: Any) -> tuple[Tensor, ...]:
        self.follow("embed")
        return self.net(batch[0]), self.net(batch[0]) + self.slow(batch[0])

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        self.follow("contrast")
        return lt.clip_loss(a, b, temperature=0.5)

    def whole(self, batch: Any) -> Tensor:
        return self.contrast(*self.embed(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow("before")
        loss = self.whole(batch)
        self.follow("after")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.whole(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Chunked(lt.GradCacheMixin, Momentum):
    chunk = 3

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow("before")
        loss = super().training_step(batch, batch_idx)
        self.follow("after")
        return loss


def moving(kind: type[Momentum], where: str, write: Write) -> type[Momentum]:
    return type(kind.__name__, (kind,), {"where": where, "write": staticmethod(write)})


@pytest.mark.parametrize("write", THROUGH_DATA.values(), ids=THROUGH_DATA)
@pytest.mark.parametrize("where", ["before", "contrast", "after"])
def test_a_momentum_encoder_moves_once_though_chunks_are_embedded_again(where: str, write: Write) -> None:
    plain, ours = (build(moving(kind, where, write)) for kind in (Momentum, Chunked))
    fit(plain, **FEW), fit(ours, **FEW)
    assert_close(weights(ours), weights(plain))


@pytest.mark.parametrize("write", [assigned, THROUGH_DATA["operation"], in_place])
def test_a_write_for_every_chunk_is_refused(write: Write) -> None:
    with pytest.raises(MisconfigurationException, match=r"Chunked.embed writes into Chunked.slow.weight, and Grad"):
        fit(build(moving(Chunked, "embed", write)), **FEW)


def test_a_write_in_place_is_refused_where_embeddings_would_see_it_twice() -> None:
    with pytest.raises(MisconfigurationException, match=r"writes into the frozen parameter slow.weight"):
        fit(build(moving(Chunked, "contrast", in_place)), **FEW)
    plain, ours = (build(moving(kind, "before", in_place)) for kind in (Momentum, Chunked))
    fit(plain, **FEW), fit(ours, **FEW)
    assert_close(weights(ours), weights(plain))


# -- trials and restored fits -----------------------------------------------------------------------------------------

TRIALS: dict[str, Callable[[Any], Any]] = {
    "find_lr": lambda module: lt.find_lr(trainer(), module, loader()),
    "find_batch_size": lambda module: lt.find_batch_size(trainer(), module, loader(), max_size=16),
    "inspect_training": lambda module: lt.inspect_training(trainer(), module, loader()),
    "estimate_memory": lambda module: lt.estimate_memory(module, batch=next(iter(loader()))),
}
KEPT = {**RIGHT, **{f"{name} (refused)": kind for name, (kind, _) in REFUSED.items()}}


@pytest.mark.few(6)
@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
@pytest.mark.parametrize("kind", [*map(KEPT.__getitem__, ("assigned, trained", "hidden", "remade", "decay"))])
@pytest.mark.parametrize("write", [None, in_place], ids=["", "in place"])
def test_a_trial_leaves_the_weights_as_they_were(kind: Any, trial: Callable[[Any], Any], write: Write | None) -> None:
    module = build(made(kind, write=write) if write else kind)
    before, addresses = ended(module), {name: weight.data_ptr() for name, weight in module.named_parameters()}
    with suppress(ValueError):  # of fake tensors, which a hidden teacher is not among
        trial(module)
    assert_equal(ended(module), before)
    assert {name: weight.data_ptr() for name, weight in module.named_parameters()} == addresses


class Shadowed(PlainNet):
    """Gives new values to a list of tensors."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.shadow = [weight.detach().clone() for weight in self.layers.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for own, weight in zip(self.shadow, self.layers.parameters(), strict=True):
            own.data = weight.data * 0.5
        return super().training_step(batch, batch_idx)


def test_an_estimate_leaves_real_tensors_in_a_list() -> None:
    module = build(Shadowed)
    before = [own.tolist() for own in module.shadow]
    lt.estimate_memory(module, batch=next(iter(loader())))
    assert [own.tolist() for own in module.shadow] == before


class Normed(Taught):
    """With BatchNorm behind the layer that the step decays, so that its statistics tell which weights they are of."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

    def follow(self) -> None:
        self.write(self.layers[0].weight, self.layers[0].weight * 0.0)


@pytest.mark.parametrize("write", [assigned, THROUGH_DATA["operation"], in_place])
def test_recalculated_statistics_are_those_of_the_averaged_weights(write: Write) -> None:
    module = build(made(Normed, write=write))
    fit(module, callbacks=[lt.SWA(start=0)], max_epochs=2, limit_val_batches=0)
    layer, norm = module.layers[0], module.layers[1]
    with torch.no_grad():
        # The step halves the weight before the forward pass, in every batch anew.
        sizes = [F.linear(x, layer.weight * 0.5, layer.bias) for x, _ in loader()]
    torch.testing.assert_close(norm.running_mean, torch.stack([size.mean(0) for size in sizes]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([size.var(0) for size in sizes]).mean(0))


# -- steps that are left out ------------------------------------------------------------------------------------------


class Bad(IterableDataset[Any]):
    """Batches of which one is not a number; or the same without it."""

    def __init__(self, bad: int | None) -> None:
        self.bad = bad

    def __iter__(self) -> Iterator[Any]:
        for number, (x, y) in enumerate(loader()):
            if number == 3 and self.bad is not None:
                yield x * math.nan, y
            yield x, y


def stream(bad: int | None) -> DataLoader[Any]:
    return DataLoader(Bad(bad), batch_size=None)


class Coded(PlainNet):
    """Moves its codes by the batch, so that one bad batch spoils them."""

    write: Write = staticmethod(assigned)

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.codes = nn.Parameter(torch.zeros(8), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.write(self.codes, batch[0].mean(0))
        return super().training_step([batch[0] + self.codes.clone(), batch[1]], batch_idx)


@pytest.mark.parametrize("write", [*THROUGH_DATA.values(), *BY_VERSION.values()])
def test_a_step_that_is_skipped_leaves_no_trace_in_weights_that_it_wrote(write: Write) -> None:
    kind = made(Coded, write=write)
    plain, ours, skips = build(kind), build(kind), lt.SkipNonFinite()
    fit(plain, train=stream(None), **FEW), fit(ours, train=stream(3), callbacks=[skips], **FEW)
    assert skips.skipped_steps == 1
    assert_equal(weights(ours), weights(plain))


def test_a_first_write_that_cannot_be_undone_is_named() -> None:
    class Late(Coded):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                in_place(self.codes, batch[0].mean(0))
            return PlainNet.training_step(self, [batch[0] + self.codes.clone(), batch[1]], batch_idx)

    with pytest.raises(MisconfigurationException, match=r"has written into codes by itself, for the first time"):
        fit(build(Late), train=stream(3), callbacks=[lt.SkipNonFinite()], **FEW)


def test_the_last_good_state_has_the_weights_from_before_the_bad_batch(tmp_path: Any) -> None:
    module, steps = build(Coded), Steps()
    stops = lt.TerminateOnNonFinite(dirpath=str(tmp_path))
    with pytest.raises(FloatingPointError, match="has stopped training after step 3"):
        fit(module, train=stream(3), callbacks=[stops, steps], **FEW)
    (path,) = tmp_path.rglob("last_good.ckpt")
    assert_equal(torch.load(path, weights_only=False)["state_dict"], steps.kept)


# -- shards -----------------------------------------------------------------------------------------------------------

SHARDED: dict[str, type[PlainNet]] = {
    "assigned": Taught,
    "operation": made(Taught, write=THROUGH_DATA["operation"]),
    "decay": Decays,
}


def on_two_ranks() -> list[float]:
    """The largest differences that tricks make, which are to make none."""
    settings: dict[str, Any] = {**FEW, "devices": 2, "use_distributed_sampler": False}
    found = []
    for kind in SHARDED.values():
        recomputed = lt.ActivationCheckpointing("^layers$")
        tricks = [None, TWICE["SAM"](), TWICE["prune"](), lt.SkipNonFinite(), recomputed]
        ended = []
        for trick in tricks:
            module, strategy = build(kind), lt.FSDP2Preset(precision="32-true", modules=["Linear"])
            callbacks = [] if trick is None else [trick]
            fit(module, train=rank_loader(), callbacks=callbacks, strategy=strategy, **settings)
            ended.append(weights(module))
        plain, *others = ended
        found += [max((own[name] - plain[name]).abs().max().item() for name in plain) for own in others]
    return found


@pytest.mark.slow
def test_shards_are_written_once() -> None:
    for found in run_ranks(on_two_ranks):
        assert found == [0.0] * 4 * len(SHARDED)
