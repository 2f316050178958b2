"""A checkpoint of an older class, whose weights the module's hooks rename and reshape: averaged and raw ones alike."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    LambdaCallback,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR

import lightning_tricks as lt
from tests.conformance.runs import Steps
from tests.core.weights.test_local import ALL, train
from tests.nets import Net, NormNet, PlainNet, assert_close, assert_equal, build, fit, rank_loader, weights
from tests.ranks import run_ranks


class Old(Net):
    """The class that has saved the checkpoints: three layers, one of them with statistics, and its own names."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        del self.layers
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Renamed(Old):
    """The same network with other names."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        del self.first, self.norm, self.last
        self.stem, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.stem(x))))


def renamed(name: str) -> str:
    return name.replace("first.", "stem.").replace("last.", "head.")


class ByHook(Renamed):
    """The migration as Lightning's documentation has it."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {renamed(name): value for name, value in checkpoint["state_dict"].items()}


class InPlace(Renamed):
    """Changes the dictionary that it is given."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            state[renamed(name)] = state.pop(name)


class ByPreHook(Renamed):
    """The migration as torch has it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.register_load_state_dict_pre_hook(self.rename)

    def rename(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in list(state):
            state[renamed(name)] = state.pop(name)


class Transposed(nn.Module):
    """A linear layer that holds the transpose of its weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.T, self.bias)


def transpose_momentum(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"]:
        for each in state["state"].values():
            if each["momentum_buffer"].shape == (16, 8):
                each["momentum_buffer"] = each["momentum_buffer"].T.contiguous()


class Reshaped(Old):
    """A layer whose weight is the transpose of the old one, under the same name."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.first = Transposed(8, 16)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weight = checkpoint["state_dict"]["first.weight"]
        if weight.shape == (16, 8):
            checkpoint["state_dict"]["first.weight"] = weight.T.contiguous()
            transpose_momentum(checkpoint)


class Versioned(Transposed):
    """The same by torch's versions of modules."""

    _version = 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2 and state[f"{prefix}weight"].shape == (16, 8):
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class ByVersion(Old):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.first = Versioned(8, 16)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"]:
            for each in state["state"].values():
                if each["momentum_buffer"].shape == (16, 8):
                    each["momentum_buffer"].t_()


class InPlacePreHook(ByPreHook):
    """Renames weights and changes others in place, there and back."""

    def rename(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        super().rename(module, state, prefix)
        state["head.weight"] *= 2
        state["head.weight"] = state["head.weight"] / 2
        state["stem.weight"] *= -1
        state["stem.weight"] = -state["stem.weight"]


AVERAGES: dict[str, Callable[[], Any]] = {
    "EMA": lambda: lt.EMA(0.9),
    'EMA(buffers="average")': lambda: lt.EMA(0.9, buffers="average"),
    'EMA(validate="raw")': lambda: lt.EMA(0.9, validate="raw"),
    "SWA": lambda: lt.SWA(3, every_n_steps=2),
}


def as_old(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names and in the shapes of the old class."""
    names = {"stem.": "first.", "head.": "last."}
    old = {next((o + n.removeprefix(k) for k, o in names.items() if n.startswith(k)), n): v for n, v in state.items()}
    return {name: v.T if name == "first.weight" and v.shape == (8, 16) else v for name, v in old.items()}


class Look(Callback):
    """What there is of weights and averages where a checkpoint is saved, or else where training begins.

    Args:
        average: The callback whose averages are kept; None for the weights alone.
        path: The checkpoint, saved at the end of the second validation, or behind an optimizer step.
        step: The number of that step.
    """

    def __init__(self, average: Any = None, path: Path | None = None, step: int | None = None) -> None:
        self.average, self.path, self.step = average, path, step

    def look(self, module: Any) -> None:
        self.raw = weights(module)
        self.optimizer = deepcopy(module.trainer.optimizers[0].state_dict())
        if self.average is not None:
            self.averaged = {name: value.clone() for name, value in self.average._running.tensors.items()}
            self.updates = self.average._running.updates

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.path is None:
            self.look(pl_module)

    def save(self, trainer: Any, pl_module: Any) -> None:
        self.look(pl_module)
        trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.path is not None and trainer.global_step == self.step:
            self.save(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.path is not None and self.step is None and trainer.current_epoch == 1:
            self.save(trainer, pl_module)


Half = tuple[Path, Look, Any]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Half]:
    """A checkpoint of the old class after half of the epochs, what it has, and the module that was trained on."""

    @cache
    def run(average: str, precision: Any) -> Half:
        callback, module = AVERAGES[average](), build(Old)
        look = Look(callback, tmp_path_factory.mktemp("old") / "x.ckpt")
        fit(module, callbacks=[callback, look], max_epochs=4, precision=precision)
        assert look.path is not None
        return look.path, look, module

    return run


@pytest.mark.few(9)
@pytest.mark.parametrize("kind", [Old, ByHook, InPlace, ByPreHook, InPlacePreHook, Reshaped, ByVersion])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("average", AVERAGES)
def test_a_checkpoint_of_an_older_class_resumes_exactly(
    kind: type[Old], average: str, precision: Any, half: Callable[[str, Any], Half]
) -> None:
    (path, saved, whole), rest, callback = half(average, precision), build(kind), AVERAGES[average]()
    look = Look(callback)
    fit(rest, callbacks=[callback, look], max_epochs=4, precision=precision, ckpt_path=path)
    assert_equal(as_old(look.raw), saved.raw)
    assert_equal(as_old(look.averaged), saved.averaged)
    assert callback._running.updates == saved.average._running.updates
    if precision == "32-true":  # the product with a transpose is rounded otherwise, in bf16 by much
        check = assert_close if kind in (Reshaped, ByVersion) else assert_equal
        check(as_old(weights(rest)), weights(whole))


def test_several_averages_and_a_schedule_free_one_resume_exactly(tmp_path: Path) -> None:
    def several() -> list[Any]:
        return [lt.EMA(0.99, validate="raw", at_end="raw"), lt.EMA(0.9), lt.SWA(3, validate="raw", at_end="raw")]

    for callbacks in (several, lambda: several()[::-1]):
        whole, rest, there, here = build(Old), build(ByHook), callbacks(), callbacks()
        fit(whole, callbacks=[*there, Look(path=tmp_path / "x.ckpt")], max_epochs=4)
        fit(rest, callbacks=here, max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
        assert_equal(as_old(weights(rest)), weights(whole))
        for ours, theirs in zip(here, there, strict=True):
            assert_equal(as_old(ours.averaged_state_dict()), theirs.averaged_state_dict())


class Free(Old):
    """By a schedule-free optimizer, which averages no statistics."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.norm = nn.Identity()

    def configure_optimizers(self) -> Any:
        return lt.optimizer("schedulefree_adamw", self, lr=0.01)


class RenamedFree(ByHook):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.norm = nn.Identity()

    configure_optimizers = Free.configure_optimizers


class Tied(Old):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.alias = self.last


class RenamedTied(ByHook):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.alias = self.head


class Prefixed(Old):
    """Saves its weights under other names than its own, and takes these back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("net."): value for name, value in state.items()}


@pytest.mark.parametrize(
    ("old", "new", "made"),
    [(Free, RenamedFree, lt.ScheduleFree), (Tied, RenamedTied, AVERAGES["EMA"]), (Prefixed, Prefixed, AVERAGES["EMA"])],
)
def test_schedule_free_averages_tied_weights_and_names_for_the_file_alone_resume_exactly(
    old: type[Old], new: type[Old], made: Callable[[], Any], tmp_path: Path
) -> None:
    whole, rest, average = build(old), build(new), made()
    fit(whole, callbacks=[average, Look(path=tmp_path / "x.ckpt")], max_epochs=4)
    fit(rest, callbacks=[made()], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert_equal(as_old(weights(rest)), weights(whole))


# -- hooks that do more than to rename --------------------------------------------------------------------------------


class Busy(ByHook):
    """Counts, notes, takes things out of the checkpoint, scales a weight in place and halves the momentum."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.loads, self.names, self.extra = 0, list[str](), nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.loads += 1
        self.names.append(checkpoint["callbacks"].pop("of old"))
        self.seen += 1
        state = checkpoint["state_dict"]
        state["head.weight"].data.mul_(2)
        state["seen"] = self.seen.clone()
        drawn = nn.Linear(1, 1)
        state |= {"extra.weight": drawn.weight.detach(), "extra.bias": drawn.bias.detach()}
        for each in checkpoint["optimizer_states"][0]["state"].values():
            each["momentum_buffer"].mul_(0.5)
        checkpoint["optimizer_states"][0]["param_groups"][0]["params"] += [6, 7]


def test_what_else_a_hook_does_is_done_once(half: Callable[[str, Any], Half]) -> None:
    path, saved, _ = half("EMA", "32-true")
    older = torch.load(path, weights_only=True)
    torch.save({**older, "callbacks": {**older["callbacks"], "of old": "x"}}, path := path.with_name("older.ckpt"))
    module, callback = build(Busy), lt.EMA(0.9)
    look = Look(callback)
    fit(module, callbacks=[callback, look], max_epochs=4, ckpt_path=path)
    assert (module.loads, len(module.names), module.seen.item()) == (1, 1, 1)
    for name, value in saved.raw.items():
        assert torch.equal(look.raw[renamed(name)], value * 2 if name == "last.weight" else value)
    for name, value in saved.averaged.items():
        assert torch.equal(look.averaged[renamed(name)], value * 2 if name == "last.weight" else value)
    assert torch.equal(look.averaged["extra.weight"], look.raw["extra.weight"])  # drawn once for both
    for number, state in saved.optimizer["state"].items():
        loaded = look.optimizer["state"][number]
        assert torch.equal(loaded["momentum_buffer"], state["momentum_buffer"] * 0.5)


class Once(ByHook):
    """Changes the first checkpoint that it is given alone."""

    done = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.done:
            super().on_load_checkpoint(checkpoint)
            self.done = True


def test_a_hook_that_does_not_do_the_same_again_is_refused(half: Callable[[str, Any], Half]) -> None:
    path, _, _ = half("EMA", "32-true")
    with pytest.raises(MisconfigurationException, match=r"Once.on_load_checkpoint changes .* differ in first\.bias"):
        fit(build(Once), callbacks=[lt.EMA(0.9)], max_epochs=4, ckpt_path=path)


class Scaled(Prefixed):
    """Changes values as well."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["state_dict"]["last.weight"] *= 2


def test_other_values_under_names_for_the_file_alone_are_refused(tmp_path: Path) -> None:
    fit(build(Prefixed), callbacks=[lt.EMA(0.9), Look(path=tmp_path / "x.ckpt")], max_epochs=4)
    with pytest.raises(MisconfigurationException, match=r"has saved them under other names than its own \(first"):
        fit(build(Scaled), callbacks=[lt.EMA(0.9)], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")


class Smaller(Old):
    """Has dropped a layer."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("extra.weight", "extra.bias"):
            checkpoint["state_dict"].pop(name, None)


class Larger(Old):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.extra = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((self.extra(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.first.parameters(), *self.norm.parameters(), *self.last.parameters()], lr=0.1)


@pytest.mark.parametrize("lenient", [False, True])
def test_a_layer_that_is_dropped_is_dropped_in_both(lenient: bool, tmp_path: Path) -> None:
    callback, look = lt.EMA(0.9), Look(rest := lt.EMA(0.9))
    saved = Look(callback, tmp_path / "x.ckpt")
    fit(build(Larger), callbacks=[callback, saved], max_epochs=4)
    module = build(Old if lenient else Smaller)
    module.strict_loading = not lenient
    fit(module, callbacks=[rest, look], max_epochs=4, ckpt_path=tmp_path / "x.ckpt")
    assert look.averaged.keys() == {name for name, _ in module.named_parameters()}
    assert_equal(look.averaged, {name: saved.averaged[name] for name in look.averaged})
    assert_equal(look.raw, {name: saved.raw[name] for name in look.raw})


# -- shards -----------------------------------------------------------------------------------------------------------


class Blocks(Net):
    """Has its layers under another name than the class that has saved the checkpoint."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.blocks = self.layers
        del self.layers

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("state_dict", {})
        for name in list(state):
            state[name.replace("layers", "blocks")] = state.pop(name)


class RenamedBlocks(Blocks, PlainNet):
    """Renames them in a hook, which gets no weights where the strategy loads them."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.blocks, mesh=self.device_mesh["data_parallel"])


def renamed_on_ranks(engine: str, folder: str) -> str:
    train(engine, lt.EMA(0.9))[1].save_checkpoint(f"{folder}/x.ckpt")
    module, steps = build(RenamedBlocks), Steps()
    module.strict_loading = False
    settings = {"train": rank_loader(), "devices": 2, "use_distributed_sampler": False, **ALL[engine][1]()}
    with pytest.raises(MisconfigurationException) as caught:
        fit(module, callbacks=[lt.EMA(0.9), steps], max_epochs=3, ckpt_path=f"{folder}/x.ckpt", **settings)
    assert steps.made == 0
    return str(caught.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("engine", ["fsdp2-one-file", "zero3", pytest.param("zero2", marks=pytest.mark.slow)])
def test_other_names_of_sharded_weights_are_refused(engine: str, tmp_path: Path) -> None:
    for message in run_ranks(renamed_on_ranks, engine, str(tmp_path)):
        assert "averages of weights that RenamedBlocks does not have: layers.0.bias, layers.0.weight" in message
        assert "no hook can rename them" in message


# -- fits that go on from checkpoints of another average: one of Lightning's, or another one of ours; and the revers---


pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),  # Lightning
    pytest.mark.filterwarnings("ignore:Swapping scheduler"),
]


THEIRS: dict[str, Callable[[], Callback]] = {
    "WeightAveraging": WeightAveraging,
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.9),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2),
}


def saved(path: Path, callback: Callback, kind: type[Net] = NormNet, **settings: Any) -> Look:
    """A checkpoint of three epochs of four, in whose last batches the average differs from the weights."""
    look = Look(path=path, step=18)
    fit(build(kind), callbacks=[callback, look], max_epochs=4, **settings)
    return look


def trained(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def resumed(path: Path, average: Any, kind: type[Net] = NormNet, **settings: Any) -> tuple[Any, Look]:
    module, look = build(kind), Look(average)
    fit(module, callbacks=[average, look], ckpt_path=path, **{"max_epochs": 5, **settings})
    return module, look


@pytest.mark.few(3)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (THEIRS["EMAWeightAveraging"], lambda: lt.EMA(0.9)),
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
    saved(path, THEIRS["EMAWeightAveraging"](), PlainNet)
    fit(there, callbacks=[THEIRS["EMAWeightAveraging"]()], max_epochs=5, ckpt_path=path)
    fit(here, callbacks=[lt.EMA(0.9, warmup=False)], max_epochs=5, ckpt_path=path)
    assert_close(weights(here), weights(there), 1e-6)


def test_a_mean_of_stochastic_weight_averaging_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    kept = saved(path, THEIRS["StochasticWeightAveraging"]())
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
    ("kind", "before", "after"),
    [
        ("EMAWeightAveraging", THEIRS["EMAWeightAveraging"], lambda: lt.SWA(0.1)),
        ("StochasticWeightAveraging", THEIRS["StochasticWeightAveraging"], lambda: lt.EMA(0.9)),
        ("EMA", lambda: lt.EMA(0.9), lambda: lt.SWA(0.1)),
        ("SWA", lambda: lt.SWA(6, every_n_steps=2), lambda: lt.EMA(0.9)),
    ],
    ids=["their EMA then SWA", "their SWA then EMA", "EMA then SWA", "SWA then EMA"],
)
def test_an_average_of_another_kind_gives_its_raw_weights_alone(
    kind: str, before: Callable[[], Callback], after: Callable[[], Any], tmp_path: Path
) -> None:
    kept = saved(tmp_path / "x.ckpt", before())
    with pytest.warns(UserWarning, match=rf"new average: the checkpoint has one of {kind}(\(.*\))?, whose raw weights"):
        _, look = resumed(tmp_path / "x.ckpt", after())
    assert_equal(look.raw, kept.raw)
    assert (look.updates, look.averaged) == (0, {})


def test_one_average_of_several_takes_it(tmp_path: Path) -> None:
    kept = saved(tmp_path / "x.ckpt", THEIRS["EMAWeightAveraging"]())
    first, second = lt.EMA(0.9), lt.EMA(0.99, validate="raw", at_end="raw")
    look = Look(first)
    with pytest.warns(UserWarning, match=r"EMA\(decay=0.99.*begins a new average"):
        fit(build(NormNet), callbacks=[second, first, look], max_epochs=5, ckpt_path=tmp_path / "x.ckpt")
    assert look.updates == 6 * 3
    assert_equal(look.raw, kept.raw)
    assert second._running.updates == 12


@pytest.mark.parametrize("theirs", THEIRS)
def test_a_file_whose_raw_weights_are_lost_is_refused(theirs: str, tmp_path: Path) -> None:
    fit(build(PlainNet), callbacks=[THEIRS[theirs]()], max_epochs=4).save_checkpoint(tmp_path / "x.ckpt")
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
    saved(tmp_path / "x.ckpt", THEIRS["StochasticWeightAveraging"](), Scheduled)
    with pytest.raises(MisconfigurationException, match=r"has the state of SWALR.*StepLR cannot go on from it"):
        resumed(tmp_path / "x.ckpt", lt.SWA(2), Scheduled)


class OtherNames(Blocks, NormNet):
    """With statistics."""


@pytest.mark.parametrize("theirs", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_a_module_that_renames_its_weights_goes_on(theirs: str, tmp_path: Path) -> None:
    ema, kept = theirs == "EMAWeightAveraging", saved(tmp_path / "x.ckpt", THEIRS[theirs]())
    _, look = resumed(tmp_path / "x.ckpt", lt.EMA(0.9) if ema else lt.SWA(2), OtherNames)
    assert_equal({name.replace("blocks.", "layers."): value for name, value in look.raw.items()}, kept.raw)
    file = torch.load(tmp_path / "x.ckpt", weights_only=True)
    average = file["state_dict"] if ema else file["callbacks"][theirs]["average_model_state"]
    for name, value in look.averaged.items():
        assert torch.equal(value, average[name.replace("blocks.", "layers.")])


class Aliased(NormNet):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.alias = self.layers[3]


@pytest.mark.parametrize("kind", [NormNet, Aliased])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(lambda: lt.EMA(0.9), THEIRS["EMAWeightAveraging"]), (lambda: lt.SWA(6, every_n_steps=2), WeightAveraging)],
    ids=["EMA", "SWA"],
)
def test_weight_averaging_goes_on_from_a_checkpoint_of_ours(
    ours: Callable[[], Any], theirs: Callable[[], Any], kind: type[Net], tmp_path: Path
) -> None:
    path, average = tmp_path / "x.ckpt", ours()
    kept = saved(path, average, kind)
    look, callback = Look(), theirs()
    seen: dict[str, Any] = {}
    note = LambdaCallback(on_train_start=lambda *_: seen.update(deepcopy(callback._average_model.state_dict())))
    fit(build(kind), callbacks=[callback, look, note], max_epochs=5, ckpt_path=path)
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
