"""Float8 against torchao's own conversion in a plain loop, in emulation; outside of training the network is plain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import prune

import lightning_tricks as lt
from lightning_tricks.callbacks.float8 import Recipe, float8_twin
from tests.conformance.engines import cpu_deepspeed
from tests.nets import PlainNet, assert_close, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import Cases, run_cases
from tests.reference import tricks as naive
from tests.reference.averages import NaiveEMA
from tests.reference.loop import Naive, naive_fit

RECIPES: list[Recipe] = ["tensorwise", "rowwise"]


def emulated(modules: Any = None, **settings: Any) -> Any:
    return lt.Float8(modules, emulate=True, **settings)


class NaiveFloat8(Naive):
    """Trains the network that torchao makes of the given one; the parameters are the same ones."""

    def __init__(self, recipe: Recipe = "tensorwise") -> None:
        self.recipe = recipe

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            module.layers,
            module_filter_fn=lambda layer, name: layer.in_features % 16 == layer.out_features % 16 == 0,
            config=replace(Float8LinearConfig.from_recipe_name(self.recipe), emulate=True, pad_inner_dim=True),
        )


class NaiveSAM(naive.SAM):
    """The same with SAM's gradients."""

    def begin(self, module: Any, optimizer: torch.optim.Optimizer) -> None:
        NaiveFloat8().begin(module, optimizer)


class Wide(PlainNet):
    """With two layers that qualify."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh()]
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), *inner, nn.Linear(32, 2))


class Sharp(lt.SAMMixin, Wide):
    sam = lt.SAM(0.1)


def trained(*callbacks: Any, kind: type[PlainNet] = Wide, **settings: Any) -> dict[str, Tensor]:
    module = build(kind)
    fit(module, callbacks=list(callbacks), **settings)
    return weights(module)


def by_naive(trick: Naive, **loop: Any) -> dict[str, Tensor]:
    module = build(Wide)
    naive_fit(module, trick, list(loader()), **loop)
    return weights(module)


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def eighths(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to 8 bits, with the largest number at the end of the range."""
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).float() / scale


def test_products_are_those_of_rounded_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(32, 16), torch.randn(5, 32, generator=generator, requires_grad=True)
    y, up = float8_twin(layer, "tensorwise", emulate=True)(x), torch.randn(5, 16, generator=generator)
    y.backward(up)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    torch.testing.assert_close(y, eighths(x, e4m3) @ eighths(layer.weight, e4m3).T + layer.bias)
    torch.testing.assert_close(x.grad, eighths(up, e5m2) @ eighths(layer.weight, e4m3))
    torch.testing.assert_close(layer.weight.grad, eighths(up, e5m2).T @ eighths(x, e4m3))
    torch.testing.assert_close(layer.bias.grad, up.sum(0))
    assert (y - layer(x)).abs().max() > 1e-3


REGIMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"precision": "bf16-mixed"}, {"autocast": torch.bfloat16}),
    "accumulate": ({"accumulate_grad_batches": 3}, {"accumulate": 3}),
    "clip": ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("regime", REGIMES)
def test_a_plain_loop_with_torchao_trains_the_same(regime: str, recipe: Recipe) -> None:
    settings, loop = REGIMES[regime]
    found = trained(emulated(recipe=recipe), **settings)
    assert_equal(found, by_naive(NaiveFloat8(recipe), **loop))
    assert not torch.equal(found["layers.2.weight"], trained(**settings)["layers.2.weight"])


# -- names, checkpoints, what is left behind --------------------------------------------------------------------------


class Watched(Wide):
    """Remembers whether its second layer computed what a plain one does."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: dict[str, set[bool]] = {"train": set(), "val": set()}
        self.kinds: set[type] = set()

    def look(self, x: Tensor, when: str) -> None:
        hidden, layer = self.layers[:2](x), self.layers[2]
        self.plain[when].add(torch.equal(layer(hidden), F.linear(hidden, layer.weight, layer.bias)))
        self.kinds.add(type(layer))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look(batch[0], "train")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.look(batch[0], "val")
        super().validation_step(batch, batch_idx)


def test_only_training_is_in_float8_and_nothing_stays(tmp_path: Path) -> None:
    module = build(Watched)
    names, layers = list(module.state_dict()), list(module.layers)
    run = fit(module, callbacks=[emulated()])
    assert module.plain == {"train": {False}, "val": {True}}
    assert module.kinds == {nn.Linear}
    assert list(module.state_dict()) == names
    assert all(now is before for now, before in zip(module.layers, layers, strict=True))
    assert not any("forward" in vars(layer) for layer in module.layers)
    run.save_checkpoint(path := tmp_path / "end.ckpt")
    assert_equal(weights(Wide.load_from_checkpoint(path)), weights(module))


def test_layers_in_evaluation_mode_are_plain() -> None:
    class Frozen(Wide):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.layers.eval()

    assert_equal(trained(emulated(), kind=Frozen), trained(kind=Frozen))


def test_a_failed_fit_leaves_the_layers_as_they_were() -> None:
    class Fails(Wide):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("no validation")

    module = build(Fails)
    with pytest.raises(RuntimeError, match="no validation"):
        fit(module, callbacks=[emulated()])
    assert not any("forward" in vars(layer) for layer in module.layers)


# -- which layers, and what is refused --------------------------------------------------------------------------------


def test_layers_whose_sizes_fit_are_taken_by_default_and_named_ones_must_fit() -> None:
    assert_equal(trained(emulated()), trained(emulated(r"layers\.[24]")))
    assert not torch.equal(trained(emulated())["layers.0.weight"], trained(emulated("layers.2"))["layers.0.weight"])
    with pytest.raises(MisconfigurationException, match=r"Float8\(.*multiples of 16.*layers\.0 \(8 -> 32\), layers\.6"):
        trained(emulated("Sequential"))
    with pytest.raises(MisconfigurationException, match=r"multiples of 16.*layers\.0 \(8 -> 16\)"):
        trained(emulated(), kind=PlainNet)
    with pytest.raises(MisconfigurationException, match=r"Float8\(.*'nothing' is neither"):
        trained(emulated("nothing"))
    module = build(Wide)
    module.layers[0] = nn.LazyLinear(32)
    with pytest.raises(MisconfigurationException, match=r"Float8\(.*layers\.0 is a lazy layer"):
        fit(module, callbacks=[emulated()])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="recipe must be one of"):
        lt.Float8(recipe="blockwise")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="emulate"):
        lt.Float8(emulate=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="modules"):
        lt.Float8([])


@pytest.mark.parametrize(("recipe", "capability"), [("tensorwise", "8.9"), ("rowwise", "9.0")])
def test_hardware_without_float8_is_refused(recipe: Recipe, capability: str) -> None:
    message = rf"CUDA device of .*{capability} or more, got cpu.*emulate=True"
    with pytest.raises(MisconfigurationException, match=message):
        trained(lt.Float8(recipe=recipe))


def test_layers_that_something_else_has_changed_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Float8\(.*layers\.2 have another forward pass"):
        trained(emulated(r"layers\.[24]"), emulated(r"layers\.2"))
    module = build(Wide)
    fit(module, callbacks=[lt.LoRA(r"layers\.2")])
    with pytest.raises(MisconfigurationException, match=r"layers\.2 have adapters"):
        fit(module, callbacks=[emulated()])


# -- beside other tricks ----------------------------------------------------------------------------------------------


def test_an_average_is_that_of_the_weights() -> None:
    reference, module = NaiveEMA(0.9), build(Wide)
    fit(module, callbacks=[emulated(), lt.EMA(0.9, warmup=False), reference])
    reference.assert_equals(module.state_dict())


def test_weights_that_are_pruned_in_the_fit_are_pruned_in_float8_too() -> None:
    class Pruned(Wide):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                prune.l1_unstructured(self.layers[2], "weight", amount=0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden, layer = self.layers[:2](batch[0]), self.layers[2]
            found, twin = layer(hidden), float8_twin(nn.Linear(32, 64), "tensorwise", emulate=True)
            twin.load_state_dict({"weight": layer.weight, "bias": layer.bias})
            assert torch.equal(found, twin(hidden))
            return super().training_step(batch, batch_idx)

    assert (trained(emulated(), kind=Pruned)["layers.2.weight_mask"] == 0).sum() == 1024


def test_both_gradients_of_sam_are_in_float8() -> None:
    assert_close(trained(emulated(), kind=Sharp), by_naive(NaiveSAM()), 1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: lt.ActivationCheckpointing("Sequential"), id="full"),
        pytest.param(lambda: lt.ActivationCheckpointing("Sequential", policy="selective"), id="selective"),
        pytest.param(
            lambda: lt.Compile("Sequential", backend="aot_eager", fallback=False), id="Compile", marks=pytest.mark.slow
        ),
        pytest.param(lambda: lt.QAT(modules="layers.0", start=1.0), id="QAT"),
    ],
)
def test_tricks_that_change_no_weights_change_none_beside_it(other: Any) -> None:
    torch.compiler.reset()
    alone = trained(emulated(r"layers\.[24]"))
    assert_close(trained(emulated(r"layers\.[24]"), other()), alone, 1e-6)
    assert_close(trained(other(), emulated(r"layers\.[24]")), alone, 1e-6)


class Language(Wide):
    """A head of 32 tokens for LeanLoss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers[:-1], nn.Linear(32, 32))
        self.model = self.layers[-1]


def test_a_head_computes_its_loss_in_one_way() -> None:
    inner = r"layers\.[24]"
    both = trained(emulated(inner), lt.LeanLoss(), kind=Language)
    assert_close(both, trained(emulated(inner), kind=Language), 1e-5)
    for callbacks in ([emulated(), lt.LeanLoss()], [lt.LeanLoss(), emulated()]):
        with pytest.raises(MisconfigurationException, match=r"LeanLoss|have another forward pass"):
            trained(*callbacks, kind=Language)


# -- ranks ------------------------------------------------------------------------------------------------------------


class Split(Wide):
    """With tensor parallelism."""

    def configure_model(self) -> None:
        plan = {"2": ColwiseParallel(), "4": RowwiseParallel()}
        parallelize_module(self.layers, self.device_mesh["tensor_parallel"], plan)


STRATEGIES: dict[str, Any] = {
    "fsdp2": lambda: lt.preset("fsdp2_bf16", precision="32-true"),
    "zero2": lambda: {"strategy": cpu_deepspeed(2)},
    "tensor": lambda: {"strategy": ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)},
}


def on_ranks(strategy: str) -> dict[str, Tensor]:
    module, split = build(Split if strategy == "tensor" else Wide), strategy == "tensor"
    run = trainer(devices=2, callbacks=[emulated()], use_distributed_sampler=False, **STRATEGIES[strategy]())
    run.fit(module, loader(48, 8) if split else rank_loader(), loader(8))
    return weights(module)


@pytest.fixture(scope="module")
def two_ranks() -> Cases:
    return run_cases(on_ranks, list(STRATEGIES))


@pytest.mark.slow  # DDP is in tests/conformance/test_ranks.py
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_equal_one_process(strategy: str, two_ranks: Cases) -> None:
    """A rank scales by its own batch: one process has the same products if it accumulates the batches of both."""
    module = build(Wide)
    batches = 1 if strategy == "tensor" else 2
    trainer(callbacks=[emulated()], accumulate_grad_batches=batches).fit(module, loader(48, 8), loader(8))
    for found in two_ranks[strategy]:
        assert_close(found, weights(module), 1e-5)


# -- hardware ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_hardware_computes_what_is_emulated(recipe: Recipe) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("rowwise needs compute capability 9.0")
    settings = {"accelerator": "gpu", "precision": "bf16-mixed"}
    found, expected = (trained(lt.Float8(recipe=recipe, emulate=each), **settings) for each in (False, True))
    assert_close(found, expected, 1e-2)
    assert not torch.equal(found["layers.2.weight"], trained(**settings)["layers.2.weight"])
