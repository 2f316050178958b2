"""Manual optimization: a module that steps by itself trains, with a trick, what automatic optimization trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

import lightning_tricks as lt
from tests.conformance.runs import fitted, refusal, run
from tests.conformance.settings import SETTINGS, every_third
from tests.conformance.trick import Enrolment, public_name
from tests.nets import NormNet, PlainNet, assert_equal, build, fit, weights

STEPS = 12  # of two epochs


class ManualNet(PlainNet):
    """Steps after each batch, or lets SAM do it, and steps the schedule."""

    factory: Any = None  # of a schedule

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return optimizer if self.factory is None else self.factory(optimizer, **self.length())

    def length(self) -> dict[str, Any]:
        """A module that steps by itself tells a curve how often; what is no curve gets the module."""
        name = getattr(self.factory, "func", self.factory).__name__
        needs_none = ("reduce_on_plateau", "schedule_free", "lookahead")
        return {"module": self} if name in needs_none else {"total_steps": STEPS}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = partial(super().training_step, batch, batch_idx)
        if isinstance(self, lt.SAMMixin):
            self.sam_step(loss)
            return
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss())
        optimizer.step()
        if isinstance(schedule, lt.schedules.CurveLR):
            schedule.step()

    def on_validation_epoch_end(self) -> None:
        schedule = self.lr_schedulers() if self.factory else None
        if isinstance(schedule, lt.schedules.PlateauLR):
            schedule.step(self.trainer.callback_metrics["val_loss"])


def by_hand(trick: Enrolment, base: type[ManualNet] = ManualNet) -> dict[str, Tensor]:
    """The end weights of a fit with the trick in a module that steps by itself."""
    net = trick.plain(base)
    body = {"factory": staticmethod(trick.schedule["on"])} if trick.schedule else trick.spoils()
    if trick.sam:
        net, body = type(net)("Sharp", (lt.SAMMixin, net), {}), {"sam": trick.sam["on"]}
    return weights(fitted(type(net)("Net", (net,), body), callbacks=trick.make_callbacks("on")))


@pytest.mark.few(4)
@pytest.mark.parametrize("name", every_third(1))
def test_steps_by_hand_give_the_same(name: str, cell: Callable[..., None]) -> None:
    trick = SETTINGS[name]
    if "manual" in trick.refused:
        message = refusal(trick, base=ManualNet)
        assert public_name(name) in message
        assert "automatic_optimization" in message
        cell(name, "manual", "refused", message)
        return
    assert_equal(by_hand(trick), run(trick, base=PlainNet))
    cell(name, "manual")


CURVES = [name for name, trick in SETTINGS.items() if trick.schedule and not trick.callbacks]
ENDLESS = {"constant", "inverse_sqrt", "reduce_on_plateau", 'optimizer("lookahead_sgd")'}  # which need no length


@pytest.mark.parametrize("name", [name for name in CURVES if name not in ENDLESS])
def test_a_curve_asks_for_its_length(name: str) -> None:
    module = build(ManualNet)
    module.configure_optimizers = lambda: SETTINGS[name].schedule["on"](PlainNet.configure_optimizers(module), module)
    with pytest.raises(lt.UnknownTotalSteps, match="automatic_optimization=False"):
        fit(module)


def test_statistics_cannot_be_taken_by_a_step_that_steps() -> None:
    class ManualNormNet(ManualNet):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__(lr)
            self.layers = NormNet().layers

    assert "recalibrate_batchnorm=False" in refusal(SETTINGS["SWA"], base=ManualNormNet)
