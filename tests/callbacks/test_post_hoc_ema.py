"""Averages of any length after training equal those that were made in training, within the paper's accuracy."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_tricks as lt
from lightning_tricks.callbacks.post_hoc_ema import PostHocEMA, power_decay
from lightning_tricks.checkpoints.post_hoc import post_hoc_average, power_of, snapshots_in
from lightning_tricks.core.report import readable
from tests.callbacks.test_rewind_on_spike import Clean, batches, rewind, spiky
from tests.conformance.runs import ShardedNet
from tests.device.devices import device
from tests.nets import NormNet, PlainNet, Stream, assert_equal, build, fit, loader, quiet, rank_loader, trainer, weights
from tests.ranks import run_ranks
from tests.refusals import assert_refused


class NaivePower(Callback):
    """In fp64: ``average = d * average + (1-d) * weight`` after every step."""

    def __init__(self, sigma_rel: float) -> None:
        self.sigma_rel, self.step = sigma_rel, 0
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.step += 1
        decay = (1 - 1 / self.step) ** (power_of(self.sigma_rel) + 1)
        for name, parameter in pl_module.named_parameters():
            weight = parameter.detach().double().clone()
            self.average[name] = decay * self.average.get(name, weight) + (1 - decay) * weight

    def error(self, found: dict[str, Tensor], module: nn.Module) -> float:
        """The distance of an average from this one, over that of the last weights."""
        last = dict(module.named_parameters())
        far, near = ([other[name].detach() - mine for name, mine in self.average.items()] for other in (last, found))
        return float(nn.utils.get_total_norm(near) / nn.utils.get_total_norm(far))


def run_of(folder: Path) -> Path:
    """The folder of the only run."""
    (run,) = [path for path in folder.iterdir() if path.is_dir()]
    return run


def snapshots(folder: Path) -> dict[str, Any]:
    return {each.path.name: torch.load(each.path) for each in snapshots_in(folder)}


def assert_same_snapshots(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name]["averaged"] == b[name]["averaged"]
        assert_equal(a[name]["state_dict"], b[name]["state_dict"])


def test_the_lines_that_a_user_writes(tmp_path: Path) -> None:
    net, train, val = build(NormNet), loader(), loader(24)
    naive = NaivePower(0.13)
    run = L.Trainer(**{**quiet, "max_epochs": 30, "callbacks": [lt.PostHocEMA(tmp_path / "ema"), naive]})
    run.fit(net, train, val)
    average = lt.post_hoc_average(tmp_path / "ema", sigma_rel=0.13)
    assert naive.error(average, net) < 0.02
    net.load_state_dict(average)
    (scores,) = run.test(net, val, verbose=False)
    assert scores["test_loss"] > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, list[NaivePower], Any]:
    """A fit of 240 steps, naive averages of several lengths, and ema_pytorch's own snapshots."""
    ema_pytorch = pytest.importorskip("ema_pytorch")
    folder = tmp_path_factory.mktemp("ema")
    module, naive = build(NormNet), [NaivePower(length) for length in (0.03, 0.05, 0.08, 0.13, 0.2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saves = {"update_every": 1, "checkpoint_every_num_steps": 8, "checkpoint_folder": str(folder / "theirs")}
        theirs = ema_pytorch.PostHocEMA(module.layers, sigma_rels=(0.05, 0.10), **saves)

    class Theirs(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            theirs.update()

    fit(module, max_epochs=40, callbacks=[PostHocEMA(folder / "ours"), *naive, Theirs()])
    return folder, module, naive, theirs


def test_every_length_is_near_to_the_average_that_was_made_in_training(trained: Any) -> None:
    folder, module, naive, _ = trained
    for each in naive:
        assert each.step == 240
        average = post_hoc_average(folder / "ours", sigma_rel=each.sigma_rel)
        for name, expected in each.average.items():
            assert (average[name] - expected).norm() < 3e-3 * expected.norm(), (name, each.sigma_rel)
        # A short average is near to the last weights, from which half precision is as far.
        assert each.error(average, module) < (0.3 if each.sigma_rel < 0.05 else 0.03)


def test_it_agrees_with_ema_pytorch(trained: Any) -> None:
    folder, module, naive, theirs = trained
    for sigma_rel, each in ((0.08, naive[2]), (0.13, naive[3])):
        ours = post_hoc_average(folder / "ours", sigma_rel=sigma_rel)
        model = theirs.synthesize_ema_model(sigma_rel=sigma_rel).ema_model
        found = {f"layers.{name}": parameter for name, parameter in model.named_parameters()}
        assert each.error(ours, module) <= each.error(found, module) < 0.05  # their first decay is not 0


def test_the_default_saves_32_snapshots_of_each_in_half_precision(trained: Any) -> None:
    folder, module, *_ = trained
    found = snapshots(run_of(folder / "ours"))
    assert len(found) == 2 * 30  # every eighth of 240 steps, since 240 / 32 is no integer
    last = found["step=240-sigma_rel=0.05.pt"]
    assert last["averaged"] == [name for name, _ in module.named_parameters()]
    assert {last["state_dict"][name].dtype for name in last["averaged"]} == {torch.float16}
    assert last["state_dict"]["layers.1.running_var"].dtype == torch.float32
    assert last["state_dict"].keys() == module.state_dict().keys()


def test_training_and_checkpoints_are_those_of_the_raw_weights(tmp_path: Path) -> None:
    plain, module = build(NormNet), build(NormNet)
    fit(plain)
    run = fit(module, callbacks=[PostHocEMA(tmp_path, every_n_steps=5)])
    assert_equal(weights(module), weights(plain))
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert_equal(torch.load(tmp_path / "last.ckpt")["state_dict"], weights(plain))
    assert [each.step for each in snapshots_in(run_of(tmp_path))][::2] == [5, 10, 12]


def test_a_resumed_fit_goes_on_exactly_and_replaces_what_came_after(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    keep = ModelCheckpoint(tmp_path / "kept", "{step}", every_n_train_steps=6, save_top_k=-1)
    fit(build(NormNet), max_epochs=3, callbacks=[PostHocEMA(whole, every_n_steps=2)])
    saving = {"callbacks": [PostHocEMA(part, every_n_steps=3), keep], "enable_checkpointing": True}
    fit(build(NormNet), max_epochs=2, **saving)
    assert [each.step for each in snapshots_in(run_of(part))][::2] == [3, 6, 9, 12]
    again = {"max_epochs": 3, "ckpt_path": tmp_path / "kept" / "step=6.ckpt"}
    with pytest.raises(RuntimeError, match="stop"):  # before the first snapshot, so that none is lost
        fit(build(NormNet), **again, callbacks=[PostHocEMA(part, every_n_steps=2), Fails(7)])
    assert [each.step for each in snapshots_in(run_of(part))][::2] == [3, 6, 9, 12]
    fit(build(NormNet), **again, callbacks=[PostHocEMA(part, every_n_steps=2)])
    assert [each.step for each in snapshots_in(run_of(part))][::2] == [3, 6, 8, 10, 12, 14, 16, 18]
    expected = snapshots(run_of(whole))
    found = {name: held for name, held in snapshots(run_of(part)).items() if name in expected}
    assert_same_snapshots(found, {name: expected[name] for name in found})
    assert len(found) == 14


class Fails(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("stop")


class Ends(Callback):
    """Ends training once steps have been taken back."""

    step = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step < self.step:
            trainer.should_stop = True
        self.step = trainer.global_step


def test_another_fit_has_a_folder_of_its_own(tmp_path: Path) -> None:
    callback, module = PostHocEMA(tmp_path, every_n_steps=6), build(NormNet)
    run = fit(module, callbacks=[callback])
    assert [each.step for each in snapshots_in(run_of(tmp_path))][::2] == [6, 12]
    run.fit_loop.max_epochs = 3
    run.fit(module, loader(), loader(24))  # the same weights, Trainer and module: the averages go on
    assert [each.step for each in snapshots_in(run_of(tmp_path))][::2] == [6, 12, 18]
    fit(build(NormNet), callbacks=[callback])
    assert len(list(tmp_path.iterdir())) == 2
    with torch.no_grad():
        module.layers[0].weight.zero_()
    run.fit_loop.max_epochs = 4
    run.fit(module, loader(), loader(24))  # other weights
    assert len(list(tmp_path.iterdir())) == 3


def test_a_second_fit_goes_on_beside_an_average_that_was_left_in_the_module(tmp_path: Path) -> None:
    for place in (0, 1):
        tricks: list[Callback] = [lt.EMA(0.9)]
        tricks.insert(place, PostHocEMA(tmp_path / str(place), every_n_steps=6))
        run = fit(module := build(NormNet), callbacks=tricks)
        run.fit_loop.max_epochs = 3
        run.fit(module, loader(), loader(24))
        assert [each.step for each in snapshots_in(run_of(tmp_path / str(place)))][::2] == [6, 12, 18]


def test_a_fit_that_raises_behind_a_step_has_averaged_it(tmp_path: Path) -> None:
    callback, module = PostHocEMA(tmp_path, every_n_steps=100), build(NormNet)
    run = trainer(callbacks=[Fails(5), callback], max_epochs=2)
    with pytest.raises(RuntimeError, match="stop"):
        run.fit(module, loader(), loader(24))
    assert [averages.steps for averages in callback.running().values()] == [5, 5]
    run.save_checkpoint(tmp_path / "a.ckpt")
    (state,) = torch.load(tmp_path / "a.ckpt")["callbacks"].values()
    assert [averages["steps"] for averages in state["averages"].values()] == [5, 5]


def test_a_rewind_takes_averages_and_snapshots_back(tmp_path: Path) -> None:
    expected, found = tmp_path / "clean", tmp_path / "spiky"
    settings = {"train": batches(8, 9, 10), "max_epochs": 1}
    fit(build(Clean), callbacks=[PostHocEMA(expected, every_n_steps=3)], **settings)
    settings["train"] = batches()
    fit(spiky(), callbacks=[PostHocEMA(found, every_n_steps=3), rewind()], **settings)
    assert_same_snapshots(snapshots(run_of(found)), snapshots(run_of(expected)))


def test_snapshots_of_steps_that_were_taken_back_are_removed(tmp_path: Path) -> None:
    # A spike behind the snapshot of the ninth step takes the fit back to the eighth, where it ends.
    tricks = [PostHocEMA(tmp_path, every_n_steps=3), rewind(), Ends()]
    assert fit(spiky(), train=batches(), max_epochs=1, callbacks=tricks).global_step == 8
    assert [each.step for each in snapshots_in(run_of(tmp_path))][::2] == [3, 6, 8]


class Tied(PlainNet):
    """With one weight under two names, one that half precision cannot hold, and one that is unfrozen late."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
        self.layers[2].weight = self.layers[0].weight
        self.large = nn.Parameter(torch.tensor([1e6]))
        self.layers[3].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + 1e-9 * self.large

    def on_train_epoch_start(self) -> None:
        self.layers[3].requires_grad_(self.current_epoch >= 10)


def test_tied_large_and_late_weights(tmp_path: Path) -> None:
    module, naive = build(Tied), NaivePower(0.13)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*parameters in eval mode|.*frozen")
        fit(module, max_epochs=20, callbacks=[PostHocEMA(tmp_path, every_n_steps=3), naive])
    average = post_hoc_average(tmp_path, sigma_rel=0.13)
    assert average["layers.0.weight"].equal(average["layers.2.weight"])
    assert average["large"].item() == pytest.approx(naive.average["large"].item(), rel=1e-4)
    # Those of the last layer join after the tenth epoch, and naively with the first step.
    assert naive.error(average, module) < 0.05
    module.load_state_dict(average)


def test_a_training_of_unknown_length_needs_a_number_of_steps(tmp_path: Path) -> None:
    stream = DataLoader(Stream(loader()), batch_size=None)
    with pytest.raises(MisconfigurationException, match="saves 32 snapshots of a training whose length is unknown"):
        fit(build(NormNet), train=stream, callbacks=[PostHocEMA(tmp_path)])
    fit(build(NormNet), train=stream, callbacks=[PostHocEMA(tmp_path, every_n_steps=8)])
    assert [each.step for each in snapshots_in(run_of(tmp_path))][::2] == [8, 12]


def test_wrong_arguments() -> None:
    cases = [
        (ValueError, {"sigma_rels": (0.1,)}, "sigma_rels must be two different lengths or more"),
        (ValueError, {"sigma_rels": (0.1, 0.1)}, "sigma_rels must be two different lengths or more"),
        (ValueError, {"sigma_rels": (0.1, 0.4)}, r"sigma_rels\[1\] must be in"),
        (TypeError, {"sigma_rels": 0.1}, "sigma_rels must be list or tuple"),
        (ValueError, {"every_n_steps": 0}, "every_n_steps must be at least 1"),
    ]
    assert_refused(partial(PostHocEMA, "ema"), cases)


def test_a_checkpoint_cannot_name_a_folder_elsewhere(tmp_path: Path) -> None:
    run = fit(build(NormNet), max_epochs=1, callbacks=[PostHocEMA(tmp_path / "ema", every_n_steps=6)])
    run.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt")
    (state,) = checkpoint["callbacks"].values()
    state["run"] = "../elsewhere"
    torch.save(checkpoint, tmp_path / "a.ckpt")
    fit(build(NormNet), callbacks=[PostHocEMA(tmp_path / "ema", every_n_steps=6)], ckpt_path=tmp_path / "a.ckpt")
    assert not (tmp_path / "elsewhere").exists()
    assert len(list((tmp_path / "ema").iterdir())) == 2


class Small(NormNet):
    """With the scale of a residual branch of ConvNeXt, of which half precision keeps two digits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-6 * self.scale * x)


def test_what_half_precision_does_not_hold_stays_in_full(tmp_path: Path) -> None:
    fit(module := build(Small), max_epochs=8, callbacks=[PostHocEMA(tmp_path), naive := NaivePower(0.13)])
    found = post_hoc_average(tmp_path, sigma_rel=0.13)["scale"]
    assert (found - naive.average["scale"]).norm() < 3e-3 * naive.average["scale"].norm()
    kinds = {name: tensor.dtype for name, tensor in snapshots(run_of(tmp_path)).popitem()[1]["state_dict"].items()}
    assert kinds["scale"] == torch.float32
    assert kinds["layers.0.weight"] == torch.float16
    assert module.scale.dtype == torch.float32


def test_a_device_saves_what_the_host_saves(tmp_path: Path) -> None:
    fit(build(NormNet), callbacks=[PostHocEMA(tmp_path / "host", every_n_steps=5)])
    with device("simulated cuda") as there:
        fit(build(NormNet), callbacks=[PostHocEMA(tmp_path / "there", every_n_steps=5)], accelerator=there.name)
    expected, found = (snapshots(run_of(tmp_path / name)) for name in ("host", "there"))
    assert_same_snapshots(found, expected)


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    fit(build(NormNet), callbacks=[PostHocEMA(tmp_path / "ema")], fast_dev_run=2)
    assert not (tmp_path / "ema").exists()


def test_the_table_of_tricks_says_how_much_disk_is_used(tmp_path: Path) -> None:
    size = 2 * 2 * sum(weight.numel() for weight in build(NormNet).parameters())
    for arguments, epochs, disk in (
        ({}, 40, readable(30 * size)),
        ({"every_n_steps": 5}, 2, readable(3 * size)),
        ({"every_n_steps": 5}, -1, f"{readable(size)} a snapshot"),
    ):
        rows: list[Any] = []
        callback = PostHocEMA(tmp_path, **arguments)
        look = LambdaCallback(on_train_start=lambda run, *_, mine=callback, rows=rows: rows.append(mine.row(run)))
        with pytest.raises(RuntimeError, match="stop"):
            fit(build(NormNet), callbacks=[callback, look, Fails(1)], max_epochs=epochs)
        assert rows[0][1]["disk"] == disk


def test_a_checkpoint_with_other_lengths_or_weights_is_refused(tmp_path: Path) -> None:
    run = fit(build(NormNet), max_epochs=1, callbacks=[PostHocEMA(tmp_path / "ema", every_n_steps=6)])
    run.save_checkpoint(tmp_path / "a.ckpt")
    other = PostHocEMA(tmp_path / "ema", sigma_rels=(0.05, 0.2), every_n_steps=6)
    with pytest.raises(MisconfigurationException, match=r"has averages of the lengths 0\.05, 0\.1, with which"):
        fit(build(NormNet), callbacks=[other], ckpt_path=tmp_path / "a.ckpt")
    assert len(list((tmp_path / "ema").iterdir())) == 1


def in_two_processes(folder: Path, engine: str) -> dict[str, Any]:
    """The weights after a fit that was resumed from a checkpoint, in the folder of a strategy that has one."""
    kind: Any = ShardedNet if engine == "FSDP2" else PlainNet
    strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if engine == "FSDP2" else "ddp"
    settings = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False, "strategy": strategy}
    first = partial(PostHocEMA, folder / "ema", every_n_steps=2)
    run = fit(build(kind), max_epochs=1, callbacks=[first(), lt.EMA(0.9)], **settings)
    run.save_checkpoint(folder / "a.ckpt")
    if engine == "FSDP2":
        settings["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fit(build(kind), max_epochs=2, callbacks=[first(), lt.EMA(0.9)], ckpt_path=folder / "a.ckpt", **settings)
    return {}


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_two_ranks_save_what_one_process_saves(engine: str, tmp_path: Path) -> None:
    run_ranks(in_two_processes, tmp_path, engine)
    alone = tmp_path / "alone"
    fit(build(PlainNet), train=loader(48, batch_size=16), callbacks=[PostHocEMA(alone, every_n_steps=2)])
    found, expected = snapshots(run_of(tmp_path / "ema")), snapshots(run_of(alone))
    assert found.keys() == expected.keys() | {f"step=3-sigma_rel={length}.pt" for length in (0.05, 0.1)}
    for name in expected:
        for key, weight in expected[name]["state_dict"].items():
            torch.testing.assert_close(found[name]["state_dict"][key].float(), weight.float(), atol=5e-4, rtol=1e-3)


def test_the_decay_forgets_the_first_step() -> None:
    assert power_decay(1, 0.1) == 0.0
    assert power_decay(100, 0.1) == (1 - 1 / 100) ** (power_of(0.1) + 1)
    with pytest.raises(ValueError, match="step must be at least 1"):
        power_decay(0, 0.1)
