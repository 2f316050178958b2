"""How samples are compared before training on them: against the loss of a step on each of them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core.mixed_targets.loss_plan import LossPlan
from lightning_tricks.core.mixed_targets.target import mixed_target
from tests.core.batches.test_scoring import KeepingTask, run_one
from tests.nets import PlainNet, build

CE = F.cross_entropy
B, T, C = 8, 6, 3
NUMBERS = torch.Generator().manual_seed(5)
LENGTHS = torch.tensor([6, 1, 4, 2, 5, 3, 6, 1])
VALID = torch.arange(T) < LENGTHS[:, None]
LABELS = torch.randint(C, (B, T), generator=NUMBERS)
Z = 2 * torch.randn(B, T, C, generator=NUMBERS)
IGNORED = LABELS.where(VALID, -100)
LINE = torch.randn(B, T, generator=NUMBERS)
Step = Callable[[Tensor, Tensor, Tensor], Tensor]  # the loss of logits, labels and a mask


def each(z: Tensor, y: Tensor) -> Tensor:
    """The losses of all positions."""
    return CE(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def flat(z: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return CE(z.flatten(0, 1), y.flatten(), **settings)


def binary(z: Tensor, y: Tensor, **settings: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(z[..., 0], (y == 0).float(), **settings)


def emptied(losses: Tensor, where: Tensor) -> Tensor:
    losses[where] = 0.0
    return losses


def logged_as_well(losses: Tensor, mask: Tensor) -> Tensor:
    """The mean, and before it another number of the same sum for the log."""
    total = (losses * mask).sum()
    assert (total / len(losses)).isfinite()
    assert (total / 7.0).isfinite()
    mean = total / mask.sum()
    assert (total / 7.0 + mean * 3).isfinite()
    return mean


MEANS: dict[str, Step] = {
    "mean over all positions": lambda z, y, m: flat(z, y),
    "by hand": lambda z, y, m: each(z, y).mean(),
    "mean of sums": lambda z, y, m: each(z, y).sum() / y.numel(),
    "classes in the second dimension": lambda z, y, m: CE(z.transpose(1, 2), y, reduction="none").mean(),
}
MASKED: dict[str, Step] = {
    "ignored": lambda z, y, m: flat(z, y.where(m, -100)),
    "ignored by another number": lambda z, y, m: flat(z, y.where(m, 7), ignore_index=7),
    "sum of ignored by their number": lambda z, y, m: flat(z, y.where(m, -100), reduction="sum") / m.sum(),
    "losses of ignored": lambda z, y, m: each(z, y.where(m, -100)).sum() / (y.where(m, -100) != -100).sum(),
    "integers": lambda z, y, m: (each(z, y) * m.long()).sum() / m.sum(),
    "floats": lambda z, y, m: (m.float() * each(z, y)).sum() / m.float().sum(),
    "flat": lambda z, y, m: (each(z, y).view(-1) * m.reshape(-1)).sum() / m.sum(),
    "torch": lambda z, y, m: torch.div(torch.sum(torch.mul(each(z, y), m)), torch.sum(m)),
    "logged as well": lambda z, y, m: logged_as_well(each(z, y), m),
    "keywords": lambda z, y, m: torch.div(input=torch.mul(input=each(z, y), other=m).sum(), other=m.sum()),
    "divided in place": lambda z, y, m: (each(z, y) * m).sum().div_(m.sum()),
    "where": lambda z, y, m: torch.where(m, each(z, y), 0.0).sum() / m.sum(),
    "filled": lambda z, y, m: each(z, y).masked_fill(~m, 0.0).sum() / m.sum(),
    "indexed": lambda z, y, m: each(z, y)[m].mean(),
    "at least one": lambda z, y, m: (each(z, y) * m).sum() / m.sum().clamp(min=1),
    "a little more": lambda z, y, m: (each(z, y) * m).sum() / (m.sum() + 1e-8),
    "a number": lambda z, y, m: (each(z, y) * m).sum() / m.sum().item(),
    "scaled": lambda z, y, m: 0.5 * (each(z, y) * m).sum() / m.sum(),
    "scaled behind": lambda z, y, m: (each(z, y) * m).sum() / m.sum() / 4,
    "means": lambda z, y, m: (each(z, y) * m).mean() / m.float().mean(),
    "normed mask": lambda z, y, m: (each(z, y) * (m / m.sum())).sum(),
    "sum over classes": lambda z, y, m: (
        (F.mse_loss(z, F.one_hot(y, C).float(), reduction="none").sum(-1) * m).sum() / m.sum()
    ),
    "multiplied in place": lambda z, y, m: each(z, y).mul_(m).sum() / m.sum(),
    "set in place": lambda z, y, m: emptied(each(z, y), ~m).sum() / m.sum(),
    "two sums": lambda z, y, m: ((each(z, y) * m).sum() + (each(-z, y) * m).sum()) / m.sum(),
    "of the target": lambda z, y, m: (each(z, y) * (y != 0)).sum() / (y != 0).sum(),
    "of each sample": lambda z, y, m: ((each(z, y) * m).sum(1) / m.sum(1)).mean(),
    "focal": lambda z, y, m: ((1 - torch.exp(-each(z, y))) ** 2 * each(z, y) * m).sum() / m.sum(),
    "weight of a loss": lambda z, y, m: binary(z, y, weight=m.float(), reduction="sum") / m.sum(),
    "weight of losses": lambda z, y, m: binary(z, y, weight=m.float(), reduction="none").sum() / m.sum(),
    "weight of squares": lambda z, y, m: F.mse_loss(z[..., 0], y.float(), weight=m.float()),
    "smoothed": lambda z, y, m: flat(z, y.where(m, -100), label_smoothing=0.2),
    "bf16": lambda z, y, m: (each(z, y).bfloat16() * m).sum() / m.bfloat16().sum(),
}
SUMS: dict[str, Step] = {
    "sum": lambda z, y, m: flat(z, y, reduction="sum"),
    "sum by hand": lambda z, y, m: each(z, y).sum(),
    "masked sum": lambda z, y, m: (each(z, y) * m).sum(),
    "sum of ignored": lambda z, y, m: flat(z, y.where(m, -100), reduction="sum"),
    "sums of samples": lambda z, y, m: (each(z, y) * m).sum(1).mean(),
    "sum by the number of samples": lambda z, y, m: (each(z, y) * m).sum() / len(y),
    "mean of a loss with weights": lambda z, y, m: binary(z, y, weight=m.float()),
    "mean over padding, too": lambda z, y, m: (each(z, y) * m).mean(),
}
STEPS = {**MEANS, **MASKED, **SUMS}


def alone(step: Step) -> Tensor:
    """The loss of a step on each sample alone, in a plain loop."""
    return torch.stack([step(Z[n : n + 1], LABELS[n : n + 1], VALID[n : n + 1]) for n in range(B)])


def scores(step: Step) -> Tensor:
    """What is recorded by one step on all samples."""
    found = list[Tensor]()
    with torch.no_grad():
        loss = step(Z, mixed_target([LABELS], LossPlan(record=found.append)), VALID)
    torch.testing.assert_close(loss.as_subclass(Tensor), step(Z, LABELS, VALID))
    return torch.stack(found).sum(0)


@pytest.mark.parametrize("name", STEPS)
def test_samples_are_compared_by_the_losses_that_they_have_alone(name: str) -> None:
    expected, found = alone(STEPS[name]), scores(STEPS[name])
    assert found.shape == (B,)
    if name == "bf16":
        torch.testing.assert_close(found, alone(MASKED["integers"]), atol=0.02, rtol=0.02)
    elif "scaled" in name:  # a factor is the same for all samples
        torch.testing.assert_close(found / expected, (found / expected)[:1].expand(B))
    else:
        torch.testing.assert_close(found, expected)


def test_masked_means_are_not_in_the_order_of_their_sums() -> None:
    assert alone(MASKED["integers"]).argsort().tolist() != alone(SUMS["masked sum"]).argsort().tolist()


@pytest.mark.parametrize("name", ["integers", "at least one", "sum of ignored by their number"])
def test_a_sample_without_a_position_that_counts_is_the_last_one(name: str) -> None:
    found, valid = list[Tensor](), VALID.clone()
    valid[3] = False
    with torch.no_grad():
        STEPS[name](Z, mixed_target([LABELS], LossPlan(record=found.append)), valid)
    assert found[0][3] == -torch.inf
    assert found[0].isfinite().sum() == B - 1


class Padded(KeepingTask):
    """Classifies tokens, of which some are padding."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step, self.embed, self.layers = step, nn.Embedding(20, 8), nn.Linear(8, C)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if torch.is_grad_enabled():
            self.kept.append(batch)
        return self.step(self.layers(self.embed(batch["x"])), batch["y"], batch["mask"])


TOKENS = torch.randint(20, (B, T), generator=NUMBERS)


@pytest.mark.few(30)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", STEPS)
def test_prune_trains_on_the_samples_with_the_largest_losses_alone(name: str, precision: str) -> None:
    module, batch = build(Padded, step=STEPS[name]), {"x": TOKENS, "y": LABELS, "mask": VALID}
    parts = [{key: part[n : n + 1] for key, part in batch.items()} for n in range(B)]
    with torch.no_grad():
        losses = torch.stack([module.training_step(part, 0) for part in parts])
    run_one(module, batch, lt.HardExampleFilter(0.5), precision=precision)
    kept = [[*map(tuple, TOKENS.tolist())].index(tuple(row)) for row in module.kept[0]["x"].tolist()]
    if precision == "32-true" and name != "bf16":
        assert kept == losses.topk(4).indices.sort().values.tolist()
    else:  # some are as hard as others, but for rounding
        assert losses[kept].min() >= losses.topk(4).values.min() - 0.02


def test_the_sum_of_a_scoring_pass_is_a_tensor_like_any_other() -> None:
    found = list[Tensor]()
    with torch.no_grad():
        y = mixed_target([LABELS], LossPlan(record=found.append))
        total = (each(Z, y) * VALID).sum()
        plain = (each(Z, LABELS) * VALID).sum()
    assert total.item() == plain.item()
    assert f"{float(total):.4f}" == f"{float(plain):.4f}"
    assert type(total.detach().cpu().numpy()).__name__ == "ndarray"
    assert torch.equal(torch.stack([total, total]).as_subclass(Tensor), torch.stack([plain, plain]))
    assert (1 / total) == 1 / plain
    assert total.backward is not None
    torch.testing.assert_close((total / VALID.sum() + PlainNet().layers[0].bias.sum() * 0), plain / VALID.sum())
