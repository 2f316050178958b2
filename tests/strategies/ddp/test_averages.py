"""Averages of weights where ranks train apart, in real processes beside the average of a plain loop's mean weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, OnExceptionCheckpoint, WeightAveraging
from torch import Tensor

import lightning_tricks as lt
from lightning_tricks.callbacks.post_hoc_ema import power_decay
from lightning_tricks.core.averaging.decay import ema_decay
from tests.nets import NormNet, PlainNet, SaveAt, assert_close, assert_equal, weights
from tests.ranks import run_ranks
from tests.strategies.ddp.test_compression import SGDNet
from tests.strategies.ddp.test_outer import IN_TURN, STEPS, Deep, Workers, refused, run, samples

VALIDATED, SAVED = (5, 10), 7  # steps; all of them amid a period of 4 steps
MEANS = (*VALIDATED, SAVED, STEPS)  # the steps after which the plain loop takes the mean, too
DECAY = 0.8


class SeenBy(L.LightningModule):
    """The weights of each validation step, also of one that callbacks do not see."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("seen", []).append(weights(self))
        super().validation_step(batch, batch_idx)


class BothDeep(SeenBy, Deep):
    pass


def at_saved(do: Callable[[L.Trainer], object]) -> LambdaCallback:
    """Does something amid a period."""
    return LambdaCallback(on_train_batch_end=lambda run, *_: do(run) if run.global_step == SAVED else None)


def halt(trainer: L.Trainer) -> None:
    raise ArithmeticError("halt")


def fitted(average: Callback, *others: Callback, kind: type[PlainNet] = Deep, **settings: Any) -> dict[str, Any]:
    """What validations see, and the end."""
    seen: list[dict[str, Tensor]] = []
    note = LambdaCallback(on_validation_batch_start=lambda trainer, module, *_: seen.append(weights(module)))
    defaults = {"limit_val_batches": 1, "val_check_interval": 5, "callbacks": [average, note, *others]}
    _, module = run(kind, **{**defaults, **settings})
    return {"seen": seen, "end": weights(module), "steps": getattr(module, "seen", [])}


ema = partial(lt.EMA, DECAY)
swa = partial(lt.SWA, 0, every_n_steps=2)
LOCAL: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


def resumable(average: Any, path: str, **settings: Any) -> dict[str, Any]:
    """A fit that saves at step 7, and one that goes on from there."""
    unbroken = fitted(average(), lt.ExactResume(), SaveAt(path, step=SAVED), **settings)
    return {"unbroken": unbroken, "resumed": fitted(average(), lt.ExactResume(), ckpt_path=path, **settings)}


def quick_fits(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"EMA": resumable(ema, f"{folder}/ema.ckpt", fragments=2)}
    norm = {"kind": NormNet, **LOCAL, "limit_val_batches": 0}
    found["buffers"] = fitted(ema(buffers="average"), SaveAt(f"{folder}/norm.ckpt", step=SAVED), **norm)
    refused(WeightAveraging(), "WeightAveraging.*: with compression='local_sgd' .* average those of rank 0")
    refused(lt.Teacher(), "Teacher.*: with compression='local_sgd' .* learn from an average of its own")
    refused(ema(), "EMA.*: .* skips the steps that overflow in fp16 by itself", precision="16-mixed")
    return found


def all_fits(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"SWA": resumable(swa, f"{folder}/swa.ckpt")}
    found["both"] = fitted(ema(validate="both"), SaveAt(f"{folder}/both.ckpt", step=SAVED), kind=BothDeep)
    found["host"] = fitted(ema(device="cpu"), SaveAt(f"{folder}/host.ckpt", step=SAVED))
    average, read = ema(validate="raw", at_end="raw"), dict[str, Tensor]()
    found["read"] = {**fitted(average, at_saved(lambda _: read.update(average.averaged_state_dict()))), "found": read}
    found["two"] = fitted(ema(), lt.EMA(0.5, validate="raw", at_end="raw"), SaveAt(f"{folder}/two.ckpt", step=SAVED))
    found["post hoc"] = fitted(lt.PostHocEMA(f"{folder}/snapshots", every_n_steps=6), limit_val_batches=0)
    found["recalibrated"] = fitted(swa(), kind=NormNet, **LOCAL, max_steps=12, limit_val_batches=0)
    found["period 1"] = fitted(ema(), kind=SGDNet, **LOCAL, local_sgd_period=1)
    found["DDP"] = fitted(ema(), kind=SGDNet, **lt.preset("ddp_bf16", precision="32-true"))
    average = ema()
    with pytest.raises(ArithmeticError, match="halt"):
        run(callbacks=[average, at_saved(halt), OnExceptionCheckpoint(folder, "halted")], enable_checkpointing=True)
    average.coordinator.trainer.save_checkpoint(f"{folder}/again.ckpt")
    return found


def on_four(path: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"fragments": 2}
    found = fitted(ema(), SaveAt(f"{path}.4", step=SAVED), **settings)
    return {"EMA": found, "resumed": fitted(ema(), ckpt_path=path, max_steps=SAVED, **settings)}


# -- the plain loop ---------------------------------------------------------------------------------------------------


def means(workers: Workers) -> dict[str, Tensor]:
    """The means of the workers' weights and buffers."""
    every = [weights(module) for module in workers.modules]
    return {
        name: sum(state[name] for state in every) / len(every) for name, v in every[0].items() if v.is_floating_point()
    }


def plain_averages(
    kind: type[PlainNet] = Deep,
    *,
    world: int = 2,
    average: str = "EMA",
    decay: float = DECAY,
    until: int = STEPS,
    saved: int = SAVED,
    **loop: Any,
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The averages of the workers' mean weights after each step, and these; a checkpoint averages states, too.

    Workers begin each step with the buffers of the first, as DDP lets them, and averages as of the first forward pass.
    """
    workers = Workers(kind, world)
    averages, raw, taken = [means(workers)], [means(workers)], 0
    for step in range(1, until + 1):
        for module in workers.modules:
            for buffer, first in zip(module.buffers(), workers.modules[0].buffers(), strict=True):
                buffer.data.copy_(first)
        workers.train(step, **{"mean_at": MEANS, **loop})
        if step == saved:
            average_states(workers)
        raw.append(means(workers))
        if step == 1:
            averages[0].update({name: value for name, value in raw[1].items() if "running" in name})
        fraction = 1 - ema_decay(step - 1, decay)
        if average == "SWA":  # of every second step, and the last
            fraction = 1 / (taken + 1) if step % 2 == 0 or step == until else 0.0
            taken += fraction > 0
        averages.append({name: value.lerp(raw[-1][name], fraction) for name, value in averages[-1].items()})
    return averages, raw


def average_states(workers: Workers) -> None:
    configured = [each["optimizer"] if isinstance(each, dict) else each for each in workers.configured]
    for states in zip(*[optimizer.state.values() for optimizer in configured], strict=True):
        for name in states[0].keys() - {"step"}:
            mean = sum(state[name] for state in states) / len(states)
            for state in states:
                state[name].copy_(mean)


def are(found: dict[str, Any], expected: dict[str, Tensor], names: Collection[str] = ()) -> None:
    """Whether weights are as expected, but for counts."""
    chosen = names or expected.keys()
    assert_close({name: found[name] for name in chosen}, {name: expected[name] for name in chosen}, 1e-6)


def is_averaged(ranks: list[dict[str, Any]], expected: list[dict[str, Tensor]], name: str) -> None:
    """Whether all ranks validate, and end with, the average of the mean weights."""
    for found in [rank[name] for rank in ranks]:
        assert len(found["seen"]) == len(VALIDATED)
        for weights_then, step in zip(found["seen"], VALIDATED, strict=True):
            are(weights_then, expected[step])
        are(found["end"], expected[STEPS])
        for weights_then, firsts in zip(found["seen"], ranks[0][name]["seen"], strict=True):
            assert_equal(weights_then, firsts)


def loaded(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("averages")


@pytest.fixture(scope="module")
def quick(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(quick_fits, str(folder))


@pytest.fixture(scope="module")
def others(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(all_fits, str(folder))


# -- each time --------------------------------------------------------------------------------------------------------


def test_an_ema_is_that_of_the_mean_weights_also_amid_a_period(quick: list[dict[str, Any]], folder: Path) -> None:
    expected, raw = plain_averages(parts=IN_TURN)
    unbroken = [{"EMA": rank["EMA"]["unbroken"]} for rank in quick]
    is_averaged(unbroken, expected, "EMA")
    checkpoint = loaded(folder / "ema.ckpt")
    are(checkpoint["state_dict"], expected[SAVED])
    are(checkpoint["callbacks"][f"EMA(decay={DECAY})"]["raw"], raw[SAVED])


def test_a_fit_with_averages_resumes_exactly(quick: list[dict[str, Any]]) -> None:
    for found in [rank["EMA"] for rank in quick]:
        assert_equal(found["resumed"]["end"], found["unbroken"]["end"])
        assert_equal(found["resumed"]["seen"][-1], found["unbroken"]["seen"][-1])


def test_averaged_buffers_are_those_of_all_ranks(quick: list[dict[str, Any]], folder: Path) -> None:
    expected, _ = plain_averages(NormNet, lr=1.0, momentum=0.0, mean_at=(SAVED, STEPS))
    are(loaded(folder / "norm.ckpt")["state_dict"], expected[SAVED])
    for rank in quick:
        are(rank["buffers"]["end"], expected[STEPS])


# -- slow -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_mean_of_snapshots_is_that_of_the_mean_weights(others: list[dict[str, Any]], folder: Path) -> None:
    expected, _ = plain_averages(average="SWA")
    is_averaged([{"SWA": rank["SWA"]["unbroken"]} for rank in others], expected, "SWA")
    are(loaded(folder / "swa.ckpt")["state_dict"], expected[SAVED])
    for found in [rank["SWA"] for rank in others]:
        assert_equal(found["resumed"]["end"], found["unbroken"]["end"])


@pytest.mark.slow
def test_recalibrated_statistics_are_those_of_the_mean_weights(others: list[dict[str, Any]]) -> None:
    loop: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "mean_at": (12,), "until": 12, "saved": 0}
    expected = plain_averages(NormNet, average="SWA", **loop)[0][12]
    parameters = [name for name in expected if "running" not in name]
    module = NormNet()
    module.load_state_dict({**weights(module), **{name: expected[name] for name in parameters}})
    batches = [batch for rank in range(2) for batch in samples(rank, 2)]
    inputs = [module.layers[0](x) for x, _ in batches]
    expected["layers.1.running_mean"] = sum(x.mean(0) for x in inputs).detach() / len(batches)
    expected["layers.1.running_var"] = sum(x.var(0) for x in inputs).detach() / len(batches)
    for rank in others:
        are(rank["recalibrated"]["end"], expected)


@pytest.mark.slow
def test_both_kinds_of_weights_are_means_where_both_are_validated(others: list[dict[str, Any]], folder: Path) -> None:
    expected, raw = plain_averages()
    is_averaged(others, expected, "both")
    for number, step in enumerate(VALIDATED):
        for rank in others:
            are(rank["both"]["steps"][2 * number], raw[step])
            are(rank["both"]["steps"][2 * number + 1], expected[step])
    are(loaded(folder / "both.ckpt")["state_dict"], expected[SAVED])


@pytest.mark.slow
def test_several_averages_and_those_in_host_memory(others: list[dict[str, Any]], folder: Path) -> None:
    (expected, _), (other, _) = plain_averages(), plain_averages(decay=0.5)
    is_averaged(others, expected, "host")
    is_averaged(others, expected, "two")
    checkpoint = loaded(folder / "two.ckpt")
    are(checkpoint["state_dict"], expected[SAVED])
    are(checkpoint["callbacks"]["EMA(decay=0.5)"]["averaged"], other[SAVED])


@pytest.mark.slow
def test_all_ranks_read_the_same_average(others: list[dict[str, Any]]) -> None:
    expected = plain_averages()[0][SAVED]
    for rank in others:
        are(rank["read"]["found"], expected)
        assert_equal(rank["read"]["found"], others[0]["read"]["found"])


@pytest.mark.slow
@pytest.mark.usefixtures("others")
def test_snapshots_are_of_the_mean_weights(folder: Path) -> None:
    workers = Workers()
    average = means(workers)
    for step in range(1, 7):
        workers.train(step, mean_at=())
        fraction = 1 - power_decay(step, 0.05)
        average = {name: value + fraction * (means(workers)[name] - value) for name, value in average.items()}
    files = sorted((folder / "snapshots").glob("*/*"))
    first = next(file for file in files if "6" in file.stem and "0.05" in file.name)
    halves = loaded(first)["state_dict"]
    assert_close({name: value.float() for name, value in halves.items()}, average, 1e-3)


@pytest.mark.slow
def test_with_period_1_it_is_that_of_ddp(others: list[dict[str, Any]]) -> None:
    for rank in others:
        assert_close(rank["period 1"]["end"], rank["DDP"]["end"], 1e-6)
        for here, there in zip(rank["period 1"]["seen"], rank["DDP"]["seen"], strict=True):
            assert_close(here, there, 1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("others")
def test_the_checkpoint_of_an_exception_has_the_mean(folder: Path) -> None:
    expected = plain_averages(mean_at=(), until=SAVED)[0][SAVED]
    for name in ("halted.ckpt", "again.ckpt"):
        are(loaded(folder / name)["state_dict"], expected)


@pytest.mark.slow
def test_four_ranks_and_a_resume_on_twice_as_many(quick: list[dict[str, Any]], folder: Path) -> None:
    path = folder / "ema.ckpt"
    ranks = run_ranks(on_four, str(path), nprocs=4)
    expected, _ = plain_averages(world=4, parts=IN_TURN)
    is_averaged(ranks, expected, "EMA")
    are(loaded(Path(f"{path}.4"))["state_dict"], expected[SAVED])
    for rank in ranks:
        assert_equal(rank["resumed"]["end"], loaded(path)["state_dict"])
