"""LogitAdjustment trains what a module trains that counts its labels, and adjusts its logits, by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_tricks as lt
from tests.nets import Steps, Stream, assert_close, assert_equal, build, fit, weights

CLASSES, WEIGHTS = 4, torch.tensor([1.0, 2.0, 1.0, 3.0])
Sample = tuple[Tensor, Tensor]


class Tail(Dataset[Sample]):
    """Features whose classes overlap, of which the first is the most frequent one; it counts how often it is read."""

    def __init__(self, size: int = 60, seed: int = 0, shares: tuple[float, ...] = (0.6, 0.25, 0.1, 0.05)) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.y = torch.multinomial(torch.tensor(shares), size, replacement=True, generator=generator)
        self.x = torch.randn(size, CLASSES, generator=generator) + 1.5 * F.one_hot(self.y, CLASSES)
        self.read = 0

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> Sample:
        self.read += 1
        return self.x[number], self.y[number]


class Net(L.LightningModule):
    """A network with one of several losses."""

    loss: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.cross_entropy)
    prior: Tensor | None = None  # for what is done by hand

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = nn.Linear(CLASSES, CLASSES), nn.Dropout(0.1)
        self.validated: list[Tensor] = []

    def raised(self, logits: Tensor) -> Tensor:
        return logits if self.prior is None else logits + self.prior.log().view(-1, *[1] * (logits.ndim - 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return type(self).loss(self.raised(self.drop(self.layers(batch[0]))), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.layers(batch[0])
        self.validated.append(F.cross_entropy(logits, batch[1]))
        torch.testing.assert_close(self.validated[-1], F.cross_entropy(logits, batch[1].clone()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trained(kind: type[Net], *callbacks: Any, train: Any = None, **settings: Any) -> Any:
    module = build(kind)
    loader = DataLoader(Tail(), 8, shuffle=True) if train is None else train
    fit(module, train=loader, val=DataLoader(Tail(seed=1), 8), callbacks=[*callbacks], **settings)
    return module


def shares(labels: Tensor) -> Tensor:
    counted = Counter(labels.flatten().tolist())
    return torch.tensor([counted[each] for each in range(CLASSES)]) / sum(counted[each] for each in range(CLASSES))


def smooth(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, label_smoothing=0.1)


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=WEIGHTS)


def likely(logits: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(1), y)


def of_each(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none").square().mean()


@pytest.mark.few(3)
@pytest.mark.parametrize("loss", [F.cross_entropy, smooth, weighted, likely, of_each], ids=lambda each: each.__name__)
def test_it_is_the_loss_of_a_module_that_does_it_by_hand(loss: Any) -> None:
    stock = type("Stock", (Net,), {"loss": staticmethod(loss)})
    by_hand = type("ByHand", (stock,), {"prior": shares(Tail().y)})
    ours, plain = weights(trained(stock, lt.LogitAdjustment())), weights(trained(stock))
    assert_close(ours, weights(trained(by_hand)))
    assert any((ours[name] - plain[name]).abs().max() > 1e-2 for name in ours)


class Tokens(Net):
    """A label for each of three tokens; some are ignored."""

    ignored = -100

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.raised(self.layers(batch[0]).unflatten(0, (-1, 3)).movedim(2, 1))
        return F.cross_entropy(logits, batch[1].unflatten(0, (-1, 3)), ignore_index=self.ignored)


@pytest.mark.parametrize("ignored", [-100, 255, 0])
def test_what_is_ignored_is_no_class(ignored: int) -> None:
    samples = Tail()
    samples.y[::5] = ignored
    stock = type("Stock", (Tokens,), {"ignored": ignored})
    kept = samples.y[samples.y != ignored]
    by_hand = type("ByHand", (stock,), {"prior": shares(kept).clamp(min=1e-12)})
    loader = DataLoader(samples, 12)
    module = trained(stock, lt.LogitAdjustment(), train=loader, limit_val_batches=0)
    assert_close(weights(module), weights(trained(by_hand, train=loader, limit_val_batches=0)), 1e-5)


def test_rare_classes_are_found_more_often() -> None:
    test = Tail(4000, 2, (0.25,) * CLASSES)

    def errors(*callbacks: Any) -> float:
        loader = DataLoader(Tail(1500), 50, shuffle=True)
        module = trained(Net, *callbacks, train=loader, limit_val_batches=0, max_epochs=5)
        with torch.no_grad():
            return float((module.layers(test.x).argmax(1) != test.y).float().mean())

    assert errors(lt.LogitAdjustment()) < errors() - 0.05


# -- counting ---------------------------------------------------------------------------------------------------------


def counts(samples: Tail, **settings: Any) -> list[int]:
    trick = lt.LogitAdjustment()
    trained(Net, trick, train=DataLoader(samples, 8), **settings)
    return trick.counts


def test_the_labels_that_are_trained_on_are_counted() -> None:
    samples = Tail()
    assert counts(samples) == samples.y.bincount().tolist()
    assert counts(samples, limit_train_batches=2) == samples.y[:16].bincount().tolist()
    assert counts(samples, overfit_batches=1, limit_val_batches=0) == samples.y[:8].bincount().tolist()


def test_the_hooks_of_the_module_come_first() -> None:
    class Swaps(Net):
        def on_after_batch_transfer(self, batch: Any, _: int) -> Any:
            return batch[0], CLASSES - 1 - batch[1]

    trick, samples = lt.LogitAdjustment(), Tail()
    trained(Swaps, trick, train=DataLoader(samples, 8))
    assert trick.counts == samples.y.bincount().flip(0).tolist()


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"shuffle": True, "batch_size": 8},
    "generator": lambda: {"shuffle": True, "batch_size": 8, "generator": torch.Generator().manual_seed(3)},
    "workers that stay": lambda: {**LOADERS["shuffled"](), "num_workers": 1, "persistent_workers": True},
    "LengthBuckets": lambda: {"sampler": lt.LengthBuckets([1 + n % 7 for n in range(60)], 8), "batch_size": 8},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", LOADERS)
def test_counting_leaves_no_trace(kind: str) -> None:
    def loader() -> DataLoader[Sample]:
        return DataLoader(Tail(), **LOADERS[kind]())

    with_it = weights(trained(Net, lt.LogitAdjustment(tau=0.0), train=loader()))
    assert_equal(with_it, weights(trained(Net, train=loader())))


def test_a_resumed_fit_counts_nothing_again(tmp_path: Path) -> None:
    samples = Tail()
    save = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, enable_version_counter=False)
    net = type("Net", (Net,), {})
    trained(net, lt.LogitAdjustment(), save, train=DataLoader(samples, 8), enable_checkpointing=True, max_epochs=1)
    assert samples.read == 2 * len(samples)
    again, trick = Tail(), lt.LogitAdjustment()
    trained(net, trick, train=DataLoader(again, 8), ckpt_path=tmp_path / "epoch=0.ckpt", max_epochs=2)
    assert again.read == len(again)
    assert trick.counts == samples.y.bincount().tolist()


# -- which losses -----------------------------------------------------------------------------------------------------


class TwoHeads(Net):
    """Another label has a loss of its own, and metrics of the first one are logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch["x"])
        self.log("metric", F.cross_entropy(logits.detach(), batch["y"]))
        with torch.no_grad():
            self.log("error", F.l1_loss(logits.argmax(1).float(), batch["y"].float()))
            plain = F.cross_entropy(logits, batch["y"])
        self.seen.append((float(plain), logits.detach()))
        return F.cross_entropy(self.raised(logits), batch["y"]) + F.cross_entropy(logits, batch["other"])

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, Tensor]] = []


def two_labels() -> DataLoader[Any]:
    samples = Tail()
    return DataLoader([{"x": x, "y": y, "other": (y + 1) % CLASSES} for x, y in samples], 8)


def test_one_of_two_labels_is_named() -> None:
    by_hand = type("ByHand", (TwoHeads,), {"prior": shares(Tail().y)})
    settings: dict[str, Any] = {"train": two_labels(), "limit_val_batches": 0}
    module = trained(TwoHeads, lt.LogitAdjustment(target="y"), **settings)
    assert_close(weights(module), weights(trained(by_hand, **settings)))
    for (plain, logits), batch in zip(module.seen, 2 * [*two_labels()], strict=True):
        assert plain == pytest.approx(F.cross_entropy(logits, batch["y"]).item(), rel=1e-5)
    with pytest.raises(MisconfigurationException, match="counts the labels of one target, integers, got 2 targets"):
        trained(TwoHeads, lt.LogitAdjustment(target=["y", "other"]), **settings)


def binary(logits: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(y, CLASSES).float())


def formula(logits: Tensor, y: Tensor) -> Tensor:
    return -logits.log_softmax(1).gather(1, y[:, None]).mean()


def swapped(logits: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(y.float(), logits[:, 0]) + F.cross_entropy(logits, y)


def of_few(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :2], y // 2)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (binary, r"binary_cross_entropy_with_logits\(\) of the target has no logits of classes"),
        (swapped, r"mse_loss\(\) of the target has no logits of classes"),
        (formula, r"gather\(\) of the target. Compute the loss by a function of torch.nn.functional"),
        (of_few, "has counted training labels up to 3, and the loss has 2 classes"),
    ],
    ids=["binary", "swapped", "formula", "of few"],
)
def test_another_loss_is_refused(loss: Any, told: str) -> None:
    steps = Steps()
    with pytest.raises(MisconfigurationException, match=told):
        trained(type("Net", (Net,), {"loss": staticmethod(loss)}), lt.LogitAdjustment(), steps)
    assert steps.made == 0


@pytest.mark.filterwarnings("ignore:Your .IterableDataset. has .__len__. defined")
def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"reads the training loader once .* got a DataLoader of an"):
        trained(Net, lt.LogitAdjustment(), train=DataLoader(Stream([Tail()[number] for number in range(16)]), 8))
    samples = Tail()
    soft = DataLoader([(x, F.one_hot(y, CLASSES).float()) for x, y in samples], 8)
    with pytest.raises(MisconfigurationException, match=r"integers, got torch.float32 for batch\[1\]"):
        trained(Net, lt.LogitAdjustment(), train=soft)
