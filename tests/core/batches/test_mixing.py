"""What Mixup and CutMix have in common: who is chosen, when, from the command line, and beside other tricks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_tricks as lt
from lightning_tricks.core.batches.pipeline import BatchContext
from tests.callbacks.test_swa import assert_recalibrated
from tests.nets import (
    NormNet,
    PlainNet,
    Resumable,
    SaveAt,
    Stream,
    assert_close,
    assert_equal,
    build,
    data,
    fit,
    loader,
    trainer,
    weights,
)

Numbers = tuple[float | Tensor, Tensor]


class Watch(Callback):
    """Notes what was drawn for every batch that is trained on, and its inputs and target as the module gets them."""

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = callbacks
        self.drawn: list[Any] = []
        self.batches: list[Any] = []
        self.steps: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        mixed = [(each, each.drawn) for each in self.callbacks if each.drawn is not None]
        assert len(mixed) <= 1
        self.drawn.append((mixed[0][1].lam, mixed[0][1].index.clone()) if mixed else None)
        self.steps += [trainer.global_step] if mixed else []
        parts = batch if isinstance(batch, tuple | list) else []
        self.batches.append([part.detach().clone() for part in parts if isinstance(part, Tensor)])

    def numbers(self) -> list[Any]:
        """What was drawn, to be compared."""
        return [drawn and (torch.as_tensor(drawn[0]).tolist(), drawn[1].tolist()) for drawn in self.drawn]


def naive_mixup(x: Tensor, lam: float | Tensor, index: Tensor) -> Tensor:
    return torch.stack([l_i * x[i] + (1 - l_i) * x[j] for l_i, i, j in _rows(lam, index)])


def _rows(lam: float | Tensor, index: Tensor) -> list[tuple[float, int, int]]:
    lams = torch.as_tensor(lam).expand(len(index)).tolist()
    return list(zip(lams, range(len(index)), index.tolist(), strict=True))


def naive_loss(z: Tensor, y: Tensor, lam: float | Tensor, index: Tensor, loss: Any = F.cross_entropy) -> Tensor:
    """Sample by sample."""
    terms = [
        l_i * loss(z[i : i + 1], y[i : i + 1]) + (1 - l_i) * loss(z[i : i + 1], y[j : j + 1])
        for l_i, i, j in _rows(lam, index)
    ]
    return torch.stack(terms).mean()


def train_by_hand(
    module: Any,
    drawn: Sequence[Numbers | None],
    batches: Sequence[Any],
    mix: Callable[..., Tensor] = naive_mixup,
    *,
    loss: Any = F.cross_entropy,
    accumulate: int = 1,
    epoch: int | None = None,
) -> dict[str, Tensor]:
    """The weights after one optimizer step for each window of batches, the last of an epoch maybe smaller."""
    optimizer, epoch = module.configure_optimizers(), epoch or len(batches)
    module.train()
    for number, ((x, y), numbers) in enumerate(zip(batches, drawn, strict=True)):
        lam, index = numbers or (1.0, torch.arange(len(y)))
        (naive_loss(module(mix(x, lam, index)), y, lam, index, loss) / accumulate).backward()
        place = number % epoch + 1
        if place % accumulate == 0 or place == epoch:
            optimizer.step()
            optimizer.zero_grad()
    return weights(module)


class ImageNet(PlainNet):
    """Takes images of (2, 2, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


def images(size: int = 44, batch_size: int = 8) -> DataLoader[Any]:
    x, y = loader(size).dataset.tensors
    return DataLoader(TensorDataset(x.view(-1, 2, 2, 2), y), batch_size)


class Steps(Callback):
    """Notes the weights and the gradients of every optimizer step, unscaled."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.weights.append({name: value.cpu() for name, value in weights(pl_module).items()})
        self.gradients.append({name: p.grad.float().cpu() for name, p in pl_module.named_parameters()})

    def compare(self, module: Any, losses: Iterable[Callable[[], Tensor]]) -> None:
        """With those of a module on the CPU; a GradScaler may have found its first scale too large."""
        compared = 0
        for before, found, loss in zip(self.weights, self.gradients, losses, strict=True):
            module.load_state_dict(before)
            module.zero_grad()
            loss().backward()
            if all(gradient.isfinite().all() for gradient in found.values()):
                assert_close(found, {name: p.grad for name, p in module.named_parameters()}, 1e-2)
                compared += 1
        assert compared > len(self.weights) / 2


DEVICES = [("host cpu", "32-true"), ("host cpu", "bf16-mixed")]
DEVICES += [pytest.param("real cuda", precision, marks=pytest.mark.gpu) for precision in ("16-mixed", "bf16-mixed")]
DEVICES += [("simulated cuda", precision) for precision in ("16-mixed", "bf16-mixed")]


# ---- when


@pytest.mark.few(9)
@pytest.mark.parametrize("kind", [lt.Mixup, lt.CutMix])
@pytest.mark.parametrize(
    ("settings", "steps"),
    [  # 2 epochs of 6 batches in windows of 2, 2 and 2
        ({}, range(6)),
        ({"start": 2, "stop": 5}, range(2, 5)),
        ({"start": 0.5}, range(3, 6)),
        ({"start": 0.0, "stop": 0.5}, range(3)),
        ({"stop": 1}, range(1)),
        ({"stop": 0.4}, range(3)),  # 2.4 steps
        ({"stop": 0.0}, ()),
        ({"start": 1.0}, ()),
        ({"start": 100}, ()),
    ],
    ids=str,
)
def test_whole_windows_of_optimizer_steps_are_mixed(kind: Any, settings: dict[str, Any], steps: Any) -> None:
    callback = kind(**settings)
    watch = Watch(callback)
    fit(build(ImageNet), train=images(), val=images(), accumulate_grad_batches=2, callbacks=[callback, watch])
    assert watch.steps == [step for step in steps for _ in range(2)]
    assert [n // 2 for n, drawn in enumerate(watch.drawn) if drawn] == watch.steps


def test_ragged_windows_have_the_gradient_of_a_naive_loop() -> None:
    mixup, module, batches = lt.Mixup(1.0, start=1), build(PlainNet), list(loader())
    watch = Watch(mixup)
    fit(module, accumulate_grad_batches=4, callbacks=[mixup, watch])
    assert [bool(drawn) for drawn in watch.drawn] == [False] * 4 + [True] * 8
    hand = train_by_hand(build(PlainNet), watch.drawn, 2 * batches, accumulate=4, epoch=6)
    assert_close(weights(module), hand)


@pytest.mark.parametrize("kind", [lt.Mixup, lt.CutMix])
def test_a_stream_has_an_end_but_no_half(kind: Any) -> None:
    stream = DataLoader(
        Stream(data()),
        8,
        collate_fn=lambda b: (torch.stack([x for x, _ in b]).view(-1, 2, 2, 2), torch.tensor([y for _, y in b])),
    )
    callback = kind(stop=1.0)
    watch = Watch(callback)
    fit(build(ImageNet), train=stream, limit_val_batches=0, callbacks=[callback, watch])
    assert all(watch.drawn)
    assert len(watch.drawn) == 12
    for name in ("start", "stop"):
        message = rf"{kind.__name__}\({name}=0.5\) is a fraction .*length is unknown.*Give {name} in optimizer steps"
        with pytest.raises(MisconfigurationException, match=message):
            fit(build(ImageNet), train=stream, limit_val_batches=0, callbacks=[kind(**{name: 0.5})])


# ---- beside other tricks


@pytest.mark.few(3)
@pytest.mark.parametrize("average", [None, lt.EMA, lt.SWA])
@pytest.mark.parametrize("first", [True, False])
def test_averages_leave_the_mixing_alone_and_batchnorm_sees_plain_batches(average: Any, first: bool) -> None:
    seen: list[Any] = []

    class Seen(NormNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not torch.is_grad_enabled():
                seen.append([part.clone() for part in batch])
            return super().training_step(batch, batch_idx)

    mixup, module = lt.Mixup(1.0), build(Seen)
    watch, averages = Watch(mixup), [average(start=6)] if average else []
    fit(module, callbacks=[*averages, mixup, watch] if first else [mixup, watch, *averages], max_epochs=3)
    assert len(seen) == (6 if average is lt.SWA else 0)
    for batch, plain in zip(seen, loader(), strict=False):
        assert all(map(torch.equal, batch, plain))
    if average is lt.SWA:
        assert_recalibrated(module)
    batches, trained, snapshots = list(loader()), build(NormNet), []
    optimizer = trained.configure_optimizers()
    for number, (lam, index) in enumerate(watch.drawn):
        x, y = batches[number % 6]
        optimizer.zero_grad()
        naive_loss(trained(naive_mixup(x, lam, index)), y, lam, index).backward()
        optimizer.step()
        snapshots.append([parameter.detach().clone() for parameter in trained.parameters()])
    if average is not lt.EMA:  # whose formula has tests of its own
        means = [torch.stack(values).mean(0) for values in zip(*snapshots[5::6], strict=True)]
        hand = means if average else snapshots[-1]
        for ours, theirs in zip(module.parameters(), hand, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# ---- resume


@pytest.mark.parametrize(("step", "train"), [(4, True), (6, False), (8, True)])
@pytest.mark.parametrize("first", [False, True])
def test_resume_is_bit_exact(step: int, train: bool, first: bool, tmp_path: Any) -> None:
    runs, path = [], tmp_path / "x.ckpt"
    for ckpt_path in (None, path):
        callback, module = lt.Mixup(1.0, prob=0.7, start=2), build(ImageNet)
        watch, saves = Watch(callback), [] if ckpt_path else [SaveAt(path, step=step)]
        callbacks = [*saves, callback, watch] if first else [callback, watch, *saves]
        fit(
            module,
            callbacks=callbacks,
            train=Resumable(list(images())) if train else images(),
            val=images(),
            ckpt_path=ckpt_path,
        )
        runs.append((weights(module), watch.numbers()))
    assert runs[0][1][step:] == runs[1][1]
    assert_equal(runs[0][0], runs[1][0])


def test_a_checkpoint_keeps_its_seed(tmp_path: Any) -> None:
    callbacks = [mixup := lt.Mixup(), watch := Watch(mixup)]
    fit(build(PlainNet), callbacks=[*callbacks, SaveAt(tmp_path / "x.ckpt", step=6)])
    callbacks = [mixup := lt.Mixup(), later := Watch(mixup)]
    run = trainer(callbacks=callbacks)
    L.seed_everything(99, verbose=False)
    run.fit(build(PlainNet), loader(), loader(24), ckpt_path=tmp_path / "x.ckpt")
    assert later.numbers() == watch.numbers()[6:]


# ---- beside each other

TRICKS: dict[str, Callable[[], Any]] = {
    "Mixup": lambda: lt.Mixup(1.0, prob=0.6),
    "CutMix": lambda: lt.CutMix(prob=0.6),
    "HiddenMixup": lambda: lt.HiddenMixup("layers.2", 1.0, prob=0.6),
    "prune": lambda: lt.HardExampleFilter(0.5),
    "loss": lambda: lt.HardExampleFilter(0.75, mode="loss"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("one", "other"), list(combinations(TRICKS, 2)))
def test_all_pairs_train_in_either_order_and_resume_bit_equal(one: str, other: str, tmp_path: Any) -> None:
    def train(names: Sequence[str], *savers: Any, **settings: Any) -> dict[str, Tensor]:
        module = build(ImageNet)
        callbacks = [*(TRICKS[name]() for name in names), *savers]
        run = fit(module, train=Resumable(list(images())), val=images(), callbacks=callbacks, **settings)
        assert run.global_step == 12
        return weights(module)

    ends = []
    for names in ((one, other), (other, one)):
        path = tmp_path / "-".join(names)
        ends.append(train(names, SaveAt(path, step=4)))
        assert_equal(train(names, ckpt_path=path), ends[-1])
        assert any(not torch.equal(value, ends[-1][name]) for name, value in train(names[:1]).items())
        assert any(not torch.equal(value, ends[-1][name]) for name, value in train(names[1:]).items())
    if other in ("prune", "loss"):  # of two that mix, one is chosen in their order
        assert_equal(*ends)


# ---- batches that are like the last one are not checked again


def batch(size: int = 8, width: int = 6) -> tuple[Tensor, ...]:
    return torch.rand(size, width), torch.arange(size) % 2


def symmetric(size: int = 8) -> Tensor:
    points = torch.rand(size, 2)
    return torch.cdist(points, points)


BATCHES: dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...], str]] = {  # a good one, a bad one, and the reason
    "integers": (batch(), (torch.ones(8, 6).long(), batch()[1]), "floating-point inputs"),
    "another number of targets": (batch(), (batch()[0], batch(7)[1]), "an input and a target for each sample"),
    "pairs": (batch(8, 8), (symmetric(), batch()[1]), "entries for pairs of samples"),
    "one tensor twice": ((torch.rand(8, 6), torch.rand(8, 6)), (batch()[0],) * 2, "a target that is not an input"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_bad_batch_behind_a_good_one_is_refused(name: str) -> None:
    good, bad, reason = BATCHES[name]
    callback = lt.Mixup()
    look = lambda batch: callback._checked(BatchContext(batch, 0, random.Random(0)))  # noqa: E731
    assert [look(good), look(good)] == [8, 8]
    with pytest.raises(MisconfigurationException, match=reason):
        look(bad)
    assert look(good) == 8
    with pytest.raises(MisconfigurationException, match=reason):
        look(bad)


def test_parts_that_are_not_mixed_are_found_in_every_batch() -> None:
    callback = lt.Mixup(inputs=0, target=1)
    for size in (8, 8, 5, 8):
        context = BatchContext((*batch(size), torch.rand(size)), 0, random.Random(0))
        assert callback._checked(context) == size
        assert list(context.unmixed) == [(2,)]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_other_attributes_of_an_object_that_holds_the_target_are_parts_too(depth: int) -> None:
    def collated(rows: Any) -> Any:
        x, y = map(torch.stack, zip(*rows, strict=True))
        batch = SimpleNamespace(x=x, y=y, more={"second": 1 - y})
        return {"in": batch} if depth else batch

    class Reads(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch = batch["in"] if depth else batch
            z = self(batch.x)
            return F.cross_entropy(z, batch.y) + F.cross_entropy(z, batch.more["second"])

    x, y, second = ("in." * depth + name for name in ("x", "y", "more.second"))
    train = DataLoader(data(), 8, collate_fn=collated)
    for mix in (partial(lt.HiddenMixup, "layers.2"), partial(lt.Mixup, inputs=x)):
        with pytest.raises(
            MisconfigurationException, match=r"a loss is computed from batch.*\['second'\], which is not"
        ):
            fit(build(Reads), train=train, callbacks=[mix(target=y)], limit_val_batches=0, max_steps=1)
        run = fit(build(Reads), train=train, callbacks=[mix(target=[y, second])], limit_val_batches=0, max_steps=1)
        assert run.global_step == 1


def test_a_target_that_an_object_keeps_in_a_store_is_no_part_beside_itself() -> None:
    class Kept:
        """A batch whose attributes are in a store, as those of PyG are."""

        def __init__(self, **parts: Any) -> None:
            self._store = parts

        def __copy__(self) -> Any:
            return Kept(**self._store)

        def __getattr__(self, name: str) -> Any:
            if name not in self.__dict__.get("_store", ()):
                raise AttributeError(name)
            return self._store[name]

        def __setattr__(self, name: str, value: Any) -> None:
            (self.__dict__ if name == "_store" else self._store)[name] = value

    class Reads(PlainNet):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch.x), batch.y)

    def collated(rows: Any) -> Any:
        x, y = map(torch.stack, zip(*rows, strict=True))
        return Kept(x=x, y=y)

    train = DataLoader(data(), 8, collate_fn=collated)
    mixup = lt.HiddenMixup("layers.2", target="y")
    assert fit(build(Reads), train=train, callbacks=[mixup], limit_val_batches=0, max_steps=1).global_step == 1


def test_a_batch_like_the_last_one_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, checked = lt.Mixup(), []
    monkeypatch.setattr(callback, "_require_parts", lambda context, size: checked.append(size))
    for size in (8, 8, 5, 5, 8):
        callback._checked(BatchContext(batch(size), 0, random.Random(0)))
    assert checked == [8, 5, 8]


def test_the_first_batch_of_every_fit_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    callback, checked = lt.Mixup(start=100), []
    monkeypatch.setattr(callback, "_require_parts", lambda context, size: checked.append(size))
    for _ in range(2):
        fit(build(PlainNet), train=loader(4), callbacks=[callback], max_steps=2)
    assert checked == [4, 4]
