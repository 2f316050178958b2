"""A preset brings its precision; whatever contradicts it is refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_tricks as lt
from tests.nets import Net, PlainNet, assert_equal, build, fit, loader, rank_loader, trainer, weights
from tests.ranks import run_ranks
from tests.strategies.spy import Spy

PRECISIONS = {row["name"]: row["precision"] for row in lt.presets()}
NAMES = list(PRECISIONS)

by_string_or_preset = pytest.mark.parametrize(
    "spell", [lambda name: {"strategy": name}, lt.preset], ids=["string", "preset"]
)
each_preset = pytest.mark.parametrize("name", NAMES)


@pytest.mark.few(30)
@each_preset
@by_string_or_preset
@pytest.mark.parametrize(
    "precision", [32, "32", "32-true", "bf16-mixed", "16-mixed", "16-true", "bf16-true", "64-true"]
)
# Lightning says first that fp16 on CPU becomes bf16
@pytest.mark.filterwarnings("ignore:You passed `Trainer")
def test_another_precision_is_refused_by_name_and_value(name: str, spell: Callable[[str], Any], precision: Any) -> None:
    value = "32-true" if str(precision) == "32" else precision
    if value == PRECISIONS[name]:
        assert trainer(precision=precision, **spell(name)).precision == value
        return
    with pytest.raises((MisconfigurationException, ValueError)) as caught:  # Lightning refuses a few by itself
        trainer(precision=precision, **spell(name))
    assert f"'{value}'" in str(caught.value)
    if isinstance(caught.value, MisconfigurationException):
        assert f"strategy='{name}' trains in '{PRECISIONS[name]}', got precision='{value}'" in str(caught.value)


@each_preset
@pytest.mark.parametrize(
    ("plugin", "value"),
    [
        (lambda: MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0)), "16-mixed"),
        (lambda: MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (lambda: DeepSpeedPrecision("16-mixed"), "16-mixed"),
        (lambda: HalfPrecision("bf16-true"), "bf16-true"),
        (lambda: HalfPrecision("16-true"), "16-true"),
        (DoublePrecision, "64-true"),
        (Precision, "32-true"),
    ],
)
def test_a_plugin_of_another_kind_or_precision_is_refused(
    name: str, plugin: Callable[[], Precision], value: str
) -> None:
    given = plugin()
    own = DeepSpeedPrecision if name.startswith("zero") else MixedPrecision
    if value != PRECISIONS[name]:
        with pytest.raises(MisconfigurationException, match=f"strategy='{name}' .* got precision='{value}'"):
            trainer(strategy=name, plugins=[given])
    elif not isinstance(given, own):
        with pytest.raises(
            MisconfigurationException, match=f"needs the plugin {own.__name__}, got {type(given).__name__}"
        ):
            trainer(strategy=name, plugins=[given])
    else:
        assert trainer(strategy=name, plugins=[given]).precision_plugin is given


@each_preset
def test_another_precision_from_the_environment_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_PRECISION", "32-true")
    with pytest.raises(MisconfigurationException, match=f"strategy='{name}' .* got precision='32-true'"):
        trainer(strategy=name)


# Lightning advises against the short spelling
@pytest.mark.filterwarnings("ignore:`precision=.*` is supported for historical reasons")
@pytest.mark.filterwarnings("ignore:You passed `Trainer")
@each_preset
def test_a_short_spelling_of_the_same_precision_is_welcome(name: str) -> None:
    run = trainer(strategy=name, precision=PRECISIONS[name].removesuffix("-mixed"))
    assert run.precision == PRECISIONS[name]


@each_preset
def test_the_plugin_is_of_the_engine_and_the_device(name: str) -> None:
    plugin = trainer(strategy=name).precision_plugin
    assert plugin.precision == PRECISIONS[name]
    if name.startswith("zero"):
        assert type(plugin) is DeepSpeedPrecision
    else:
        assert type(plugin) is MixedPrecision
        assert plugin.device == "cpu"
        assert (plugin.scaler is not None) == (plugin.precision == "16-mixed")


@each_preset
def test_the_fp32_form_is_an_override(name: str) -> None:
    run = trainer(**lt.preset(name, precision="32-true"))
    assert (run.precision, run.strategy.strategy_name) == ("32-true", name)


@pytest.mark.parametrize(
    ("name", "precision"), [("ddp_bf16", "bf16-true"), ("fsdp2_bf16", "16-mixed"), ("ddp_bf16", 16)]
)
def test_a_precision_that_the_engine_has_not_is_refused(name: str, precision: Any) -> None:
    with pytest.raises(ValueError, match=f"precision must be one of 'bf16-mixed', .*, got {precision!r}"):
        lt.preset(name, precision=precision)


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
    in_fp32: L.LightningModule = build(Spy)
    fit(in_fp32)
    assert not torch.equal(weights(ours)["layers.0.weight"], weights(in_fp32)["layers.0.weight"])


@pytest.mark.parametrize("name", ["single_bf16", "ddp_bf16"])
def test_newest_needs_the_callback_that_knows_the_folder(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"'newest' needs .* add callbacks=\[Preemption\(folder\)\]"):
        trainer(strategy=name).validate(build(Net), loader(), ckpt_path="newest")


@pytest.mark.parametrize("name", ["single_bf16", "ddp_bf16"])
def test_a_folder_of_shards_is_an_error_with_a_remedy(name: str, tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=rf"folder of shards, and strategy='{name}' .* consolidate"):
        trainer(strategy=name).validate(build(Net), loader(), ckpt_path=tmp_path)


class Compiled(PlainNet):
    """Its network is compiled by the user."""

    def setup(self, stage: str) -> None:
        self.compiled = torch.compile(self.layers, backend="aot_eager")


def one_after_the_other() -> None:
    settings: dict[str, Any] = {"train": rank_loader(), "devices": 2, "max_epochs": 1, "use_distributed_sampler": False}
    tiny = {"config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    first = {"FSDP2": lt.preset("fsdp2_bf16"), "DeepSpeed": lt.preset("zero3_bf16", **tiny)}
    for engine, others in (("FSDP2", ["ddp_bf16", "zero2_bf16"]), ("DeepSpeed", ["ddp_bf16", "fsdp2_bf16"])):
        module = build(PlainNet)
        fit(module, **first[engine], **settings)
        for name in others:
            with pytest.raises(
                MisconfigurationException, match=f"sharded by {engine} .* strategy='{name}'. Create a new mod"
            ):
                fit(module, strategy=name, **settings)
    with pytest.raises(
        MisconfigurationException, match=r"strategy='zero3_bf16' .* got 'compiled'. .*tricks.Compile\(\)"
    ):
        fit(build(Compiled), strategy="zero3_bf16", **settings)


@pytest.mark.slow
def test_a_sharded_module_is_refused_by_another_engine_and_zero3_refuses_a_compiled_one() -> None:
    run_ranks(one_after_the_other)


@each_preset
def test_a_copy_undoes_nothing_of_the_original(name: str) -> None:
    undone: list[str] = []
    strategy = lt.preset(name)["strategy"]
    strategy._undo.callback(undone.append, "original")
    for twin in (copy(strategy), deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        twin._undo.close()
    assert undone == []
    strategy._undo.close()
    assert undone == ["original"]
