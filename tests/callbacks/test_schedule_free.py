"""ScheduleFree: the library's x in validation, checkpoints and at the end, and training as without any of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

import lightning_tricks as lt
from tests.nets import NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, weights

NAMES = ["schedulefree_adamw", "schedulefree_sgd"]


def net(name: str = "schedulefree_adamw", base: Any = PlainNet) -> Any:
    class Free(base):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return lt.optimizer(name, self, 0.05)

    return build(Free)


def naive(name: str, epochs: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights y and x of the library's own optimizer after a plain loop."""
    module = net(name)
    optimizer = module.configure_optimizers()
    optimizer.train()
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
    trained = weights(module)
    optimizer.eval()
    return trained, weights(module)


class Seen(Callback):
    """The weights at the end of training batches, and in validation."""

    def __init__(self) -> None:
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.trained.append(weights(pl_module))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.validated.append(weights(pl_module))


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_at_y_and_validates_saves_and_ends_with_x(name: str, tmp_path: Path) -> None:
    module, seen, saved = net(name), Seen(), ModelCheckpoint(tmp_path, filename="last")
    fit(module, max_epochs=2, callbacks=[lt.ScheduleFree(), seen, saved], enable_checkpointing=True)
    y, x = naive(name, 2)
    assert_equal(seen.trained[-1], y)
    assert_equal(seen.validated[-1], x)
    assert_equal(weights(module), x)
    assert_equal(torch.load(saved.best_model_path, weights_only=True)["state_dict"], x)
    assert any(not torch.equal(x[key], y[key]) for key in x)


@pytest.mark.parametrize("name", NAMES)
def test_validating_changes_nothing(name: str) -> None:
    often, never = Seen(), Seen()
    fit(net(name), max_epochs=2, callbacks=[lt.ScheduleFree(), often], val_check_interval=2)
    fit(net(name), max_epochs=2, callbacks=[lt.ScheduleFree(), never], limit_val_batches=0)
    for one, other in zip(often.trained, never.trained, strict=True):
        assert_equal(one, other)


def test_statistics_of_batchnorm_are_those_of_x() -> None:
    module = net(base=NormNet)
    fit(module, max_epochs=2, callbacks=[lt.ScheduleFree()])
    fresh = copy.deepcopy(module)
    for layer in fresh.modules():
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None
    fresh.train()
    with torch.no_grad():
        for x, _ in loader():
            fresh(x)
    found, expected = ({n: b for n, b in m.named_buffers() if "running" in n} for m in (module, fresh))
    assert_close(found, expected, 1e-5)


@pytest.mark.filterwarnings("ignore:.*configure_optimizers. returned .None")
def test_what_would_undo_it_is_refused_before_training() -> None:
    class Scheduled(PlainNet):
        def configure_optimizers(self) -> Any:
            optimizer = lt.optimizer("schedulefree_sgd", self, 0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    class Made(PlainNet):
        def configure_optimizers(self) -> Any:
            return lt.cosine(lt.optimizer("schedulefree_sgd", self, 0.1), self)

    class Without(PlainNet):
        def configure_optimizers(self) -> None:
            return None

    class Zero(PlainNet):
        def configure_optimizers(self) -> Any:
            return lt.optimizer("schedulefree_adamw", self, 0.1, betas=(0.0, 0.999))

    cases: list[tuple[Any, list[Callback], str]] = [
        (build(Zero), [lt.ScheduleFree()], r"needs a beta above 0.*Zero has betas=\(0"),
        (net(), [lt.ScheduleFree(), lt.EMA(validate="raw", at_end="raw")], "already averages the weights"),
        (net(), [lt.EMA(), lt.ScheduleFree()], "already averages the weights"),
        (net(), [lt.ScheduleFree(), lt.LRSchedule("cosine")], "takes the place of a schedule"),
        (build(Scheduled), [lt.ScheduleFree()], "takes the place of a schedule"),
        (build(Made), [lt.ScheduleFree()], "a schedule-free optimizer takes no schedule"),
        (build(PlainNet), [lt.ScheduleFree()], "configure_optimizers returns SGD"),
        (build(Without), [lt.ScheduleFree()], r"ScheduleFree\(\) needs an optimizer"),
        (net(), [], r"needs the callback ScheduleFree\(\)"),
    ]
    for module, callbacks, message in cases:
        before = weights(module)
        with pytest.raises((MisconfigurationException, ValueError), match=message):
            fit(module, callbacks=callbacks)
        assert_equal(weights(module), before)
