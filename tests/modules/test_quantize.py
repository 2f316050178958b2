"""Weights of linear layers in few bits: what torchao makes of them, files that plain torch loads, no training."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.core.adapters.quantization import Precision
from tests.nets import Net, PlainNet, build, fit, loader, trainer

BITS = {"int8": 8, "int4": 4}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Linear(30, 16), nn.Linear(16, 4))


@pytest.mark.parametrize("precision", BITS)
def test_weights_are_the_nearest_integers_times_scales(precision: Any) -> None:
    before, module = network(), network()
    assert lt.quantize(module, precision) is module
    last = 2 ** (BITS[precision] - 1)
    for name in ("0", "3", "4"):
        found, weight = module.get_submodule(name).weight.dequantize(), before.get_submodule(name).weight.data
        if precision == "int4" and weight.shape[1] % 32 == 0:  # groups of inputs, else rows
            found, weight = found.view(-1, 32), weight.view(-1, 32)
        scale = weight.abs().amax(1, keepdim=True) / (last - 0.5)
        integers = found / scale
        torch.testing.assert_close(integers, integers.round())
        assert -last - 0.1 < integers.min() < integers.max() < last - 0.9
        assert ((found - weight).abs() <= scale * 0.501).all()
        assert not torch.equal(found, weight)
    assert torch.equal(module[2].weight, before[2].weight), "a convolution stays"


@pytest.mark.parametrize("precision", BITS)
def test_weights_are_those_of_torchaos_own_function(precision: Any) -> None:
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

    theirs = nn.Linear(64, 16)
    mine = copy.deepcopy(theirs)
    quantize_(
        theirs, IntxWeightOnlyConfig(getattr(torch, precision), PerGroup(32) if precision == "int4" else PerAxis(0))
    )
    assert torch.equal(lt.quantize(mine, precision).eval()(x := torch.randn(4, 64)), theirs(x))


LOAD = """
import sys, torch, torchao
from torch import nn
for weights, x, y in torch.load(sys.argv[1], weights_only=True):
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Conv1d(4, 4, 3), nn.Linear(30, 16), nn.Linear(16, 4))
    network.load_state_dict(weights, assign=True)
    assert torch.equal(network.eval()(x), y)
assert "lightning_tricks" not in sys.modules
"""


@pytest.mark.slow
def test_plain_torch_loads_the_file_into_the_class_and_predicts_the_same(tmp_path: Path) -> None:
    saved, x = [], torch.randn(3, 4, 64)
    for precision in get_args(Precision):
        module = lt.quantize(network(), precision).eval()
        saved.append((module.state_dict(), x, module(x).detach()))
    torch.save(saved, file := tmp_path / "weights.pt")
    subprocess.run([sys.executable, "-c", LOAD, str(file)], check=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("precision", BITS)
def test_a_large_layer_takes_a_quarter_of_the_bytes(precision: Any, tmp_path: Path) -> None:
    sizes = []
    for module in (nn.Linear(512, 512), lt.quantize(nn.Linear(512, 512), precision)):
        torch.save(module.state_dict(), tmp_path / "weights.pt")
        sizes.append((tmp_path / "weights.pt").stat().st_size)
    share = {"int8": 0.25, "int4": 0.25 + 1 / 32 + 0.01}[precision]  # int4: a scale and a zero for each group
    assert sizes[1] / sizes[0] == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("modules", [r"^(?!4)", ["0", "^3"], "Inner"])
def test_patterns_select_layers_and_modules_that_hold_them(modules: Any) -> None:
    class Inner(nn.Sequential):
        pass

    module = nn.Sequential(Inner(network()[:4]), network()[4]) if modules == "Inner" else network()
    lt.quantize(module, modules=modules)
    rounded = [type(layer.weight.data) is not Tensor for layer in module.modules() if isinstance(layer, nn.Linear)]
    assert rounded == [True, True, False]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="precision must be one of"):
        lt.quantize(network(), "int2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"modules must select nn\.Linear layers, 'Conv1d' selects 2, a Conv1d"):
        lt.quantize(network(), modules="Conv1d")
    with pytest.raises(ValueError, match="'layers' is neither"):
        lt.quantize(network(), modules="layers")
    with pytest.raises(ValueError, match=r"Conv1d has no nn\.Linear layers"):
        lt.quantize(nn.Conv1d(1, 1, 1))
    with pytest.raises(ValueError, match=r"0 \(1 -> 4\) .* one input .*name other layers"):
        lt.quantize(nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 2)), modules="^0")
    with pytest.raises(ValueError, match=r"0\.weight must be a plain tensor, got IntxUnpackedToInt8Tensor"):
        lt.quantize(lt.quantize(network()))
    with pytest.raises(ValueError, match=r"0\.weight .* 16 or 32 bits .* got torch\.float64: .*module\.float\(\)"):
        lt.quantize(network().double())
    with pytest.raises(ValueError, match="0 is a lazy layer, whose weight has no sizes yet: run a batch"):
        lt.quantize(nn.Sequential(nn.LazyLinear(4)))
    nn.utils.parametrizations.weight_norm((module := network())[3])
    with pytest.raises(ValueError, match=r"3\.weight is computed from others"):
        lt.quantize(module)
    module = build(PlainNet)
    fit(module, callbacks=[lt.LoRA(r"layers\.0")])
    with pytest.raises(ValueError, match=r"layers\.0 have adapters.*merge_adapters"):
        lt.quantize(module)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-tricks\[8bit\]"):
        lt.quantize(network())


@pytest.mark.filterwarnings("ignore:Found . module.s. in eval mode")
@pytest.mark.parametrize("kind", [Net, PlainNet])
def test_a_trained_module_predicts_and_is_not_fitted_again(kind: type[Net]) -> None:
    module = build(kind)
    run = fit(module)
    before = run.predict(module, loader())
    after = trainer().predict(lt.quantize(module), loader())
    torch.testing.assert_close(torch.cat(after), torch.cat(before), atol=0.05, rtol=0.05)
    again = trainer()
    with pytest.raises(MisconfigurationException, match=r"cannot be trained.*QAT"):
        again.fit(module, loader(), loader())
    assert again.global_step == 0
    with pytest.raises(RuntimeError, match="does not require grad"):  # Lightning keeps a user's eval mode
        again.fit(module.eval(), loader(), loader())
    assert again.global_step == 0
