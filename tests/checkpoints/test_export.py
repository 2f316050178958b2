"""Exports of checkpoints made with real Trainers: which weights, under which names, in which dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn

import lightning_tricks as lt
from lightning_tricks.checkpoints import export_weights
from tests.nets import Net, assert_close, assert_equal, build, fit, loader, trainer, weights


class Tied(Net):
    """Two names for one weight, and frozen weights."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.second(torch.tanh(self.first(x))))


class Keep(Callback):
    """Save in the middle of the last epoch and keep copies of the weights that are trained and of their averages."""

    def __init__(self, file: Path, *averages: lt.EMA, weights_only: bool = False) -> None:
        self.file, self.averages, self.weights_only = file, averages, weights_only
        self.raw: dict[str, Tensor] = {}
        self.averaged: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 10:
            self.raw = weights(pl_module)
            self.averaged = [each.averaged_state_dict() for each in self.averages]
            trainer.save_checkpoint(self.file, weights_only=self.weights_only)


def run(file: Path, *averages: lt.EMA, kind: type[Net] = Net, weights_only: bool = False, **settings: Any) -> Keep:
    keep = Keep(file, *averages, weights_only=weights_only)
    fit(build(kind), callbacks=[*averages, keep], **settings)
    return keep


def exported(checkpoint: Path, name: str = "out.pt", **options: Any) -> dict[str, Tensor]:
    output = checkpoint.with_name(name)
    export_weights(checkpoint, output, force=True, **options)
    return load_file(output) if output.suffix == ".safetensors" else torch.load(output)


# -- which weights ----------------------------------------------------------------------------------------------------

EMAS = [
    {},
    {"validate": "raw"},
    {"buffers": "average"},
    {"buffers": "average", "validate": "raw"},
    {"device": "cpu", "validate": "raw"},
]


@pytest.mark.few(7)
@pytest.mark.parametrize("settings", EMAS, ids=str)
@pytest.mark.parametrize("kind", [Net, Tied])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("name", ["out.pt", "out.safetensors"])
def test_averaged_and_raw_weights_of_an_ema(
    settings: dict[str, Any], kind: type[Net], precision: Any, name: str, tmp_path: Path
) -> None:
    kept = run(tmp_path / "a.ckpt", lt.EMA(decay=0.9, **settings), kind=kind, precision=precision)
    raw, averaged = exported(tmp_path / "a.ckpt", name, which="raw"), exported(tmp_path / "a.ckpt", name)
    assert_equal(raw, kept.raw)
    assert_equal(averaged, kept.averaged[0])
    assert not torch.equal(raw["layers.0.weight"], averaged["layers.0.weight"])
    assert averaged["layers.0.weight"].dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)
    if name == "out.pt" and kind is Tied:
        tied = [exported(tmp_path / "a.ckpt", which=which) for which in ("averaged", "raw")]
        assert all(state["first.weight"].data_ptr() == state["second.weight"].data_ptr() for state in tied)


@pytest.mark.parametrize(
    "settings", [{"start": 1000}, {"every_n_steps": 1000, "validate": "raw"}, {"every_n_steps": 1000}]
)
def test_before_the_first_update_the_averaged_weights_are_the_raw_ones(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    kept = run(tmp_path / "a.ckpt", lt.EMA(**settings))
    assert_equal(exported(tmp_path / "a.ckpt"), kept.raw)
    assert_equal(exported(tmp_path / "a.ckpt", which="raw"), kept.raw)


def test_without_an_average_both_are_the_weights(tmp_path: Path) -> None:
    kept = run(tmp_path / "a.ckpt")
    assert_equal(exported(tmp_path / "a.ckpt"), kept.raw)
    assert_equal(exported(tmp_path / "a.ckpt", which="raw"), kept.raw)


@pytest.mark.parametrize("averages", [[lt.EMA(decay=0.9)], []], ids=["EMA", "plain"])
def test_a_file_with_weights_only_holds_what_was_validated_and_raw_is_not_guessed(
    averages: list[lt.EMA], tmp_path: Path
) -> None:
    kept = run(tmp_path / "a.ckpt", *averages, weights_only=True)
    assert_equal(exported(tmp_path / "a.ckpt"), kept.averaged[0] if averages else kept.raw)
    with pytest.raises(ValueError, match=r"a\.ckpt: without the state of an optimizer .*which='averaged'"):
        exported(tmp_path / "a.ckpt", which="raw")


def test_a_plain_state_dict_is_converted(tmp_path: Path) -> None:
    state = weights(build())
    torch.save(state, tmp_path / "a.pt")
    assert_equal(exported(tmp_path / "a.pt", "b.safetensors"), state)
    assert_equal(exported(tmp_path / "b.safetensors", "c.pt"), state)
    with pytest.raises(ValueError, match="without the state of an optimizer"):
        exported(tmp_path / "a.pt", which="raw")


def test_a_module_saved_by_a_trainer_that_did_not_train_it_is_not_called_raw(tmp_path: Path) -> None:
    module = build()
    fit(module, callbacks=[lt.EMA(decay=0.9)])  # it holds averaged weights now
    other = trainer()
    other.test(module, loader(24), verbose=False)
    other.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="without the state of an optimizer"):
        exported(tmp_path / "a.ckpt", which="raw")


@pytest.mark.parametrize("shown", [0, 1])
def test_of_several_averages_one_is_chosen(shown: int, tmp_path: Path) -> None:
    hidden: dict[str, Any] = {"validate": "raw", "at_end": "raw"}
    averages = [lt.EMA(decay=decay, **({} if place == shown else hidden)) for place, decay in enumerate((0.5, 0.9))]
    kept = run(tmp_path / "a.ckpt", *averages)
    assert_equal(exported(tmp_path / "a.ckpt", which="raw"), kept.raw)
    for each, averaged in zip(averages, kept.averaged, strict=True):
        assert_equal(exported(tmp_path / "a.ckpt", callback=each.state_key), averaged)
    with pytest.raises(ValueError, match=r"a.ckpt: averages of several callbacks: choose .*EMA.*0\.5.*EMA.*0\.9"):
        exported(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"no averages of the callback 'SWA'; there are those of: EMA.*0\.5"):
        exported(tmp_path / "a.ckpt", callback="SWA")


def test_an_average_that_another_one_hides_is_not_guessed(tmp_path: Path) -> None:
    state = {"steps": 1, "updates": 1, "raw": {"w": torch.ones(1)}, "averaged": {}}
    checkpoint = {"state_dict": {"w": torch.zeros(1)}, "callbacks": {"A": state, "B": state}, "optimizer_states": [{}]}
    torch.save(checkpoint, tmp_path / "a.ckpt")
    for options in ({"which": "raw"}, {"callback": "A"}, {"callback": "B"}):
        with pytest.raises(ValueError, match="cannot hold the averages of several callbacks: A, B"):
            exported(tmp_path / "a.ckpt", **options)


def test_lightnings_own_averaging(tmp_path: Path) -> None:
    module, keep = build(), Keep(tmp_path / "a.ckpt")
    averaging = EMAWeightAveraging(decay=0.9)
    fit(module, callbacks=[averaging, keep])
    assert_equal(exported(tmp_path / "a.ckpt", which="raw"), keep.raw)
    averaged = exported(tmp_path / "a.ckpt")
    assert_equal(averaged, torch.load(tmp_path / "a.ckpt")["state_dict"])
    assert not torch.equal(averaged["layers.0.weight"], keep.raw["layers.0.weight"])


# -- names and formats ------------------------------------------------------------------------------------------------


def test_the_exported_weights_load_into_a_bare_module(tmp_path: Path) -> None:
    kept = run(tmp_path / "a.ckpt", lt.EMA(decay=0.9))
    bare = build().layers
    bare.load_state_dict(exported(tmp_path / "a.ckpt", "bare.safetensors", strip_prefix="layers."))
    assert_equal({f"layers.{name}": value for name, value in bare.state_dict().items()}, kept.averaged[0])


@pytest.mark.parametrize("prefix", ["net", "net."])
def test_a_prefix_is_the_name_of_a_submodule(prefix: str, tmp_path: Path) -> None:
    torch.save({"net.w": torch.ones(2), "net_ema.w": torch.zeros(2), "w": torch.zeros(1)}, tmp_path / "a.pt")
    assert_equal(exported(tmp_path / "a.pt", strip_prefix=prefix), {"w": torch.ones(2)})


def test_a_prefix_that_none_has(tmp_path: Path) -> None:
    torch.save({"net.w": torch.ones(2), "head.w": torch.zeros(2), "w": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"no weight is in 'model\.'; there are: head\., net\.\."):
        exported(tmp_path / "a.pt", strip_prefix="model.")
    torch.save({"w": torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="weights without a prefix only"):
        exported(tmp_path / "a.pt", strip_prefix="model.")


def test_a_submodule_is_exported_without_the_bytes_of_the_others(tmp_path: Path) -> None:
    everything = torch.zeros(100_000)
    torch.save({"state_dict": {"a.w": everything[:4], "b.w": everything[4:]}}, tmp_path / "a.ckpt")
    exported(tmp_path / "a.ckpt", strip_prefix="a")
    assert (tmp_path / "out.pt").stat().st_size < 3000


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"gone": torch.ones(2)}, "the state_dict has no gone, but a callback has values for it"),
        ({"w": torch.ones(1)}, "a callback has only a part of w, since the training was sharded"),
    ],
)
def test_values_that_do_not_fit_are_refused(raw: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    state = {"steps": 1, "updates": 1, "raw": raw, "averaged": {}}
    torch.save({"state_dict": {"w": torch.zeros(2)}, "callbacks": {"EMA": state}}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=message):
        exported(tmp_path / "a.ckpt", which="raw")
    assert_close(exported(tmp_path / "a.ckpt"), {"w": torch.zeros(2)})


def test_other_mistakes(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()
    with pytest.raises(FileExistsError, match="force=True"):
        export_weights(tmp_path / "a.pt", tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == before
    with pytest.raises(ValueError, match="which must be one of 'averaged', 'raw', got 'ema'"):
        exported(tmp_path / "a.pt", which="ema")
    with pytest.raises(FileNotFoundError, match=r"There is no file .*none\.ckpt"):
        exported(tmp_path / "none.ckpt")
