"""Fits that go on from checkpoints of another average: one of Lightning's, or another one of ours; and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import lightning_tricks as lt
from tests.conformance.runs import Steps
from tests.nets import Net, NormNet, PlainNet, assert_close, assert_equal, build, fit, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),  # Lightning
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
]


class Look(Callback):
    """Saves a checkpoint amid the fit and keeps the raw weights of then; or keeps those that a fit begins with."""

    def __init__(self, path: Path | None = None, step: int = 9) -> None:
        self.path, self.step = path, step
        self.raw: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.path is None:
            self.raw = weights(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.path is not None and trainer.global_step == self.step:
            self.raw = weights(pl_module)
            trainer.save_checkpoint(self.path)


def saved(path: Path, callback: Callback, kind: type[Net] = NormNet, **settings: Any) -> Look:
    """A checkpoint of three epochs of four, in whose last batches the average differs from the weights."""
    look = Look(path, 18)
    fit(build(kind), callbacks=[callback, look], max_epochs=4, **settings)
    return look


def averages_in(path: Path) -> dict[str, Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def trained(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


class AtStart(Look):
    """The averages that a fit begins with as well."""

    def __init__(self, average: Any) -> None:
        super().__init__()
        self.average = average

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.averaged = {name: value.clone() for name, value in self.average._running.tensors.items()}
        self.updates = self.average._running.updates


def resumed(path: Path, average: Any, kind: type[Net] = NormNet, **settings: Any) -> tuple[Any, AtStart]:
    module, look = build(kind), AtStart(average)
    fit(module, callbacks=[average, look], ckpt_path=path, **{"max_epochs": 5, **settings})
    return module, look


# -- Lightning's ------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda: EMAWeightAveraging(decay=0.9), lambda: lt.EMA(0.9)),
        (lambda: EMAWeightAveraging(decay=0.9, use_buffers=False), lambda: lt.EMA(0.9, buffers="average")),
        (WeightAveraging, lambda: lt.EMA(0.9)),
        (WeightAveraging, lambda: lt.SWA(0.5)),
    ],
    ids=["EMA", "EMA of buffers", "EMA of a mean", "SWA"],
)
def test_raw_weights_average_and_count_of_weight_averaging_go_on(
    theirs: Callable[[], Callback], ours: Callable[[], Any], precision: Any, tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    kept = saved(path, theirs(), precision=precision)
    module, look = resumed(path, ours(), precision=precision)
    assert_equal(look.raw, kept.raw)
    file = torch.load(path, weights_only=True)
    assert look.updates == int(file["averaging_state"]["n_averaged"]) == 18
    assert set(trained(module)) <= look.averaged.keys()
    assert_equal(look.averaged, {name: file["state_dict"][name].to(look.averaged[name]) for name in look.averaged})


def test_an_average_of_lightnings_goes_on_as_there(tmp_path: Path) -> None:
    path, there, here = tmp_path / "x.ckpt", build(PlainNet), build(PlainNet)
    saved(path, EMAWeightAveraging(decay=0.9), PlainNet)
    fit(there, callbacks=[EMAWeightAveraging(decay=0.9)], max_epochs=5, ckpt_path=path)
    fit(here, callbacks=[lt.EMA(0.9, warmup=False)], max_epochs=5, ckpt_path=path)
    assert_close(weights(here), weights(there), 1e-6)


def test_a_mean_of_stochastic_weight_averaging_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    kept = saved(path, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2))
    module, look = resumed(path, lt.SWA(2))
    assert_equal(look.raw, kept.raw)
    state = torch.load(path, weights_only=True)["callbacks"]["StochasticWeightAveraging"]
    assert look.updates == state["n_averaged"] == 2
    assert_equal(look.averaged, {name: state["average_model_state"][name] for name in trained(module)})


def test_one_that_had_not_begun_is_a_checkpoint_without_an_average(tmp_path: Path) -> None:
    for theirs in (
        StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=4),
        EMAWeightAveraging(update_starting_at_step=100),
    ):
        kept = saved(tmp_path / "x.ckpt", theirs)
        plain = isinstance(theirs, StochasticWeightAveraging)
        average = lt.EMA(0.9, warmup=False)
        if plain:
            _, look = resumed(tmp_path / "x.ckpt", average)
        else:
            with pytest.warns(UserWarning, match="begins a new average: the checkpoint has one of EMAWeightAveraging"):
                _, look = resumed(tmp_path / "x.ckpt", average)
        assert_equal(look.raw, kept.raw)
        assert look.updates == 0


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (lambda: EMAWeightAveraging(decay=0.9), lambda: lt.SWA(0.1)),
        (lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), lambda: lt.EMA(0.9)),
    ],
    ids=["SWA", "EMA"],
)
def test_an_average_of_another_kind_gives_its_raw_weights_alone(
    theirs: Callable[[], Callback], ours: Callable[[], Any], tmp_path: Path
) -> None:
    kept = saved(tmp_path / "x.ckpt", theirs())
    with pytest.warns(UserWarning, match=r"begins a new average: the checkpoint has one of \w+, whose raw weights"):
        _, look = resumed(tmp_path / "x.ckpt", ours())
    assert_equal(look.raw, kept.raw)
    assert (look.updates, look.averaged) == (0, {})


def test_one_average_of_several_takes_it(tmp_path: Path) -> None:
    kept = saved(tmp_path / "x.ckpt", EMAWeightAveraging(decay=0.9))
    first, second = lt.EMA(0.9), lt.EMA(0.99, validate="raw", at_end="raw")
    look = AtStart(first)
    with pytest.warns(UserWarning, match=r"EMA\(decay=0.99.*begins a new average"):
        fit(build(NormNet), callbacks=[second, first, look], max_epochs=5, ckpt_path=tmp_path / "x.ckpt")
    assert look.updates == 6 * 3
    assert_equal(look.raw, kept.raw)
    assert second._running.updates == 12


@pytest.mark.parametrize("theirs", ["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"])
def test_a_file_whose_raw_weights_are_lost_is_refused(theirs: str, tmp_path: Path) -> None:
    made: dict[str, Callable[[], Callback]] = {
        "WeightAveraging": WeightAveraging,
        "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.9),
        "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
    }
    fit(build(PlainNet), callbacks=[made[theirs]()], max_epochs=4).save_checkpoint(tmp_path / "x.ckpt")
    for average in (lt.EMA(0.9), lt.SWA(0.5)):
        steps = Steps()
        with pytest.raises(MisconfigurationException, match=f"has the average of {theirs} alone: training had ended"):
            fit(build(PlainNet), callbacks=[average, steps], max_epochs=5, ckpt_path=tmp_path / "x.ckpt")
        assert steps.made == 0


class Scheduled(PlainNet):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


def test_the_schedule_of_their_swa_cannot_go_on_in_another(tmp_path: Path) -> None:
    saved(tmp_path / "x.ckpt", StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2), Scheduled)
    with pytest.raises(MisconfigurationException, match=r"has the state of SWALR.*StepLR cannot go on from it"):
        resumed(tmp_path / "x.ckpt", lt.SWA(2), Scheduled)


class Renamed(NormNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.net = self.layers
        del self.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.replace("layers.", "net."): value for name, value in state.items()}


@pytest.mark.parametrize("theirs", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_a_module_that_renames_its_weights_goes_on(theirs: str, tmp_path: Path) -> None:
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)
    ema = theirs == "EMAWeightAveraging"
    kept = saved(tmp_path / "x.ckpt", EMAWeightAveraging(decay=0.9) if ema else swa)
    _, look = resumed(tmp_path / "x.ckpt", lt.EMA(0.9) if ema else lt.SWA(2), Renamed)
    assert_equal({name.replace("net.", "layers."): value for name, value in look.raw.items()}, kept.raw)
    file = torch.load(tmp_path / "x.ckpt", weights_only=True)
    average = file["state_dict"] if ema else file["callbacks"][theirs]["average_model_state"]
    for name, value in look.averaged.items():
        assert torch.equal(value, average[name.replace("net.", "layers.")])


# -- another one of ours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [(lambda: lt.EMA(0.9), lambda: lt.SWA(0.1)), (lambda: lt.SWA(6, every_n_steps=2), lambda: lt.EMA(0.9))],
    ids=["EMA then SWA", "SWA then EMA"],
)
def test_another_average_of_ours_begins_with_the_raw_weights(
    before: Callable[[], Any], after: Callable[[], Any], tmp_path: Path
) -> None:
    kept = saved(tmp_path / "x.ckpt", before())
    with pytest.warns(UserWarning, match="begins a new average: the checkpoint has one of (EMA|SWA)"):
        _, look = resumed(tmp_path / "x.ckpt", after())
    assert_equal(look.raw, kept.raw)
    assert (look.updates, look.averaged) == (0, {})


# -- Lightning's from ours --------------------------------------------------------------------------------------------


class Tied(NormNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.alias = self.layers[3]


@pytest.mark.parametrize("kind", [NormNet, Tied])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: lt.EMA(0.9), lambda: EMAWeightAveraging(decay=0.9)),
        (lambda: lt.SWA(6, every_n_steps=2), WeightAveraging),
    ],
    ids=["EMA", "SWA"],
)
def test_weight_averaging_goes_on_from_a_checkpoint_of_ours(
    ours: Callable[[], Any], theirs: Callable[[], Any], kind: type[Net], tmp_path: Path
) -> None:
    path, average = tmp_path / "x.ckpt", ours()
    kept = saved(path, average, kind)
    look, callback = Look(), theirs()
    seen: dict[str, Any] = {}

    class AtTheirStart(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update({name: value.clone() for name, value in callback._average_model.state_dict().items()})

    fit(build(kind), callbacks=[callback, look, AtTheirStart()], max_epochs=5, ckpt_path=path)
    assert_equal(look.raw, kept.raw)
    file = torch.load(path, weights_only=True)
    assert int(seen.pop("n_averaged")) == file["callbacks"][average.state_key]["updates"]
    assert_equal({name.removeprefix("module."): value for name, value in seen.items()}, file["state_dict"])


def test_what_lightning_reads_takes_no_room(tmp_path: Path) -> None:
    average = lt.EMA(0.9)
    saved(tmp_path / "x.ckpt", average, PlainNet)
    file = torch.load(tmp_path / "x.ckpt", weights_only=True)
    raw = file["callbacks"][average.state_key]["raw"]
    current = file["current_model_state"]
    assert all(value.data_ptr() == current[name].data_ptr() for name, value in raw.items())
