"""Tricks that change how weights are trained: averages, optimizers, clips, what is frozen."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_tricks.optimizers.by_name import is_matrix
from tests.clients.base import (
    Base,
    Kind,
    State,
    Watch,
    Weights,
    assert_equal,
    assert_gradients,
    assert_same,
    parameters,
    trick,
)
from tests.clients.recast import naive_sam
from tests.reference.averages import NaiveEMA
from tests.reference.swa import NaiveSWA

RATE = 1e-4


class OfWeights(Base):
    @trick("EMA")
    def test_ema(self) -> None:
        self.refuses(self.lt.EMA(0.9))
        naive = NaiveEMA(0.9)
        run = self.fit(self.lt.EMA(0.9, warmup=False), naive)
        naive.assert_equals(run.module.state_dict())
        assert_equal(run.watch.weights[-1], self.plain().watch.weights[-1])
        self.assert_plain(self.fit(self.lt.EMA(0)))

    @trick("SWA")
    def test_swa(self) -> None:
        average = self.lt.SWA(start=1, every_n_steps=1, recalibrate_batchnorm=False)
        self.refuses(average)
        naive = NaiveSWA(1, 1)
        run = self.fit(average, naive)
        naive.assert_equals(run.module.state_dict())
        assert_equal(run.watch.weights[-1], self.plain().watch.weights[-1])

    @trick("SAMCallback")
    def test_sam_callback(self) -> None:
        self.refuses(self.lt.SAMCallback(0.05))
        self._ascends(self.fit(self.lt.SAMCallback(0.05), **self.double).watch)
        self.assert_plain(self.fit(self.lt.SAMCallback(0.0)))

    @trick("SAMMixin")
    def test_sam_mixin(self) -> None:
        self.refuses(kind=self.sam(0.05))
        self._ascends(self.fit(kind=self.sam(0.05), **self.double).watch)
        self.assert_plain(self.fit(kind=self.sam(0.0)))

    def sam(self, rho: float) -> Any:
        """The module with the mixin."""
        lt = self.lt

        def of(kind: Kind) -> Kind:
            return type(f"SAM{kind.__name__}", (lt.SAMMixin, kind), {"sam": lt.SAM(rho)})

        return of

    def _ascends(self, sharp: Weights) -> None:
        losses: list[float] = []
        naive = self.fit(kind=naive_sam(0.05, losses), **self.double).watch
        assert_gradients(sharp.gradients[0], naive.gradients[0])
        assert sharp.losses[:3] == pytest.approx(losses[:3], rel=1e-3, abs=1e-5)

    @trick("ScheduleFree")
    def test_schedule_free(self) -> None:
        """Its formula from the gradients: z descends, x is its mean and is validated, y between both is trained."""

        def make(module: Any, pattern: str) -> Any:
            return self.lt.optimizer("schedulefree_sgd", module, RATE, parameters=pattern)

        validated: list[State] = []

        class Seen(Callback):
            def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
                validated.append(parameters(pl_module))

        self.refuses(self.lt.ScheduleFree(), kind=self.optimizing(make))
        run = self.fit(self.lt.ScheduleFree(), Seen(), kind=self.optimizing(make))
        z, x = ({name: w.double().clone() for name, w in run.watch.start.items()} for _ in range(2))
        for step, (gradients, trained) in enumerate(zip(run.watch.gradients, run.watch.weights, strict=True), 1):
            for name, gradient in gradients.items():
                z[name] -= RATE * gradient.double()
                x[name] += (z[name] - x[name]) / step
            y = {name: 0.9 * x[name] + 0.1 * z[name] for name in x}
            torch.testing.assert_close(trained, y, rtol=1e-5, atol=1e-6, check_dtype=False)
        end = {name: run.end()[name] for name in x}
        torch.testing.assert_close(end, x, rtol=1e-5, atol=1e-6, check_dtype=False)
        assert_equal(validated[-1], end)
        assert any((x[name] - y[name]).norm() > 1e-3 * (x[name] - run.watch.start[name]).norm() > 0 for name in x)

    @trick('optimizer("lion")')
    def test_lion(self) -> None:
        """timm's own, made by hand with weight decay on matrices alone."""

        def make(module: Any, pattern: str) -> Any:
            return self.lt.optimizer("lion", module, RATE, weight_decay=0.1, parameters=pattern)

        def by_hand(module: Any, pattern: str) -> Any:
            from timm.optim import Lion

            decays = {name: p for name, p in selected(module, pattern).items() if self.decays(module, name, p)}
            others = [p for name, p in selected(module, pattern).items() if name not in decays]
            groups = [{"params": [*decays.values()], "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            return Lion(groups, lr=RATE)

        self._optimizes(make, by_hand)

    @trick('optimizer("muon")')
    def test_muon(self) -> None:
        """timm's own, made by hand with the matrices between embeddings and the last layer."""

        def make(module: Any, pattern: str) -> Any:
            return self.lt.optimizer("muon", module, RATE, parameters=pattern)

        def by_hand(module: Any, pattern: str) -> Any:
            from timm.optim import Muon

            weights, inner = selected(module, pattern), self.hidden(module)
            hidden = [p for name, p in weights.items() if name in inner and is_matrix(p)]
            others = [p for p in weights.values() if all(p is not each for each in hidden)]
            first = {"params": hidden, "nesterov": True}
            return Muon([first, {"params": others, "use_fallback": True}], lr=RATE)

        self._optimizes(make, by_hand)

    def _optimizes(self, make: Any, by_hand: Any) -> None:
        self.refuses(kind=self.optimizing(make))
        assert_same(self.fit(kind=self.optimizing(make)), self.fit(kind=self.optimizing(by_hand)))

    def decays(self, module: Any, name: str, weight: Tensor) -> bool:
        """Whether a weight has weight decay: it is no bias, no norm's, no embedding, and the model says nothing."""
        tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
        bare = weight.ndim < 2 or name.endswith("bias") or any(weight is table for table in tables)
        return not bare and not re.search(self.exempt, name)

    def hidden(self, module: Any) -> list[str]:
        """The names of the matrices of layers, without embeddings and the last layer."""
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.RNNBase)
        tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
        layers = {
            path: part
            for path, part in module.named_modules()
            if isinstance(part, kinds) or type(part).__name__ == "Conv1D"
        }
        output = self.output or f"^{re.escape([*layers][-1])}$"
        return [
            f"{path}.{name}"
            for path, part in layers.items()
            for name, p in part.named_parameters(recurse=False)
            if not re.search(output, path) and p.ndim > 1 and not any(p is table for table in tables)
        ]

    @trick("LRSchedule")
    def test_lr_schedule(self) -> None:
        """Refused beside the schedule of a project, unless it is to take its place."""
        self.refuses(self.lt.LRSchedule("cosine"))
        if self.schedule:
            with pytest.raises(
                Exception, match=f"{self.schedule} from configure_optimizers: both set the learning rate"
            ):
                self.fit(self.lt.LRSchedule("cosine"))
        run = self.fit(self.lt.LRSchedule("cosine", replace=bool(self.schedule)))
        rates, base = run.watch.rates, run.trainer.optimizers[0].defaults["lr"]
        assert rates == pytest.approx([base * (1 + math.cos(math.pi * t / len(rates))) / 2 for t in range(len(rates))])
        constant = self.fit(self.lt.LRSchedule("constant", replace=bool(self.schedule)))
        assert constant.watch.rates == pytest.approx([base] * len(rates))
        if not self.schedule:
            self.assert_plain(constant)

    @trick("AutoClip")
    def test_auto_clip(self) -> None:
        """At the percentile 0 every gradient is clipped to the smallest norm that its optimizer has seen."""
        self.refuses(self.lt.AutoClip(100))
        before = Watch()
        after = self.fit(before, self.lt.AutoClip(0)).watch
        norms = [norm(each) for each in before.gradients]
        smallest = [min(norms[number % self.steps : number + 1 : self.steps]) for number in range(len(norms))]
        assert [norm(each) for each in after.gradients] == pytest.approx(smallest, rel=1e-3)
        self.assert_plain(self.fit(self.lt.AutoClip(100)))

    @trick("AdaptiveClip")
    def test_adaptive_clip(self) -> None:
        """No tensor's gradient is longer than the share of its weight: what holds for its units holds for all of it."""
        self.refuses(self.lt.AdaptiveClip(1e30))
        before = Watch()
        run = self.fit(before, self.lt.AdaptiveClip(1e-3), max_steps=1)
        for name, gradient in run.watch.gradients[0].items():
            unclipped, weight = before.gradients[0][name], run.watch.start[name]
            assert torch.equal(gradient, unclipped) or gradient.norm() <= unclipped.norm()
            limit = 1e-3 * torch.maximum(weight.norm(), torch.tensor(1e-3 * weight.numel() ** 0.5))
            assert gradient.norm() <= limit * 1.001, name
        self.assert_plain(self.fit(self.lt.AdaptiveClip(1e30)))

    @trick("GradualUnfreeze")
    def test_gradual_unfreeze(self) -> None:
        """The first trained tensor waits for two batches."""
        first = next(iter(self.plain().watch.gradients[0]))
        pattern = f"^{re.escape(first)}$"
        self.refuses(self.lt.GradualUnfreeze([2 * self.steps], parameters=[pattern]))
        watch = self.fit(self.lt.GradualUnfreeze([2 * self.steps], parameters=[pattern])).watch
        assert torch.equal(watch.weights[1][first], watch.start[first])
        assert not torch.equal(watch.weights[2][first], watch.start[first])
        self.assert_plain(self.fit(self.lt.GradualUnfreeze([0], parameters=[pattern])))

    @trick("LayerFreezing")
    def test_layer_freezing(self) -> None:
        """The first trained tensor stops after two batches, as if it got no gradient; all others go on."""
        first = next(iter(self.plain().watch.gradients[0])) if not self.stem else self.stem
        pattern, stop = f"^{re.escape(first)}$", 2 * self.steps

        class Stops(Callback):
            def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
                if trainer.global_step >= stop:
                    pl_module.get_parameter(first).grad = None

        freezing = self.lt.LayerFreezing(start=stop, stop=stop, parameters=[pattern])
        self.refuses(freezing)
        frozen = self.fit(freezing)
        before, *after = (weights[first] for weights in frozen.watch.weights[1:])
        assert all(torch.equal(weight, before) for weight in after)
        assert not torch.equal(before, frozen.watch.start[first])
        assert_same(frozen, self.fit(Stops()))
        self.assert_plain(self.fit(self.lt.LayerFreezing(0.0, start=0, stop=0, parameters=[pattern])))

    @trick("StepInBackward")
    def test_step_in_backward(self) -> None:
        """Without a callback that looks at gradients, which it refuses."""
        self.refuses(self.lt.StepInBackward())
        self.assert_plain(self.fit(self.lt.StepInBackward(), watch=Weights()))


def selected(module: Any, pattern: str) -> State:
    """The weights of an optimizer."""
    return {name: p for name, p in module.named_parameters() if re.search(pattern, name) and p.requires_grad}


def norm(gradients: State) -> float:
    return float(torch.stack([g.norm() for g in gradients.values()]).norm())
