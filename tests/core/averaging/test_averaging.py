"""What every averaging callback shares, seen through the least one: the mean of the weights after each step."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.utils import parametrize

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


class Draws(NormNet):
    """Draws its weights when a fit begins, other ones each time; with ``once`` when training begins."""

    once = True

    def on_train_start(self) -> None:
        if not self.once or self.global_step == 0:
            generator = torch.Generator().manual_seed(self.global_step)
            for weight in self.parameters():
                weight.data.normal_(0, 0.3, generator=generator)


def test_a_resumed_fit_goes_on_with_the_average_of_drawn_weights(tmp_path: Any) -> None:
    whole, rest = build(Draws), build(Draws)
    fit(whole, callbacks=[Mean()], max_epochs=4)
    fit(build(Draws), callbacks=[Mean()]).save_checkpoint(tmp_path / "x.ckpt")
    fit(rest, callbacks=[Mean()], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))


def test_a_checkpoint_from_before_the_first_step_resumes_exactly(tmp_path: Any) -> None:
    class Save(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            if trainer.global_step == 0:
                trainer.save_checkpoint(tmp_path / "x.ckpt")

    whole, rest = build(Draws), build(Draws)
    fit(whole, callbacks=[Mean(), Save()])
    fit(rest, callbacks=[Mean()], ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))


class Again(Draws):
    once = False


@pytest.mark.parametrize("elsewhere", [False, True])
def test_weights_drawn_anew_when_a_fit_goes_on_begin_a_new_average(elsewhere: bool, tmp_path: Any) -> None:
    module, record = build(Again), Record()
    run = fit(module, callbacks=[Mean(), record])
    half = len(record.seen)
    if elsewhere:
        run.save_checkpoint(tmp_path / "x.ckpt")
        module = build(Again)
        go_on = partial(fit, module, callbacks=[Mean(), record], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    else:
        run.fit_loop.max_epochs = 4
        go_on = partial(run.fit, module, loader(), loader(24))
    with pytest.warns(UserWarning, match="has averages of weights that Again has replaced as this fit began"):
        go_on()
    generator = torch.Generator().manual_seed(12)
    first = {n: weight.data.normal_(0, 0.3, generator=generator) for n, weight in build(Again).named_parameters()}
    seen = [first, *record.seen[half + 1 :]]
    expected = {name: torch.stack([each[name] for each in seen]).mean(0) for name in first}
    ended = weights(module)
    assert_close({name: ended[name] for name in expected}, expected)


def test_in_manual_optimization_it_begins_before_the_step() -> None:
    class Manual(Draws):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 0:
                first.update({name: weight.detach().clone() for name, weight in self.named_parameters()})
            self.optimizers().zero_grad()
            super().training_step(batch, batch_idx).backward()
            self.optimizers().step()

    first: dict[str, torch.Tensor] = {}
    record, module = Record(), build(Manual)
    fit(module, callbacks=[Mean(), record])
    seen = [first, *record.seen[1:]]
    expected = {name: torch.stack([each[name] for each in seen]).mean(0) for name in first}
    ended = weights(module)
    assert_close({name: ended[name] for name in expected}, expected)


class Renames(Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            parametrize.register_parametrization(pl_module.layers[0], "weight", nn.Identity())


class Unfreezes(Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.layers[0].requires_grad_(trainer.current_epoch >= 2)


@pytest.mark.parametrize("other", [Renames, Unfreezes])
def test_weights_that_are_renamed_or_join_as_a_fit_goes_on_keep_the_average(
    other: type[Callback], tmp_path: Any
) -> None:
    whole, rest = build(NormNet), build(NormNet)
    fit(whole, callbacks=[Mean(), other()], max_epochs=4)
    fit(build(NormNet), callbacks=[Mean(), other()]).save_checkpoint(tmp_path / "x.ckpt")
    fit(rest, callbacks=[Mean(), other()], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))
