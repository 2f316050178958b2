"""A preset brings its precision; whatever contradicts it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    Precision,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from tests.nets import assert_equal, build, fit, trainer, weights
from tests.strategies.spy import Spy

NAMES = [row["name"] for row in lt.presets()]

by_string_or_preset = pytest.mark.parametrize(
    "spell", [lambda name: {"strategy": name}, lt.preset], ids=["string", "preset"]
)
each_preset = pytest.mark.parametrize("name", NAMES)


@each_preset
@by_string_or_preset
@pytest.mark.parametrize("precision", [32, "32", "32-true", "16-mixed", "16-true", "bf16-true", "64-true"])
# Lightning says first that fp16 on CPU becomes bf16
@pytest.mark.filterwarnings("ignore:You passed `Trainer")
def test_another_precision_is_refused_by_name_and_value(name: str, spell: Callable[[str], Any], precision: Any) -> None:
    value = "32-true" if str(precision) == "32" else precision
    with pytest.raises(MisconfigurationException, match=f"strategy='{name}' trains in 'bf16-mixed', got .*'{value}'"):
        trainer(precision=precision, **spell(name))


@each_preset
@pytest.mark.parametrize(
    ("plugin", "value"),
    [
        (lambda: MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0)), "16-mixed"),
        (lambda: HalfPrecision("bf16-true"), "bf16-true"),
        (lambda: HalfPrecision("16-true"), "16-true"),
        (DoublePrecision, "64-true"),
        (Precision, "32-true"),
    ],
)
def test_a_plugin_of_another_precision_is_refused(name: str, plugin: Callable[[], Precision], value: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"strategy='{name}' .* got precision='{value}'"):
        trainer(strategy=name, plugins=[plugin()])


@each_preset
def test_another_precision_from_the_environment_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_PRECISION", "32-true")
    with pytest.raises(MisconfigurationException, match=f"strategy='{name}' .* got precision='32-true'"):
        trainer(strategy=name)


@each_preset
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16-mixed"},
        # "bf16" is spelled out by Lightning, which advises against it
        pytest.param({"precision": "bf16"}, marks=pytest.mark.filterwarnings("ignore:`precision=bf16` is supported")),
        {"plugins": [MixedPrecision("bf16-mixed", "cpu")]},
    ],
)
def test_the_same_precision_is_welcome(name: str, settings: dict[str, Any]) -> None:
    run = trainer(strategy=name, **settings)
    assert run.precision == "bf16-mixed"
    assert type(run.precision_plugin) is MixedPrecision
    if "plugins" in settings:
        assert run.precision_plugin is settings["plugins"][0]


@each_preset
def test_the_precision_autocasts_on_the_device_of_the_trainer(name: str) -> None:
    assert trainer(strategy=name).precision_plugin.device == "cpu"


def test_a_trainer_made_while_another_trains_has_its_own_precision() -> None:
    class Nested(Spy):
        def on_train_start(self) -> None:
            self.inner = trainer(strategy="single_bf16").precision

    module = build(Nested)
    assert fit(module, max_epochs=1, precision="32-true").precision == "32-true"
    assert module.inner == "bf16-mixed"


def test_training_is_that_of_lightnings_own_bf16() -> None:
    ours, theirs = build(Spy), build(Spy)
    fit(ours, strategy="single_bf16")
    fit(theirs, precision="bf16-mixed")
    assert_equal(weights(ours), weights(theirs))
    in_fp32: pl.LightningModule = build(Spy)
    fit(in_fp32)
    assert not torch.equal(weights(ours)["layers.0.weight"], weights(in_fp32)["layers.0.weight"])
