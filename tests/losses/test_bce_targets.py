"""bce_targets: the targets and the losses that timm has, of plain labels and of mixed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn

import lightning_tricks as lt
from tests.nets import PlainNet, build, fit
from tests.refusals import assert_refused

CLASSES = 2


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_plain_labels_is_that_of_timm(smoothing: float, threshold: float | None) -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([0, 4, 2, 2, 1, 3])
    found = F.binary_cross_entropy_with_logits(
        logits, lt.bce_targets(labels, 5, smoothing=smoothing, threshold=threshold)
    )
    torch.testing.assert_close(found, BinaryCrossEntropy(smoothing, target_threshold=threshold)(logits, labels))


class Binary(PlainNet):
    """Trains with timm's loss, and keeps what it has seen."""

    threshold: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.layers(batch[0])
        targets = lt.bce_targets(batch[1], CLASSES, smoothing=0.1, threshold=self.threshold)
        loss = F.binary_cross_entropy_with_logits(logits, targets)
        self.seen.append((logits.detach(), batch[1], loss))
        return loss


class Watches(Callback):
    """Keeps what a mixing callback has drawn."""

    def __init__(self, mixing: Any) -> None:
        self.mixing = mixing
        self.drawn: list[Any] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.drawn.append(self.mixing.drawn)


@pytest.mark.parametrize("threshold", [None, 0.2, 0.45])
@pytest.mark.parametrize("per_sample", [False, True])
def test_the_loss_of_mixed_labels_is_that_of_timm(threshold: float | None, per_sample: bool) -> None:
    module, mixing = build(Binary), lt.Mixup(alpha=1.0, per_sample=per_sample)
    module.threshold = threshold
    watches = Watches(mixing)
    fit(module, callbacks=[mixing, watches], max_epochs=1)
    assert len(module.seen) > 3
    found, expected = [], []
    for (logits, labels, loss), drawn in zip(module.seen, watches.drawn, strict=True):
        plain = labels.as_subclass(Tensor)
        lam = drawn.lam[:, None] if per_sample else drawn.lam
        one, other = (mixup_target(each, CLASSES, 1.0, 0.1) for each in (plain, plain[drawn.index]))
        soft = lam * one + (1 - lam) * other
        found.append(float(loss.detach()))
        expected.append(float(BinaryCrossEntropy(0.0, target_threshold=threshold)(logits, soft)))
    assert found == pytest.approx(expected, rel=1e-5)
    assert max(expected) != min(expected)


def test_a_threshold_below_a_half_gives_both_classes() -> None:
    module, mixing = build(Binary), lt.Mixup(alpha=1e5)  # lam is nearly 1/2
    module.threshold = 0.2
    watches = Watches(mixing)
    fit(module, callbacks=[mixing, watches], max_epochs=1)
    for (logits, labels, loss), drawn in zip(module.seen, watches.drawn, strict=True):
        plain = labels.as_subclass(Tensor)
        both = F.one_hot(plain, CLASSES) | F.one_hot(plain[drawn.index], CLASSES)
        expected = F.binary_cross_entropy_with_logits(logits, both.float())
        torch.testing.assert_close(loss.detach().as_subclass(Tensor), expected)


def test_samples_are_known_to_other_tricks() -> None:
    """The half with the largest losses trains, each loss that of its own ``lam``."""
    module, mixing = build(Binary), lt.Mixup(alpha=1.0, per_sample=True)
    module.threshold = 0.3
    watches = Watches(mixing)
    fit(module, callbacks=[mixing, lt.HardExampleFilter(0.5, mode="loss"), watches], max_epochs=1)
    for (logits, labels, loss), drawn in zip(module.seen, watches.drawn, strict=True):
        plain, lam = labels.as_subclass(Tensor), drawn.lam[:, None]
        one, other = (lt.bce_targets(each, CLASSES, smoothing=0.1) for each in (plain, plain[drawn.index]))
        targets = (lam * one + (1 - lam) * other > 0.3).float()
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        assert float(loss.detach()) == pytest.approx(float(losses.topk(len(losses) // 2).values.mean()), rel=1e-5)


def test_wrong_values_are_refused() -> None:
    cases = [
        (ValueError, {"classes": 1}, "classes must be at least 2"),
        (ValueError, {"smoothing": 1.0}, "smoothing must be in"),
        (ValueError, {"threshold": -0.1}, "threshold must be in"),
        (TypeError, {"labels": [0, 1]}, "labels must be Tensor, got"),
        (ValueError, {"labels": torch.ones(2)}, r"labels must be classes \(B,\), integers, got torch.float32"),
        (ValueError, {"labels": torch.ones(2, 2).long()}, r"got torch.int64 \(2, 2\)"),
        (ValueError, {"labels": torch.tensor([0, 2])}, r"labels must be in \[0, classes\), got classes=2: "),
        (ValueError, {"labels": torch.tensor([0, -1])}, r"labels must be in \[0, classes\), got classes=2: "),
    ]
    assert_refused(lambda **given: lt.bce_targets(**{"labels": torch.tensor([0, 1]), "classes": 2, **given}), cases)
