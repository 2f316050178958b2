"""What every averaging callback shares, seen through the least one: the mean of the weights after each step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import lightning_tricks as lt
from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.callback import AveragingCallback
from tests.nets import NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, trainer, weights


class Mean(AveragingCallback):
    """The mean of the weights at the start and after each optimizer step."""

    start = 0
    validate = at_end = "averaged"
    buffers = "copy"
    device = None

    def _update(self, trainer: L.Trainer, averages: Averages) -> None:
        averages.lerp(1 / (averages.updates + 2))


def assert_mean(module: nn.Module, seen: list[dict[str, Tensor]]) -> None:
    """The trained weights of the module are the mean of those that were seen."""
    ended = weights(module)
    mean = {name: torch.stack([state[name] for state in seen]).mean(0) for name, _ in module.named_parameters()}
    assert_close({name: ended[name] for name in mean}, mean)


class Record(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(weights(pl_module))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.seen.append(weights(pl_module))


def test_a_callback_that_does_not_say_how_to_average_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AveragingCallback()


def test_the_mean_of_all_steps_is_validated_saved_and_kept(tmp_path: Any) -> None:
    record, module = Record(), build(NormNet)
    run = fit(module, callbacks=[Mean(), record])
    assert_mean(module, record.seen)
    assert run.callback_metrics["val_loss"] == trainer().validate(module, loader(24), verbose=False)[0]["val_loss"]
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert_equal(torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"], weights(module))


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
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
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
    assert_mean(module, [first, *record.seen[half + 1 :]])


def test_in_manual_optimization_it_begins_before_the_step() -> None:
    class Manual(Draws):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 0:
                first.update({name: weight.detach().clone() for name, weight in self.named_parameters()})
            self.optimizers().zero_grad()
            super().training_step(batch, batch_idx).backward()
            self.optimizers().step()

    first: dict[str, torch.Tensor] = {}
    record, module = Record(), build(Manual)
    fit(module, callbacks=[Mean(), record])
    assert_mean(module, [first, *record.seen[1:]])


def renames(trainer: L.Trainer, module: Any) -> None:
    if trainer.current_epoch == 2:
        parametrize.register_parametrization(module.layers[0], "weight", nn.Identity())


def unfreezes(trainer: L.Trainer, module: Any) -> None:
    module.layers[0].requires_grad_(trainer.current_epoch >= 2)


@pytest.mark.parametrize("other", [renames, unfreezes])
def test_weights_that_are_renamed_or_join_as_a_fit_goes_on_keep_the_average(
    other: Callable[..., None], tmp_path: Any
) -> None:
    whole, rest, amid = build(NormNet), build(NormNet), LambdaCallback(on_train_epoch_start=other)
    fit(whole, callbacks=[Mean(), amid], max_epochs=4)
    fit(build(NormNet), callbacks=[Mean(), amid]).save_checkpoint(tmp_path / "x.ckpt")
    fit(rest, callbacks=[Mean(), amid], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(weights(whole), weights(rest))


@pytest.mark.parametrize(
    "rename",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
        lambda layer: parametrize.register_parametrization(layer, "weight", nn.Identity()),
    ],
    ids=["prune", "parametrize"],
)
def test_averages_follow_weights_that_are_renamed(rename: Callable[[nn.Module], object], tmp_path: Any) -> None:
    def amid(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            rename(module.layers[0])

    class Independent(Callback):
        """An average by position, which no name can disturb."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.parameters = list(pl_module.parameters())
            self.average = [p.detach().clone() for p in self.parameters]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for average, parameter in zip(self.average, self.parameters, strict=True):
                average.lerp_(parameter.detach(), 0.1)

    independent, ema, module = Independent(), lt.EMA(0.9, warmup=False, at_end="raw"), build(PlainNet)
    run = fit(module, callbacks=[LambdaCallback(on_train_batch_start=amid), independent, ema], max_epochs=1)
    found = ema.averaged_state_dict()
    names = {id(p): name for name, p in module.named_parameters()}
    for parameter, average in zip(independent.parameters, independent.average, strict=True):
        torch.testing.assert_close(found[names[id(parameter)]], average)
    run.save_checkpoint(tmp_path / "pruned.ckpt")


def test_averages_work_with_lightnings_pruning() -> None:
    def pruning() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.3, verbose=0, make_pruning_permanent=True)

    module, ema = build(PlainNet), lt.EMA(0.9)
    fit(module, callbacks=[ema, pruning()])
    zeros = {name: weight == 0 for name, weight in module.named_parameters()}
    assert sum(int(zero.sum()) for zero in zeros.values()) > 30
    with ema.averaged(module):
        assert all(weight.isfinite().all() for weight in module.parameters())
    with pytest.raises(MisconfigurationException, match="put EMA before ModelPruning"):
        fit(build(PlainNet), callbacks=[pruning(), lt.EMA(0.9)])
    fit(build(PlainNet), callbacks=[pruning(), lt.EMA(0.9, at_end="raw")])


# Python 3.10 has no notes on exceptions: it is warned instead.
NO_NOTES = pytest.mark.filterwarnings(
    f"{'ignore' if sys.version_info < (3, 11) else 'error'}:EMA could not undo everything:UserWarning"
)


@NO_NOTES
@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (None, MisconfigurationException, r"PlainNet has lost layers\.0\.weight.* EMA"),
        (KeyError("the user's own error"), KeyError, "the user's own error"),
    ],
)
def test_a_weight_that_is_gone_is_refused_by_name_unless_the_user_has_an_error(
    own: Exception | None, error: type[Exception], message: str
) -> None:
    def loses(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            module.layers[0] = nn.Linear(8, 16)
            if own:
                raise own

    with pytest.raises(error, match=message):
        fit(build(PlainNet), callbacks=[lt.EMA(0.9), LambdaCallback(on_train_batch_start=loses)])


class OldKey(Callback):
    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


def test_callbacks_may_have_any_state_key(tmp_path: Any) -> None:
    first = fit(build(NormNet), callbacks=[OldKey(), lt.EMA(0.9)], max_epochs=1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert OldKey in checkpoint["callbacks"]
    second = trainer(callbacks=[OldKey(), lt.EMA(0.8)])
    second.fit(build(NormNet), loader(), loader(24), ckpt_path=tmp_path / "a.ckpt", weights_only=False)


class Lazy(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.Linear(16, 2))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_are_refused_or_averaged_from_their_first_values_on() -> None:
    seen: list[Tensor] = []

    class See(Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
            if not seen:  # the first forward pass has drawn them
                seen.append(pl_module.layers[0].weight.detach().clone())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(pl_module.layers[0].weight.detach().clone())

    ema = lt.EMA(0.9, warmup=False, at_end="raw")
    fit(build(Lazy), callbacks=[See(), ema], max_epochs=1)
    average = seen[0]
    for weight in seen[1:]:
        average = average.lerp(weight, 0.1)
    assert_close({"layers.0.weight": average}, {"layers.0.weight": ema.averaged_state_dict()["layers.0.weight"]})
    with pytest.raises(MisconfigurationException, match=r"RewindOnSpike needs weights that exist.*layers\.0\.weight"):
        fit(build(Lazy), callbacks=[lt.RewindOnSpike()])
