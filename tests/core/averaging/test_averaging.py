"""What every averaging callback shares, seen through the least one: the mean of the weights after each step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.callback import AveragingCallback
from tests.nets import NormNet, assert_close, assert_equal, build, fit, loader, trainer, weights


class Mean(AveragingCallback):
    """The mean of the weights at the start and after each optimizer step."""

    start = 0
    validate = at_end = "averaged"
    buffers = "copy"
    device = None

    def _update(self, trainer: pl.Trainer, averages: Averages) -> None:
        averages.lerp(1 / (averages.updates + 2))


class Record(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append(weights(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.seen.append(weights(pl_module))


def test_a_callback_that_does_not_say_how_to_average_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AveragingCallback()


def test_the_mean_of_all_steps_is_validated_saved_and_kept(tmp_path: Any) -> None:
    record, module = Record(), build(NormNet)
    run = fit(module, callbacks=[Mean(), record])
    mean = {n: torch.stack([w[n] for w in record.seen]).mean(0) for n, _ in module.named_parameters()}
    ended = weights(module)
    assert_close({name: ended[name] for name in mean}, mean)
    assert run.callback_metrics["val_loss"] == trainer().validate(module, loader(24), verbose=False)[0]["val_loss"]
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert_equal(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"], ended)


def test_it_resumes_exactly(tmp_path: Any) -> None:
    whole, rest = build(NormNet), build(NormNet)
    fit(whole, callbacks=[Mean()], max_epochs=4)
    fit(build(NormNet), callbacks=[Mean()]).save_checkpoint(tmp_path / "x.ckpt")
    fit(rest, callbacks=[Mean()], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))
