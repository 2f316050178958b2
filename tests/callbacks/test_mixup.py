"""Mixup against a naive loop over samples: every kind of batch, target, module and precision."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks import Mixup
from lightning_tricks.functional import mixup
from tests.core.batches.test_mixing import Watch, naive_mixup, train_by_hand
from tests.few import few
from tests.nets import (
    Net,
    NormNet,
    PlainNet,
    SteppedByHand,
    assert_close,
    assert_equal,
    build,
    fit,
    loader,
    trained,
    weights,
)
from tests.reference.sam import naive_perturb

BATCHES = list(loader())
Named = namedtuple("Named", "image label")


@dataclasses.dataclass
class Data:
    x: Any
    y: Any
    names: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    img: Any
    target: Any


class Taking(PlainNet):
    """Takes inputs and target out of a batch of any shape."""

    def __init__(self, take: Callable[[Any], Any] = lambda batch: batch, loss: Any = F.cross_entropy) -> None:
        super().__init__()
        self.take, self.loss = take, loss

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, Frozen):  # which Lightning's own transfer refuses
            return dataclasses.replace(batch, img=batch.img.to(device), target=batch.target.to(device))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.take(batch)
        return self.loss(self(x), y)


def feed(*batches: Any) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)


def run(module: Any, callback: Any, train: Any = None, **settings: Any) -> Watch:
    watch = Watch(callback)
    settings = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [callback, watch], **settings}
    fit(module, train=feed(*BATCHES) if train is None else train, **settings)
    return watch


# ---- the function


KINDS = [(d, lam) for d in (torch.float32, torch.float64, torch.bfloat16) for lam in (0.0, 0.3, 0.5, 1.0, "each")]
KINDS += [(torch.complex64, lam) for lam in (0.3, torch.tensor(0.3), "each")] + [(torch.float32, torch.tensor(0.3))]


@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 4, 4), (1, 3)])
@pytest.mark.parametrize(("dtype", "lam"), KINDS)
def test_it_is_the_convex_combination_in_a_new_tensor(lam: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if isinstance(lam, str):
        lam = torch.linspace(0, 1, shape[0])
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    index, before = torch.arange(shape[0]).flip(0), x.clone()
    tolerance = 0.03 if dtype == torch.bfloat16 else 1e-6
    mixed = mixup(x, lam, index)
    torch.testing.assert_close(mixed, naive_mixup(x, lam, index), atol=tolerance, rtol=tolerance)
    assert torch.equal(x, before)
    assert mixed.dtype == dtype
    assert mixed.data_ptr() != x.data_ptr()


def test_memory_format_is_kept() -> None:
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert mixup(x, 0.3, torch.arange(4).flip(0)).is_contiguous(memory_format=torch.channels_last)


# ---- batches and targets

PACKS = {
    "tuple": (lambda x, y: (x, y), lambda b: b, {}),
    "list": (lambda x, y: [x, y], lambda b: b, {}),
    "namedtuple": (Named, lambda b: (b.image, b.label), {}),
    "dict": (lambda x, y: {"id": list(range(len(y))), "x": x, "labels": y}, lambda b: (b["x"], b["labels"]), {}),
    "BatchEncoding": (
        lambda x, y: transformers.BatchEncoding({"input_values": x, "labels": y}),
        lambda b: (b.input_values, b["labels"]),
        {},
    ),
    "dataclass": (Data, lambda b: (b.x, b.y), {}),
    "frozen": (Frozen, lambda b: (b.img, b.target), {}),
    "nested": (lambda x, y: ({"image": x, "n": 3}, {"label": y}), lambda b: (b[0]["image"], b[1]["label"]), {}),
    "index": (lambda x, y: (y, "meta", x), lambda b: (b[2], b[0]), {"inputs": -1, "target": 0}),
    "key": (lambda x, y: {"a": x, "b": y}, lambda b: (b["a"], b["b"]), {"inputs": "a", "target": "b"}),
    "path": (
        lambda x, y: {"batch": [x, {"gold": y}]},
        lambda b: (b["batch"][0], b["batch"][1]["gold"]),
        {"inputs": "batch.0", "target": "batch.1.gold"},
    ),
    "several": (
        lambda x, y: (x[:, :3], x[:, 3:], y, y.clone()),
        lambda b: (torch.cat([b[0], b[1]], 1), b[2] if (b[3] == b[2]).all() else None),
        {"inputs": [0, "1"], "target": [2, "3"]},
    ),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", PACKS)
def test_training_is_that_of_a_naive_loop_whatever_the_batch(name: str, per_sample: bool) -> None:
    pack, take, named = PACKS[name]
    packed = [pack(x.clone(), y.clone()) for x, y in BATCHES]  # sizes 8, ..., 8, 4
    module = build(Taking, take=take)
    watch = run(module, Mixup(1.0, per_sample=per_sample, **named), feed(*packed))
    assert_close(weights(module), train_by_hand(build(Taking), watch.drawn, BATCHES))
    for batch, (x, y), (lam, index) in zip(packed, BATCHES, watch.drawn, strict=True):
        ours = take(batch)
        assert all(map(torch.equal, ours, (x, y)))
        assert all(type(part) is Tensor for part in ours)
        assert sorted(index.tolist()) == list(range(len(y)))
        assert (torch.as_tensor(lam) >= 0.5).all()
        assert torch.as_tensor(lam).numel() == (len(y) if per_sample else 1)


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 2).float()


BCE = F.binary_cross_entropy_with_logits
TARGETS = {
    "one-hot": (one_hot, F.cross_entropy),
    "smoothed": (lambda y: 0.8 * one_hot(y) + 0.1, F.cross_entropy),
    "multi-label": (lambda y: one_hot(y).logical_or(one_hot(1 - y.flip(0))).float(), BCE),
    "regression": (lambda y: torch.stack([y.float(), y - 0.3], 1), F.mse_loss),
    "bool": (lambda y: one_hot(y).bool(), lambda z, y: BCE(z, y.float())),
    "by hand": (lambda y: y, lambda z, y: -z.log_softmax(-1).gather(1, y[:, None]).mean()),
}


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_target(name: str, per_sample: bool) -> None:
    change, loss = TARGETS[name]
    batches = [(x, change(y)) for x, y in BATCHES]
    module = build(Taking, loss=loss)
    watch = run(module, Mixup(1.0, per_sample=per_sample), feed(*batches))
    assert_close(weights(module), train_by_hand(build(Taking), watch.drawn, batches, loss=loss), 1e-5)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
@pytest.mark.parametrize("of", [dict, list])
def test_a_combined_loader_is_reached_by_paths(mode: str, of: Any) -> None:
    loaders = {"a": loader(24), "b": loader(24)} if of is dict else [loader(24), loader(24)]
    named = ("b", "a") if of is dict else (1, 0)
    module = build(
        Taking, take=lambda batch: batch[named[0]] if torch.equal(batch[named[1]][1], plain.pop(0)) else None
    )
    plain = [y for _, y in loader(24)]
    watch = Watch(callback := Mixup(1.0, inputs=f"{named[0]}.0", target=f"{named[0]}.1"))
    fit(module, train=CombinedLoader(loaders, mode), max_epochs=1, limit_val_batches=0, callbacks=[callback, watch])
    assert_close(weights(module), train_by_hand(build(Taking), watch.drawn, list(loader(24))))


@pytest.mark.parametrize("size", [1, 3])
def test_small_and_odd_batches(size: int) -> None:
    module, batches = build(Taking), list(loader(7, size))
    watch = run(module, Mixup(1.0), feed(*batches))
    assert_close(weights(module), train_by_hand(build(Taking), watch.drawn, batches))


def test_the_module_gets_what_was_drawn() -> None:
    watch = run(build(PlainNet), Mixup(1.0))
    assert len({lam for lam, _ in watch.drawn}) == len(BATCHES)
    for (x, y), (mixed, label), (lam, index) in zip(BATCHES, watch.batches, watch.drawn, strict=True):
        assert torch.equal(mixed, mixup(x, lam, index))
        torch.testing.assert_close(mixed, lam * x + (1 - lam) * x[index])
        assert torch.equal(label, y)
        assert type(mixed) is Tensor


# ---- modules


@pytest.mark.parametrize("settings", [{"alpha": 0}, {"alpha": 0.0}, {"prob": 0.0}, {"stop": 0}, {"start": 99}], ids=str)
def test_never_mixing_is_bit_equal_to_no_callback(settings: dict[str, Any]) -> None:
    assert_equal(trained(Net, Mixup(**settings), train=loader(shuffle=True)), trained(Net, train=loader(shuffle=True)))


class Unlogged(PlainNet):
    """Lightning's ``log`` cannot be traced behind a graph break."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Manual(SteppedByHand, PlainNet):
    """Steps by itself."""


@pytest.mark.parametrize("per_sample", [False, True])
def test_manual_optimization(per_sample: bool) -> None:
    module = build(Manual)
    watch = run(module, Mixup(1.0, per_sample=per_sample, start=2))
    assert watch.drawn[:2] == [None, None]
    assert_close(weights(module), train_by_hand(build(PlainNet), watch.drawn, BATCHES))


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("backend", few(["eager", "aot_eager"], 1))
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_trains_alike(backend: str, per_sample: bool) -> None:
    torch._dynamo.reset()
    plain, module = build(Unlogged), build(Unlogged)
    run(plain, Mixup(1.0, per_sample=per_sample))
    run(torch.compile(module, backend=backend), Mixup(1.0, per_sample=per_sample))
    assert_close(weights(plain), weights(module))


def test_compilation_warns_of_nothing() -> None:
    torch._dynamo.reset()
    run(torch.compile(build(Unlogged), backend="eager"), Mixup(1.0))


def test_bf16_mixed_is_near_full_precision() -> None:
    full, mixed = build(PlainNet), build(PlainNet)
    watches = [run(full, Mixup(1.0)), run(mixed, Mixup(1.0), precision="bf16-mixed")]
    assert watches[0].numbers() == watches[1].numbers()
    assert watches[1].batches[0][0].dtype == torch.float32
    assert_close(weights(full), weights(mixed), 0.02)


class Sharp(lt.SAMMixin, NormNet):
    sam = lt.SAM(rho=0.1)
    seen: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append([part.clone() for part in batch])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("per_sample", [False, True])
def test_sam_perturbs_and_descends_by_the_same_mixed_batch(per_sample: bool, micro: int | None) -> None:
    seen: list[Any] = []
    module, hand = build(Sharp), build(PlainNet if micro else NormNet)
    module.seen = type("Unlooked", (), {"append": staticmethod(seen.append)})
    if micro:
        module.sam, module.layers = lt.SAM(rho=0.1, micro_batch_size=micro), build(PlainNet).layers
    watch = run(module, Mixup(1.0, per_sample=per_sample))
    if not micro:
        for first, second in zip(seen[::2], seen[1::2], strict=True):
            assert all(map(torch.equal, first, second))
    optimizer = hand.configure_optimizers()
    for (x, y), (lam, index) in zip(BATCHES, watch.drawn, strict=True):
        mixed, lams = naive_mixup(x, lam, index), torch.as_tensor(lam).expand(len(y))
        optimizer.zero_grad()
        for rows in torch.arange(len(y)).split(micro or len(y)):

            def loss(
                rows: Tensor = rows, mixed: Tensor = mixed, y: Tensor = y, lams: Tensor = lams, index: Tensor = index
            ) -> Tensor:
                z = hand(mixed[rows])
                a, b = (F.cross_entropy(z, t[rows], reduction="none") for t in (y, y[index]))
                return (lams[rows] * a + (1 - lams[rows]) * b).mean()

            named, old = dict(hand.named_parameters()), [p.detach().clone() for p in hand.parameters()]
            naive_perturb(named, torch.autograd.grad(loss(), list(named.values())), 0.1, None)
            buffers = copy.deepcopy(list(hand.buffers()))
            (loss() * len(rows) / len(y)).backward()
            with torch.no_grad():
                for live, kept in zip([*hand.parameters(), *hand.buffers()], [*old, *buffers], strict=True):
                    live.copy_(kept)
        optimizer.step()
    assert_close(weights(module), weights(hand), 1e-5)
