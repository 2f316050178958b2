"""Tricks that change how layers compute, or what layers there are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.clients.base import (
    Base,
    Seeded,
    State,
    Validated,
    assert_equal,
    assert_gradients,
    assert_same,
    parameters,
    trick,
)
from tests.clients.recast import stepping


class OfNetworks(Base):
    @trick("LoRA")
    def test_lora(self) -> None:
        """Only adapters train, the first time by the gradient of their layers: that of B is ``scale * G @ A.T``."""
        self.refuses(self.lt.LoRA(self.adapted, r=2))
        run = self.fit(self.lt.LoRA(self.adapted, r=2), Seeded(), **self.double)
        plain = self.fit(Seeded(), max_steps=1, **self.double).watch
        base = {original(name): w for name, w in parameters(run.module).items() if "lora_" not in name}
        assert_equal(base, plain.start)
        assert all("lora_" in name for gradients in run.watch.gradients for name in gradients)
        found, expected = dict[str, Tensor](), dict[str, Tensor]()
        for name, gradient in run.watch.gradients[0].items():
            if ".lora_B." in name:
                a = run.watch.start[name.replace(".lora_B.", ".lora_A.")].flatten(1)
                g = plain.gradients[0].get(name.partition(".lora_B.")[0] + ".weight")
                found[name] = gradient.flatten(1)
                expected[name] = torch.zeros_like(found[name]) if g is None else 2 * self.outwards(g) @ a.T
            else:
                assert not gradient.any(), "B is zero at first"
        assert_gradients(found, expected)

    def outwards(self, gradient: Tensor) -> Tensor:
        """The gradient of a layer's weight, (out, in)."""
        return gradient.flatten(1)

    @trick("merge_adapters")
    def test_merge_adapters(self) -> None:
        """Merged weights load strictly into the class as it was, and have the loss of the adapted ones."""
        self.refuses(self.lt.LoRA(self.adapted, r=2))
        run = self.fit(self.lt.LoRA(self.adapted, r=2), **self.double)
        merged = self.lt.merge_adapters(run.module)
        bare = self.fit(max_steps=1, **self.double).module
        before = self.validated(run, bare)
        bare.load_state_dict(merged, strict=True)
        assert not any("lora_" in name for name in bare.state_dict())
        adapted = self.validated(run, run.module)
        assert self.validated(run, bare) == pytest.approx(adapted, rel=1e-5)
        assert before != pytest.approx(adapted, rel=1e-5), "the adapters do nothing"

    @trick("QAT")
    def test_qat(self) -> None:
        """The gradient is that of the project's own step with the weights that ``quantize`` makes."""
        self.refuses(self.lt.QAT())

        def rounded(layer: Any, given: Any, output: Tensor) -> Tensor:
            twin = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")  # draws nothing
            twin.weight = nn.Parameter(layer.weight.detach().clone())
            weight: Any = self.lt.quantize(twin).weight
            return F.linear(given[0], layer.weight + (weight.dequantize() - layer.weight).detach(), layer.bias)

        def step(module: Any, plain: Any, batch: Any, number: int) -> Tensor:
            layers = [layer for layer in module.modules() if type(layer) is nn.Linear and layer.in_features > 1]
            handles = [layer.register_forward_hook(rounded) for layer in layers]
            loss = plain(batch)
            for handle in handles:
                handle.remove()
            return loss

        own = self.fit(self.lt.QAT(), max_steps=1).watch
        naive = self.fit(kind=stepping(step), max_steps=1).watch
        assert_gradients(own.gradients[0], naive.gradients[0])
        assert own.losses[0] == pytest.approx(naive.losses[0], rel=1e-5)
        assert own.losses[0] != pytest.approx(self.plain().watch.losses[0], rel=1e-7), "nothing is rounded"
        self.assert_plain(self.fit(self.lt.QAT(start=10**6)))

    @trick("quantize")
    def test_quantize(self) -> None:
        """The network that it makes has the loss that was validated in the fit."""
        self.refuses(self.lt.QAT())
        seen = Validated(self.monitor)
        run = self.fit(self.lt.QAT(), seen)
        plain = self.validated(run, run.module)
        self.lt.quantize(run.module)
        assert self.validated(run, run.module) == pytest.approx(seen.losses[-1], rel=1e-4)
        assert plain != pytest.approx(seen.losses[-1], rel=1e-7), "nothing is rounded"

    @trick("Float8(emulate=True)")
    def test_float8(self) -> None:
        """Bit for bit what torchao's own conversion trains."""
        self.refuses(self.lt.Float8(emulate=True))

        class Converted(Callback):
            def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
                from torchao.float8 import Float8LinearConfig, convert_to_float8_training

                convert_to_float8_training(
                    pl_module,
                    module_filter_fn=lambda layer, name: layer.in_features % 16 == layer.out_features % 16 == 0,
                    config=replace(Float8LinearConfig(), emulate=True, pad_inner_dim=True),
                )

        run = self.fit(self.lt.Float8(emulate=True))
        assert_same(run, self.fit(Converted()))
        first, plain = run.watch.weights[0], self.plain().watch.weights[0]
        assert any(not torch.equal(first[name], plain[name]) for name in first), "nothing is rounded"

    @trick("LeanLoss")
    def test_lean_loss(self) -> None:
        """Losses and trained weights are those with logits, but for rounding."""
        if not self.logits and self.name not in self.refused:
            pytest.skip("none: no layer whose outputs are the logits of classes")
        lean = self.lt.LeanLoss(self.logits)
        self.refuses(lean)
        own, plain = self.fit(lean, **self.double).watch, self.fit(**self.double).watch
        assert own.losses == pytest.approx(plain.losses, rel=1e-5)
        moves = [{name: w - watch.start[name] for name, w in watch.weights[-1].items()} for watch in (own, plain)]
        assert_gradients(*moves, tolerance=1e-3)

    @trick("ActivationCheckpointing")
    def test_activation_checkpointing(self) -> None:
        callback = self.lt.ActivationCheckpointing(self.blocks)
        self.refuses(callback)
        self.assert_plain(self.fit(callback))

    @trick("ChannelsLast")
    def test_channels_last(self) -> None:
        if not self.images:
            pytest.skip("none: the inputs are no images")
        self.refuses(self.lt.ChannelsLast())
        layouts: list[bool] = []

        class Layouts(Callback):
            def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                weights = [layer.weight for layer in pl_module.modules() if isinstance(layer, nn.Conv2d)]
                layouts.append(all(w.is_contiguous(memory_format=torch.channels_last) for w in weights))

        run = self.fit(self.lt.ChannelsLast(), Layouts(), **self.double)
        plain = self.fit(**self.double).watch
        assert layouts
        assert all(layouts)
        assert_gradients(run.watch.gradients[0], plain.gradients[0])
        assert run.watch.losses == pytest.approx(plain.losses, rel=1e-3)
        assert all(tensor.is_contiguous() for tensor in run.end().values())

    @trick("add_blur_pool")
    def test_add_blur_pool(self) -> None:
        """timm's layer in front of each strided convolution, and behind each pooling without its stride."""
        self._changes(lambda module: self.lt.add_blur_pool(module), self.blurred)

    def blurred(self, module: Any) -> None:
        from timm.layers import BlurPool2d

        for layer in list(module.modules()):
            stride = max(layer.stride) if isinstance(layer, nn.Conv2d) else getattr(layer, "stride", 1)
            if isinstance(layer, nn.Conv2d) and stride > 1 and layer.in_channels >= 16:
                blur = BlurPool2d(layer.in_channels, stride=1)
                layer.register_forward_pre_hook(lambda _, given, blur=blur: blur.to(given[0])(given[0]))
            elif isinstance(layer, nn.MaxPool2d) and stride > 1:
                layer.stride = 1
                layer.register_forward_hook(lambda _, given, y, s=stride: BlurPool2d(y.shape[1], stride=s).to(y)(y))

    @trick("add_squeeze_excite")
    def test_add_squeeze_excite(self) -> None:
        """The channels of each block times the formula, with the weights that it was given."""
        made: dict[str, State] = {}

        def add(module: Any) -> None:
            for name in self.lt.add_squeeze_excite(module):
                made[name] = copy.deepcopy(module.get_submodule(name).squeeze_excite.state_dict())

        def by_hand(module: Any) -> None:
            for name, state in made.items():

                def excite(_: Any, given: Any, y: Tensor, state: State = state) -> Tensor:
                    w1, b1, w2, b2 = (state[key].to(y) for key in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"))
                    hidden = (y.mean((2, 3)) @ w1[:, :, 0, 0].T + b1).relu()
                    return y * (hidden @ w2[:, :, 0, 0].T + b2).sigmoid()[:, :, None, None]

                module.get_submodule(name).register_forward_hook(excite)

        self._changes(add, by_hand)
        blocks = [part for part in self.module().modules() if type(part).__name__ in ("BasicBlock", "Bottleneck")]
        assert len(made) == len(blocks)

    def _changes(self, change: Callable[[Any], Any], by_hand: Callable[[Any], Any]) -> None:
        """The first loss and gradient are those of a network that was changed by hand, and not the plain gradient."""
        if not self.images:
            pytest.skip("none: the inputs are no images")
        self.refuses(change=change)
        own = self.fit(Seeded(), change=change, max_steps=1, **self.double).watch
        naive = self.fit(Seeded(), change=by_hand, max_steps=1, **self.double).watch
        plain = self.fit(Seeded(), max_steps=1, **self.double).watch
        assert own.losses[0] == pytest.approx(naive.losses[0], rel=1e-6)
        theirs = {name: own.gradients[0][name] for name in naive.gradients[0]}
        assert_gradients(theirs, naive.gradients[0])
        with pytest.raises(AssertionError, match="of their length apart"):
            assert_gradients(theirs, plain.gradients[0])


def original(name: str) -> str:
    """The name of a weight before its layer had an adapter."""
    return name.replace(".base_layer.", ".")
