"""Steps by hand that sam_step and sam_backward take themselves are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, LambdaLR, StepLR

import lightning_tricks as lt
from tests.batches import refused, with_sam
from tests.nets import PlainNet, SteppedByHand, assert_equal, build, fit, weights


def halved(steps: int) -> float:
    return 0.5**steps


class ByHand(lt.SAMMixin, PlainNet):
    """Manual optimization with a schedule; ``misuse`` is what its training step does besides."""

    sam = lt.SAM(0.1)
    automatic_optimization = False
    interval, misuse, method = "step", "", "sam_step"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": LambdaLR(optimizer, halved), "interval": self.interval}]

    def closure(self, batch: Any) -> Tensor:
        optimizer, loss = self.optimizers(), PlainNet.training_step(self, batch, 0)
        if self.misuse == "manual_backward":
            optimizer.zero_grad()
            self.manual_backward(loss)
        if self.misuse == "backward":
            loss.backward(retain_graph=True)
        if self.misuse == "step":
            optimizer.step()
        if self.misuse == "bare step":
            optimizer.optimizer.step()
        if self.misuse == "zero_grad":
            optimizer.zero_grad()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.misuse == "schedule before":
            self.lr_schedulers().step()
        if self.method == "sam_step":
            self.sam_step(partial(self.closure, batch))
        else:
            self.optimizers().zero_grad()
            self.sam_backward(partial(self.closure, batch))
            self.optimizers().step()
        last = self.misuse == "schedule after the last step" and self.global_step == 12
        if last or self.misuse == "schedule after":
            self.lr_schedulers().step()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.misuse == "schedule at the batch's end":
            self.lr_schedulers().step()

    def on_train_epoch_end(self) -> None:
        if self.misuse == "schedule at epoch's end":
            self.lr_schedulers().step()


def by_hand(**attributes: Any) -> ByHand:
    module = build(ByHand)
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize("method", ["sam_step", "sam_backward"])
@pytest.mark.parametrize(
    ("misuse", "rule"),
    [
        ("manual_backward", "calls manual_backward, which {} does"),
        ("backward", "calls backward, which {} does"),
        ("step", "steps SGD, which comes after it"),
        ("bare step", "steps SGD, which comes after it"),
    ],
)
def test_a_closure_that_does_more_is_refused_with_the_right_lines(method: str, misuse: str, rule: str) -> None:
    module = by_hand(misuse=misuse, method=method)
    before = weights(module)
    with pytest.raises(MisconfigurationException) as caught:
        fit(module)
    said = str(caught.value)
    assert said.startswith(f"ByHand: the closure of {method} {rule.format(method)}. Write it so:")
    assert f"loss = self.{method}(" in said
    assert len(re.findall(r"^    .*\S$", said, re.MULTILINE)) == 6
    assert_equal(weights(module), before)


@pytest.mark.parametrize(
    ("misuse", "interval", "steps"),
    [
        ("schedule before", "step", 0),
        ("schedule before", "epoch", 0),
        ("schedule after", "step", 1),
        ("schedule after", "epoch", 1),
        ("schedule at the batch's end", "step", 1),
        ("schedule after the last step", "step", 12),
        ("schedule at epoch's end", "epoch", 6),
    ],
)
def test_a_schedule_stepped_by_hand_beside_sam_step_is_refused_before_the_next_step(
    misuse: str, interval: str, steps: int
) -> None:
    module = by_hand(misuse=misuse, interval=interval)
    with pytest.raises(MisconfigurationException, match="LambdaLR is stepped by hand beside sam_step, which steps it"):
        fit(module)
    assert module.trainer.global_step == steps


@pytest.mark.parametrize("settings", [{}, {"interval": "epoch"}, {"misuse": "zero_grad"}])
def test_the_right_way_is_not_refused(settings: dict[str, Any]) -> None:
    module = by_hand(**settings)
    run = fit(module)
    steps = {"step": 12, "epoch": 2}[module.interval]
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * halved(steps)


def test_schedules_by_hand_are_right_beside_sam_backward_and_in_epochs_without_sam() -> None:
    run = fit(by_hand(method="sam_backward", misuse="schedule after"))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * halved(12)

    class Later(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            if self.current_epoch > 0:
                super().training_step(batch, batch_idx)
            else:
                self.optimizers().zero_grad()
                self.manual_backward(PlainNet.training_step(self, batch, batch_idx))
                self.optimizers().step()
                self.lr_schedulers().step()

    run = fit(build(Later))
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1 * halved(12)


def test_a_gradient_penalty_in_the_closure_is_fine() -> None:
    class Penalty(ByHand):
        def closure(self, batch: Any) -> Tensor:
            x = batch[0].detach().requires_grad_()
            loss = PlainNet.training_step(self, (x, batch[1]), 0)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.square().sum()

    fit(build(Penalty))


# ---- steps and gradients beside sam_step


class Mixes(lt.SAMMixin, PlainNet):
    """Manual optimization by the lines that a test gives."""

    sam = lt.SAM(0.1)
    automatic_optimization = False
    lines: Any = None

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        assert callable(self.sam_step)  # what a class names it may call later
        type(self).lines(self, self.optimizers(), lambda: self.loss(batch), batch_idx)


def mixing(lines: Any) -> Any:
    return build(type("Mixes", (Mixes,), {"lines": staticmethod(lines)}))


MIXED = "sam_backward and sam_step before one optimizer step add both gradients"
STEPPED = "SGD is stepped by hand after sam_step, which has stepped it"
CLEARED = "the gradients that sam_step accumulates for SGD are cleared"


@pytest.mark.parametrize(
    ("lines", "rule", "steps"),
    [
        (lambda m, opt, c, i: (m.sam_backward(c), m.sam_step(c)), MIXED, 0),
        (lambda m, opt, c, i: m.sam_step(c, accumulate=3) if i == 0 else m.sam_backward(c), MIXED, 0),
        (lambda m, opt, c, i: (m.sam_step(c), opt.step()), STEPPED, 1),
        (lambda m, opt, c, i: (m.sam_step(c), opt.optimizer.step()), STEPPED, 1),
        (lambda m, opt, c, i: (m.sam_step(c), opt.step(closure=lambda: c())), STEPPED, 1),
        (
            lambda m, opt, c, i: (m.sam_step(c, accumulate=2), opt.step()),
            "SGD is stepped by hand while sam_step accumulates for it",
            0,
        ),
        (lambda m, opt, c, i: (opt.zero_grad(), m.sam_step(c, accumulate=2)), CLEARED, 0),
        (lambda m, opt, c, i: m.sam_step(lambda: (opt.zero_grad(), c())[1], accumulate=2), CLEARED, 0),
    ],
    ids=["both", "window", "step", "bare step", "by closure", "in a window", "clears", "clears inside"],
)
def test_gradients_and_steps_beside_sam_step_are_refused_with_the_right_lines(
    lines: Any, rule: str, steps: int
) -> None:
    module, once = mixing(lines), mixing(lambda m, opt, c, i: m.sam_step(c))
    if steps:
        fit(once, max_steps=steps)
    with pytest.raises(MisconfigurationException, match=f"^Mixes: {rule}.*Write it so:"):
        fit(module)
    assert_equal(weights(module), weights(once))


def accumulates(m: Any, opt: Any, closure: Any, i: int) -> None:
    m.sam_backward(lambda: closure() / 2)
    if i % 2:
        opt.step()
        opt.zero_grad()


def by_turns(m: Any, opt: Any, closure: Any, i: int, clears: bool = True) -> None:
    if i % 2:
        m.sam_step(closure)
    else:
        opt.zero_grad()
        m.manual_backward(closure()) if i % 4 else m.sam_backward(closure)
        opt.step()
        if clears:
            opt.zero_grad()


def then_plain(m: Any, opt: Any, closure: Any, i: int) -> None:
    m.sam_step(closure)
    m.manual_backward(closure())
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize(("lines", "steps"), [(accumulates, 6), (by_turns, 12), (then_plain, 24)])
def test_right_lines_beside_sam_step_are_not_refused(lines: Any, steps: int) -> None:
    assert fit(mixing(lines)).global_step == steps


def test_a_validation_inside_of_a_window_keeps_what_is_accumulated() -> None:
    one, other = (mixing(lambda m, opt, c, i: m.sam_step(c, accumulate=3)) for _ in range(2))
    fit(one), fit(other, val_check_interval=2)
    assert_equal(weights(other), weights(one))


def test_sam_step_does_not_add_to_the_gradient_of_a_step_by_hand() -> None:
    clears, leaves = mixing(by_turns), mixing(partial(by_turns, clears=False))
    fit(clears), fit(leaves)
    assert_equal(weights(leaves), weights(clears))


def test_sam_step_adds_to_a_gradient_that_was_not_stepped() -> None:
    def adds(m: Any, opt: Any, closure: Any, i: int, clears: bool = True) -> None:
        opt.zero_grad()
        m.manual_backward(closure())
        opt.step()
        opt.zero_grad(set_to_none=clears)
        m.manual_backward(closure())
        m.sam_step(closure)

    one, other = mixing(adds), mixing(partial(adds, clears=False))
    fit(one), fit(other)
    assert_equal(weights(one), weights(other))


class Manual(SteppedByHand, PlainNet):
    """Optimizes by hand, and never calls SAM."""


class Bare(Manual):
    """By the optimizer itself, without Lightning's wrapper."""

    def optimizers(self, use_pl_optimizer: bool = False) -> Any:
        return super().optimizers(use_pl_optimizer)


@pytest.mark.parametrize("kind", [Manual, Bare])
def test_manual_optimization_without_sam_is_refused_before_the_first_optimizer_step(kind: type[PlainNet]) -> None:
    refused(with_sam(kind, rho=0.1), rf"Sharp{kind.__name__} .* never called self\.sam_backward", [])


@pytest.mark.parametrize("method", ["sam_step", "sam_backward"])
def test_a_loss_in_place_of_a_function_is_refused_with_the_lines_that_are_right(method: str) -> None:
    class Loss(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            getattr(self, method)(PlainNet.training_step(self, batch, 0))

    module = build(Loss)
    with pytest.raises(TypeError, match=rf"(?s){method} needs a function .*, got Tensor: .*Write it so:.*{method}\("):
        fit(module)


class LBFGS(ByHand):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            return self.sam_backward(partial(self.closure, batch))

        if self.method == "sam_step":
            self.sam_step(partial(self.closure, batch))
        else:
            optimizer.step(closure)


def test_lbfgs_is_refused_by_sam_step_and_right_by_sam_backward() -> None:
    module = build(LBFGS)
    with pytest.raises(MisconfigurationException, match=r"(?s)LBFGS: sam_step steps once.*optimizer\.step\(closure\)"):
        fit(module)
    module.method = "sam_backward"
    before = weights(module)
    fit(module)
    assert not torch.equal(before["layers.0.weight"], module.layers[0].weight)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("automatic", [True, False])
def test_an_optimizer_that_lightning_does_not_know_is_refused(automatic: bool) -> None:
    class Own(lt.SAMMixin, PlainNet):
        automatic_optimization = automatic

        def configure_optimizers(self) -> None:
            self.mine = super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = partial(PlainNet.training_step, self, batch, batch_idx)
            return loss() if automatic else self.sam_backward(loss)

        def on_before_zero_grad(self, *_: Any) -> None:
            self.mine.step()

    module = build(Own)
    with pytest.raises(
        MisconfigurationException, match="SAM perturbs the weights that Own's optimizer trains, and fou"
    ):
        fit(module)


def test_a_loss_of_other_weights_is_refused() -> None:
    class Parts(ByHand):
        def configure_optimizers(self) -> Any:
            self.first, self.last = (torch.optim.SGD(self.layers[i].parameters(), 0.1) for i in (0, 2))
            return self.first, self.last

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.sam_step(lambda: self.layers[0](batch[0]).square().mean(), self.optimizers()[1])

    with pytest.raises(MisconfigurationException, match="The loss of Parts depends on no weight that SAM perturbs"):
        fit(build(Parts))


class Stepping(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.1)
    automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.sam_step(lambda: self.loss(batch))


class InADictionary(Stepping):
    def loss(self, batch: Any) -> Any:
        return {"loss": super().loss(batch)}


class Adversarial(Stepping):
    """An optimizer of its own finds the input."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        moved = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([moved], lr=0.1)
        (moved.grad,) = torch.autograd.grad(-F.cross_entropy(self(x + moved), y), [moved])
        inner.step()
        return F.cross_entropy(self(x + moved.detach()), y)


class Chained(Stepping):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        chained = ChainedScheduler([StepLR(optimizer, 1), ExponentialLR(optimizer, 0.9)], optimizer=optimizer)
        return [optimizer], [{"scheduler": chained, "interval": "step"}]


def helped(module: Any, batch: Any) -> None:
    module.sam_step(lambda: module.loss(batch))


def decorated(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def around(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    return around


class PlainAtFirst(Stepping):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            return helped(self, batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()


class Decorated(PlainAtFirst):
    @decorated
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            self.sam_step(lambda: self.loss(batch))
        else:
            PlainAtFirst.training_step(self, batch, batch_idx)


class Helper:
    def __call__(self, module: Any, batch: Any) -> None:
        module.sam_step(lambda: module.loss(batch))


class HoldsAHelper(lt.SAMMixin, PlainNet):
    sam = lt.SAM(0.1)
    automatic_optimization = False

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.helper = Helper()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch > 0:
            return self.helper(self, batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()

    def loss(self, batch: Any) -> Tensor:
        return PlainNet.training_step(self, batch, 0)


@pytest.mark.parametrize("kind", [InADictionary, Adversarial, Chained, PlainAtFirst, Decorated, HoldsAHelper])
def test_right_steps_by_hand_are_not_refused(kind: type[PlainNet]) -> None:
    run = fit(build(kind))
    assert run.global_step == 12


class Outside(Stepping):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.sam_step(lambda: loss)


def test_a_loss_from_outside_of_the_closure_is_refused_with_the_right_lines() -> None:
    message = "the closure of sam_step uses tensors of a forward pass outside of it. Write it so"
    module = build(Outside)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module)
    assert module.trainer.global_step == 0
