"""Targets that know in a Trainer: against the same losses computed by hand from what was drawn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics as tm
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from tests.core.mixed_targets.test_operations import Log
from tests.core.mixed_targets.test_target import CE, logp, onehot_loss
from tests.nets import PlainNet, build, fit, rank_loader, weights
from tests.ranks import run_ranks


class Custom(PlainNet):
    """Any loss, and a metric that must not notice."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss, self.accuracy = loss, tm.Accuracy("multiclass", num_classes=2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self(x)
        self.log("accuracy", self.accuracy(z.softmax(1), y), on_epoch=True)
        self.log("share", y.float().mean(), on_epoch=True)
        return self.loss(z, y)


class ByHand(Custom):
    """The same from what was drawn."""

    def on_train_start(self):
        self.labels = [y for _, y in self.trainer.train_dataloader]

    def mixed(self, z: Tensor, batch: Any, batch_idx: int) -> Tensor:
        CE(z, batch[1])  # without which the batch would end in an error
        y, drawn = self.labels[batch_idx], self.trainer.callbacks[0].drawn
        return (drawn.lam * self.loss(z, y) + (1 - drawn.lam) * self.loss(z, y[drawn.index])).mean()

    def training_step(self, batch, batch_idx):
        return self.mixed(self(batch[0]), batch, batch_idx)


@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("loss", [logp, lambda z, y: CE(z, y, reduction="none")], ids=["by hand", "torch"])
def test_training(loss, per_sample):
    mixed, expected = build(Custom, loss=lambda z, y: loss(z, y).mean()), build(ByHand, loss=loss)
    for module in (mixed, expected):
        fit(module, callbacks=[lt.Mixup(0.5, per_sample=per_sample)], max_epochs=1)
    for name, weight in weights(expected).items():
        torch.testing.assert_close(weights(mixed)[name], weight, atol=1e-6, rtol=1e-5)


class Logs(ByHand):
    """A step that keeps, logs and returns more than a loss; by hand, or by what the trick made of the target."""

    def __init__(self, by_hand: bool, manual: bool) -> None:
        super().__init__(lambda z, y: CE(z, y) + dice_of_two(z, y))
        self.by_hand, self.automatic_optimization = by_hand, not manual
        self.kept, self.total, self.mean = [], torch.zeros(()), tm.MeanMetric()

    def training_step(self, batch, batch_idx):
        z = self(batch[0])
        y = self.labels[batch_idx] if self.by_hand else batch[1]
        loss = self.mixed(z, batch, batch_idx) if self.by_hand else self.loss(z, y)
        self.kept.append(loss.detach())
        self.total += loss.detach()
        self.accuracy(z.softmax(1), y)
        self.mean(loss)
        metrics = {"accuracy": self.accuracy, "mean": self.mean, "loss": loss, "item": loss.item(), "total": self.total}
        self.log_dict({**metrics, "kept": torch.stack(self.kept).mean()}, on_step=True, on_epoch=True)
        if self.automatic_optimization:
            return {"loss": loss, "outputs": [(y, {"z": z.detach()})]}
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return None


def dice_of_two(z: Tensor, y: Tensor) -> Tensor:
    p, onehot = z.softmax(1), F.one_hot(y, 2)
    return 1 - (2 * (p * onehot).sum(0) / (p + onehot).sum(0)).mean()


SETTINGS = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
    "manual": {},
}


def trained(by_hand: bool, manual: bool = False, **settings: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = build(Logs, by_hand=by_hand, manual=manual)
    trainer = fit(module, callbacks=[lt.Mixup(0.5)], max_epochs=2, **settings)
    assert {type(each) for each in (module.total, *module.kept, *module.accuracy.metric_state.values())} == {Tensor}
    return weights(module), trainer.callback_metrics


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_and_records_of_a_training(name):
    got, expected = (trained(by_hand, name == "manual", **SETTINGS[name]) for by_hand in (False, True))
    exact = {"atol": 1e-6, "rtol": 1e-5} if name != "bf16" else {"atol": 0.01, "rtol": 0.01}
    torch.testing.assert_close(got, expected, **exact)


def ranks_trained(by_hand: bool, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return trained(by_hand, train=rank_loader(), devices=2, strategy=strategy, use_distributed_sampler=False)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_find_unused_parameters_true"])
def test_ranks(strategy):
    got, expected = (run_ranks(ranks_trained, by_hand, strategy) for by_hand in (False, True))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[0][0], got[1][0], atol=0, rtol=0)


@pytest.mark.parametrize("per_sample", [False, True])
def test_autograd_function_is_an_error(per_sample):
    with pytest.raises(MisconfigurationException, match=r"autograd\.Function"):
        fit(build(Custom, loss=Log.apply), callbacks=[lt.Mixup(per_sample=per_sample)], max_epochs=1)


@pytest.mark.parametrize(
    "plainly", [lambda y: torch.tensor(y.tolist()), lambda y: torch.from_numpy(y.numpy().copy()), copy.deepcopy]
)
def test_lost_labels_are_an_error(plainly):
    with pytest.raises(MisconfigurationException, match="did nothing to batch 0"):
        fit(build(Custom, loss=lambda z, y: CE(z, plainly(y))), callbacks=[lt.Mixup()], max_epochs=1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
def test_compiled_step():
    compiled = build(Custom, loss=lambda z, y: onehot_loss(F.one_hot(y, 2), z))
    eager = copy.deepcopy(compiled)
    compiled.loss = torch.compile(compiled.loss, backend="eager")
    for module in (compiled, eager):
        fit(module, callbacks=[lt.Mixup(0.5)], max_epochs=1)
    for name, weight in weights(eager).items():
        torch.testing.assert_close(weights(compiled)[name], weight, atol=1e-6, rtol=1e-5)


class Measured(PlainNet):
    """Metrics that write into their state, and values for the record that are no losses."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = tm.ConfusionMatrix("multiclass", num_classes=2)
        self.error = tm.MeanSquaredError()

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self(x)
        self.confusion.update(z.argmax(-1), y)
        self.log("error", self.error(z[:, 0], y.float()))
        losses = F.cross_entropy(z, y, reduction="none")
        self.log("largest", losses.max())
        return losses.mean()

    def on_train_epoch_end(self):
        assert self.confusion.compute().sum() > 0
        self.confusion.reset()


@pytest.mark.parametrize(
    "callback",
    [
        lambda: lt.Mixup(prob=0.5),
        lambda: lt.Mixup(per_sample=True),
        lambda: lt.HardExampleFilter(every_n_batches=2),
        lambda: lt.HardExampleFilter(mode="loss", every_n_batches=2),
    ],
)
def test_metrics_and_what_is_logged_may_be_made_of_the_target(callback):
    run = fit(build(Measured), callbacks=[callback()])
    assert run.callback_metrics["largest"].isfinite()


class RawBackward(PlainNet):
    """Optimizes manually, without manual_backward, and never uses the target of the batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self(batch[0]).square().mean().backward()
        optimizer.step()


def test_a_target_that_manual_optimization_never_sees_is_an_error():
    with pytest.raises(MisconfigurationException, match="did nothing to batch 0"):
        fit(build(RawBackward), callbacks=[lt.Mixup()])
