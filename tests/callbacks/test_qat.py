"""QAT against torchao's own preparation in a plain loop; what is validated is what quantize() makes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from tests.nets import Net, NormNet, PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, trainer
from tests.nets import weights as weights_of
from tests.ranks import run_ranks
from tests.reference.loop import Naive, naive_fit


class NaiveQAT(Naive):
    """Trains a copy whose linear layers torchao has rounded, and hands its gradients on."""

    depth = 2

    def __init__(self, precision: str = "int8", first: int = 0) -> None:
        self.precision, self.first = precision, first

    def descend(self, module: Any, batch: Any, number: int, share: float) -> None:
        from torchao.quantization import IntxWeightOnlyConfig, quantize_

        rounded = copy.deepcopy(module)
        for layer in rounded.layers[self.first :].modules():
            if isinstance(layer, nn.Linear):
                quantize_(layer, IntxWeightOnlyConfig(getattr(torch, self.precision)))
                layer.weight = nn.Parameter(layer.weight.dequantize())
        rounded.zero_grad()
        super().descend(rounded, batch, number, share)
        for own, other in zip(module.parameters(), rounded.parameters(), strict=True):
            own.grad = other.grad if own.grad is None else own.grad + other.grad
        for own, other in zip(module.buffers(), rounded.buffers(), strict=True):
            own.copy_(other)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_plain_loop_with_torchao_trains_the_same(precision: Any) -> None:
    naive, module = build(PlainNet), build(PlainNet)
    naive_fit(naive, NaiveQAT(precision), list(loader()))
    fit(module, callbacks=[lt.QAT(precision)])
    assert_equal(weights_of(module), weights_of(naive))
    assert type(module.layers[0]) is nn.Linear
    assert "forward" not in vars(module.layers[0])


class Wide(PlainNet):
    """With groups of 32 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


class Attends(PlainNet):
    """With weights that torch reads past their layers, in evaluation and at all times."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.Sequential(nn.Unflatten(1, (1, 8)), block, nn.Flatten(), nn.Linear(8, 2))


class Prescaled(PlainNet):
    """As a TemporalFusionTransformer, which has a linear layer for each variable."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Linear(1, 4), nn.Flatten(), nn.Linear(32, 2))


@pytest.mark.few(4)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", [Wide, NormNet, Attends, Prescaled])
def test_quantize_makes_what_was_validated(kind: type[Net], precision: Any, tmp_path: Path) -> None:
    module = build(kind)
    run = fit(module, callbacks=[lt.QAT(precision)])
    validated = run.callback_metrics["val_loss"]
    plain = trainer().validate(module, loader(24), verbose=False)[0]["val_loss"]
    assert plain != pytest.approx(float(validated), abs=1e-6), "weights are not rounded without the callback"
    beside = trainer(callbacks=[lt.QAT(precision)])
    assert beside.validate(module, loader(24), verbose=False)[0]["val_loss"] == float(validated)
    assert beside.test(module, loader(24), verbose=False)[0]["test_loss"] == float(validated)
    found = torch.cat(beside.predict(module, loader(24)))
    lt.quantize(module, precision)
    assert trainer().validate(module, loader(24), verbose=False)[0]["val_loss"] == pytest.approx(float(validated))
    torch.testing.assert_close(torch.cat(trainer().predict(module, loader(24))), found)


class Rounded(Callback):
    """At which steps the first layer computes with other weights than its own."""

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        layer, x = pl_module.layers[0], batch[0]
        with torch.no_grad():
            self.steps.append(not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias)))


@pytest.mark.parametrize(("start", "first"), [(0, 0), (3, 3), (0.5, 6)])
def test_rounding_begins_at_start(start: Any, first: int) -> None:
    seen = Rounded()
    fit(build(PlainNet), callbacks=[lt.QAT("int4", start=start), seen])
    assert seen.steps == [step >= first for step in range(12)]


def test_a_resumed_fit_is_exact_and_its_checkpoint_has_plain_weights(tmp_path: Path) -> None:
    whole, first, resumed = (build(NormNet) for _ in range(3))
    fit(whole, callbacks=[lt.QAT("int4", start=3)])
    fit(first, callbacks=[lt.QAT("int4", start=3)], max_epochs=1).save_checkpoint(path := tmp_path / "half.ckpt")
    fit(resumed, callbacks=[lt.QAT("int4", start=3)], ckpt_path=path)
    assert_equal(weights_of(resumed), weights_of(whole))
    assert_equal(weights_of(NormNet.load_from_checkpoint(path)), weights_of(first))


def test_the_average_is_rounded_where_it_is_validated() -> None:
    module = build(Wide)
    run = fit(module, callbacks=[lt.QAT("int4"), lt.EMA(0.9)])
    lt.quantize(module, "int4")
    found = trainer().validate(module, loader(24), verbose=False)[0]["val_loss"]
    assert found == pytest.approx(float(run.callback_metrics["val_loss"]))


def test_a_failed_fit_leaves_the_layers_as_they_were() -> None:
    class Fails(PlainNet):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("no validation")

    module = build(Fails)
    with pytest.raises(RuntimeError, match="no validation"):
        fit(module, callbacks=[lt.QAT()])
    assert "forward" not in vars(module.layers[0])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="precision must be one of"):
        lt.QAT("int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start"):
        lt.QAT(start=1.5)
    with pytest.raises(MisconfigurationException, match=r"QAT\(.*'nothing' is neither"):
        fit(build(PlainNet), callbacks=[lt.QAT(modules="nothing")])
    with pytest.raises(MisconfigurationException, match=r"QAT\(.*must select nn.Linear layers.*BatchNorm1d"):
        fit(build(NormNet), callbacks=[lt.QAT(modules="BatchNorm1d")])
    with pytest.raises(MisconfigurationException, match=r"QAT\(.*layers\.0\.weight .* torch\.float64: .*precision="):
        fit(build(PlainNet), callbacks=[lt.QAT()], precision="64-true")


def test_a_lazy_layer_is_rounded_once_it_has_sizes() -> None:
    module, plain = build(PlainNet), build(PlainNet)
    module.layers[0], start = nn.LazyLinear(16), copy.deepcopy(plain.layers[0].state_dict())

    def begin(layer: nn.Module, _: Any) -> None:
        layer.load_state_dict(start)
        hook.remove()

    hook = module.layers[0].register_forward_pre_hook(begin)
    fit(module, callbacks=[lt.QAT()]), fit(plain, callbacks=[lt.QAT()])
    assert_equal(weights_of(module), weights_of(plain))


def test_a_lazy_layer_that_has_loaded_its_weights_is_rounded() -> None:
    module, plain = build(PlainNet), build(PlainNet)
    module.layers[0] = nn.LazyLinear(16)
    module.load_state_dict(plain.state_dict())
    fit(module, callbacks=[lt.QAT()]), fit(plain, callbacks=[lt.QAT()])
    assert_equal(weights_of(module), weights_of(plain))


def test_a_lazy_layer_that_gets_one_input_is_left_alone() -> None:
    class Narrow(PlainNet):
        def __init__(self, first: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x[:, :1])

    module, plain = build(lambda: Narrow(nn.LazyLinear(4))), build(lambda: Narrow(nn.Linear(1, 4)))
    start = copy.deepcopy(plain.state_dict())

    def begin(layer: nn.Module, _: Any) -> None:
        module.load_state_dict(start)
        hook.remove()

    hook = module.layers[0].register_forward_pre_hook(begin)
    fit(module, callbacks=[lt.QAT("int4")]), fit(plain, callbacks=[lt.QAT("int4")])
    assert_equal(weights_of(module), weights_of(plain))


def test_layers_that_something_else_has_changed_are_refused() -> None:
    twice = [lt.QAT("int8"), lt.QAT("int4", modules=r"layers\.0")]
    with pytest.raises(MisconfigurationException, match=r"QAT\(.*layers\.0\.forward is another one already"):
        fit(build(PlainNet), callbacks=twice)
    module = build(PlainNet)
    module.layers[0].forward = lambda x: 100 * nn.functional.linear(x, module.layers[0].weight)  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=r"layers\.0\.forward is another one already"):
        trainer(callbacks=[lt.QAT()]).validate(module, loader())
    module = build(PlainNet)
    fit(module, callbacks=[lt.LoRA(r"layers\.0")])
    with pytest.raises(MisconfigurationException, match=r"layers\.0 have adapters.*merge_adapters"):
        fit(module, callbacks=[lt.QAT()])
    with pytest.raises(MisconfigurationException, match="must be a plain tensor"):
        trainer(callbacks=[lt.QAT()]).validate(lt.quantize(build(PlainNet)), loader())


# -- ranks ------------------------------------------------------------------------------------------------------------


def on_ranks() -> dict[str, Tensor]:
    module = build(PlainNet)
    arguments = {**lt.preset("fsdp2_bf16", precision="32-true"), "use_distributed_sampler": False}
    trainer(devices=2, callbacks=[lt.QAT("int4")], **arguments).fit(module, rank_loader(), loader(8))
    return weights_of(module)


def test_two_ranks_of_a_sharding_preset_equal_one_process() -> None:
    module = build(PlainNet)
    trainer(callbacks=[lt.QAT("int4")]).fit(module, loader(48, 16), loader(8))
    for found in run_ranks(on_ranks):
        assert_close(found, weights_of(module), 1e-5)
