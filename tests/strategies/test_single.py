"""``single_bf16``: one device in bf16-mixed, everything a Trainer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from tests.device.devices import EVERY, device
from tests.nets import assert_equal, build, fit, loader, trainer, weights
from tests.strategies.spy import Spy, facts


def test_activations_are_bf16_weights_and_gradients_fp32() -> None:
    module = build(Spy)
    seen = facts(fit(module, strategy="single_bf16"), module)
    assert seen["activation"] is torch.bfloat16
    assert seen["parameters"] == seen["gradients"] == {torch.float32}
    assert (seen["precision"], seen["plugin"], seen["world"]) == ("bf16-mixed", "MixedPrecision", 1)


@pytest.mark.parametrize("devices", [2, 3])
def test_several_devices_are_refused_with_the_remedy(devices: int) -> None:
    message = rf"strategy='single_bf16' .* got devices={devices}. Pass devices=1, or strategy='ddp_bf16'"
    with pytest.raises(MisconfigurationException, match=message):
        trainer(strategy="single_bf16", devices=devices)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(devices=devices, **lt.preset("single_bf16"))


def test_validate_test_and_predict_are_those_of_lightnings_own_bf16() -> None:
    module = build(Spy)
    ours, theirs = trainer(strategy="single_bf16"), trainer(precision="bf16-mixed")
    assert ours.validate(module, loader(), verbose=False) == theirs.validate(module, loader(), verbose=False)
    assert ours.test(module, loader(), verbose=False) == theirs.test(module, loader(), verbose=False)
    outputs = ours.predict(module, loader())
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert torch.equal(torch.cat(outputs), torch.cat(theirs.predict(module, loader())))


def test_a_resumed_fit_is_exact(tmp_path: Path) -> None:
    whole, first, resumed = (build(Spy) for _ in range(3))
    fit(whole, strategy="single_bf16", max_epochs=3)
    fit(first, strategy="single_bf16", max_epochs=2).save_checkpoint(tmp_path / "2.ckpt")
    run = fit(resumed, strategy="single_bf16", max_epochs=3, ckpt_path=tmp_path / "2.ckpt")
    assert run.global_step == 3 * len(loader())
    assert_equal(weights(resumed), weights(whole))
    assert {value.dtype for value in torch.load(tmp_path / "2.ckpt", weights_only=True)["state_dict"].values()} == {
        torch.float32
    }


def test_a_checkpoint_loads_in_any_trainer(tmp_path: Path) -> None:
    module, plain = build(Spy), build(Spy)
    fit(module, strategy="single_bf16", max_epochs=1).save_checkpoint(tmp_path / "1.ckpt")
    trainer().validate(plain, loader(), ckpt_path=tmp_path / "1.ckpt", verbose=False)
    assert_equal(weights(plain), weights(module))


@pytest.mark.few(5)
@pytest.mark.parametrize("on", EVERY)
@pytest.mark.parametrize("name", ["its own", "gpu", "auto"])
def test_the_autocast_is_that_of_the_device(name: str, on: str) -> None:
    module = build(Spy)
    with device(on) as there:
        accelerator = there.accelerator if name == "its own" or there.name == "xpu" else name
        seen = facts(fit(module, strategy="single_bf16", accelerator=accelerator), module)
    assert (seen["device"], seen["autocast"]) == (there.name, there.name)
    assert seen["activation"] is torch.bfloat16
    assert seen["parameters"] == seen["gradients"] == {torch.float32}
