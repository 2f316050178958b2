"""What SAM checks before training, what it refuses, and what it leaves behind."""

from __future__ import annotations

import copy
import signal
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.core.replay.rerun import is_replaying
from tests.modules.sam.test_rules import SAMPlainNet
from tests.nets import PlainNet, assert_equal, build, fit, loader, trainer, weights


class Manual(SAMPlainNet):
    """Trains by ``sam_step`` as long as it is told to."""

    automatic_optimization = False
    calls = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.calls:
            self.sam_step(lambda: PlainNet.training_step(self, batch, batch_idx))


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "sam", "message"),
    [
        (
            SAMPlainNet,
            lt.SAM(parameters=r"encoder\."),
            r"SAM(parameters='encoder\\.'): parameters: a pattern must be found in a name",
        ),
        (
            SAMPlainNet,
            lt.SAM(parameters="norm"),
            "SAM(parameters='norm'): parameters: a pattern must be found in a name",
        ),
        (
            Manual,
            lt.SAM(every_n_steps=2),
            "With automatic_optimization=False Manual decides itself which steps and samples are perturbed, got SAM(",
        ),
        (Manual, lt.SAM(micro_batch_size=2), "micro_batch_size=2, parameters=None): leave out every_n_steps and micro"),
        (SAMPlainNet, {"rho": 0.1}, "SAMPlainNet.sam must be a SAM(rho=...), got {'rho': 0.1}"),
        (Manual, None, "Manual.sam must be a SAM(rho=...), got None"),
    ],
)
def test_wrong_settings_are_refused_before_the_first_step(kind: type[PlainNet], sam: Any, message: str) -> None:
    module, start = build(kind), weights(build(kind))
    module.sam = sam
    with pytest.raises(MisconfigurationException) as caught:
        fit(module)
    assert message in str(caught.value)
    assert_equal(weights(module), start)


def test_a_manual_module_that_never_calls_sam_is_refused_after_an_epoch() -> None:
    module = build(Manual)
    module.calls = False
    message = (
        r"Manual optimizes manually and never called self.sam_backward\(closure\) or self.sam_step\(closure\): call one"
        " of them in training_step, or remove SAMMixin."
    )
    with pytest.raises(MisconfigurationException, match=message):
        fit(module)


def test_a_manual_module_that_stops_calling_sam_is_refused_in_the_next_fit_only() -> None:
    class Stops(Manual):
        def on_train_batch_end(self, *_: Any) -> None:
            self.calls = False

    module = build(Stops)
    fit(module)
    with pytest.raises(MisconfigurationException, match="Stops optimizes manually and never called"):
        fit(module)


def test_sixteen_bit_weights_are_refused_unless_they_are_frozen() -> None:
    module = build(SAMPlainNet)
    module.table = torch.nn.Linear(2, 2).to(torch.bfloat16)
    with pytest.raises(
        MisconfigurationException, match=r"table\.weight is torch\.bfloat16. Use precision='bf16-mixed'"
    ):
        fit(module)
    module.table.requires_grad_(False)
    fit(module)
    with pytest.raises(MisconfigurationException, match=r"layers\.0\.weight is torch\.bfloat16"):
        fit(build(SAMPlainNet), precision="bf16-true")


def test_double_precision_is_fine() -> None:
    module = build(SAMPlainNet)
    fit(module, precision="64-true", max_epochs=1)
    assert module.layers[0].weight.dtype == torch.float64


def test_weights_chosen_in_configure_model_are_found() -> None:
    class Late(SAMPlainNet):
        sam = lt.SAM(parameters="late")

        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                self.late = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.late(x))

    fit(build(Late), max_epochs=1)


# ---- what is left behind


class Fails(SAMPlainNet):
    """Raises in the second run of its first step."""

    error: BaseException | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if is_replaying() and self.error is not None:
            raise self.error
        self.noted = batch_idx
        return super().training_step(batch, batch_idx)


def assert_left_alone(run: Any, module: Any) -> None:
    assert "training_step" not in vars(run.strategy)
    assert "save_checkpoint" not in vars(run)
    assert module._sam is None
    assert not is_replaying()


@pytest.mark.parametrize("kind", [SAMPlainNet, Manual])
def test_nothing_is_left_behind_after_a_fit(kind: type[PlainNet]) -> None:
    module = build(kind)
    assert_left_alone(fit(module, max_epochs=1), module)


@pytest.mark.parametrize("error", [RuntimeError("planned"), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_nothing_is_left_behind_after_an_exception(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    run, module, start = trainer(), build(Fails), weights(build(Fails))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Lightning would ignore Ctrl-C from then on
    module.error = error
    with pytest.raises((RuntimeError, SystemExit)):
        run.fit(module, loader(), loader(24))
    assert_left_alone(run, module)
    assert_equal(weights(module), start)
    assert module.noted == 0  # by the first run
    module.error = None
    fit(module, max_epochs=1)  # and trains on


def test_a_module_can_be_copied_in_a_step_and_trains_on() -> None:
    class Copies(SAMPlainNet):
        twins: tuple[Any, ...] = ()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                type(self).twins = (copy.deepcopy(self), *self.twins)  # also in the second run
            return super().training_step(batch, batch_idx)

    module = build(Copies)
    fit(module, max_epochs=1)
    assert len(module.twins) == 2
    for twin in module.twins:
        assert twin._sam is None
        fit(twin, max_epochs=1)


def test_other_stages_need_no_sam() -> None:
    module = build(SAMPlainNet)
    module.sam = lt.SAM(parameters="nothing")
    run = trainer()
    run.validate(module, loader(24), verbose=False)
    run.test(module, loader(24), verbose=False)
    assert len(run.predict(module, loader(24))) == 3
    assert_left_alone(run, module)
