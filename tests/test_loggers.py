"""What tricks measure goes to every logger, with the step numbers of Lightning's own metrics."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

import lightning_tricks as lt
from lightning_tricks_cli.logged import LOGGED
from tests.conformance.settings import SETTINGS
from tests.conformance.trick import public_name
from tests.nets import NormNet, build, fit

Logged = dict[str, list[tuple[int, float]]]  # steps and values

KEYS = {name: set(metrics) for name, metrics in LOGGED.items()}  # what the cards say
KEYS["GradientStats"] |= {f"{key}/layers.{place}" for key in KEYS["GradientStats"] for place in (0, 1, 3)}
KEYS["FitsMemory"] = set()  # as long as whole batches fit
KEYS["Throughput"] -= {"tricks/tokens_per_second", "tricks/mfu"}  # of other batches, and of a GPU
# ScheduleFree has no average beside it, and GradientStats has steps of its own.
EVERY = {key for name, keys in KEYS.items() for key in keys if name not in ("GradientStats", "ScheduleFree")}
STEPS = [1, 3, 5, 7, 9, 11]  # of two epochs of six batches, every second


class Sharp(lt.SAMMixin, NormNet):
    sam = lt.SAM(0.05)


def all_at_once(loggers: Any) -> dict[str, float]:
    callbacks = [
        *(lt.HardExampleFilter(), lt.SkipNonFinite(), lt.RewindOnSpike(), lt.AutoClip()),
        *(lt.EMA(0.9), lt.SWA(0, validate="raw", at_end="raw")),
        *(lt.DataWait(warn=1.0), lt.Throughput(), lt.Distill(lt.Teacher(0.9))),
    ]
    run = fit(build(Sharp), logger=loggers, callbacks=callbacks, log_every_n_steps=2)
    return {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("tricks/")}


def from_csv(folder: Path) -> Logged:
    found: Logged = {}
    for row in csv.DictReader((folder / "metrics.csv").read_text().splitlines()):
        for name, value in row.items():
            if value and name not in ("step", "epoch"):
                found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def from_tensorboard(folder: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def from_wandb(folder: Path) -> Logged:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found: Logged = {}
    for data in wandb_records(file.read_bytes()):
        history = Record.FromString(data).history
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for name in row.keys() - {"trainer/global_step"}:
            if not name.startswith("_"):
                found.setdefault(name, []).append((row["trainer/global_step"], row[name]))
    return found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """What an offline run's file holds: a log of LevelDB's behind seven bytes; wandb itself has no reader in Python."""
    place, record, block = 7, b"", 32768
    while place < len(data):
        if (left := block - place % block) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += 7 + length
        record += data[place - length : place]
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


KINDS: dict[str, tuple[Callable[[Path], Logger], Callable[[Path], Logged]]] = {
    "CSV": (lambda folder: CSVLogger(folder, "", ""), from_csv),
    "TensorBoard": (lambda folder: TensorBoardLogger(folder, "", ""), from_tensorboard),
    "WandB": (lambda folder: WandbLogger(save_dir=folder, offline=True), from_wandb),
}


ALONE = [["CSV"], ["TensorBoard"], pytest.param(["WandB"], marks=pytest.mark.slow)]  # it is among all three, too


@pytest.mark.few(2)
@pytest.mark.parametrize("names", [*ALONE, ["CSV", "TensorBoard", "WandB"], []], ids=str)
def test_every_metric_goes_to_every_logger(names: list[str], tmp_path: Path) -> None:
    loggers = [KINDS[name][0](tmp_path / name) for name in names]
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    last = all_at_once(loggers)
    assert last.keys() == EVERY
    for name in names:
        if name == "WandB":
            wandb.finish()
            wandb.teardown()  # waits for the process that writes
        logged = KINDS[name][1](tmp_path / name)
        assert {key for key in logged if key.startswith("tricks/")} == EVERY
        assert [step for step, _ in logged["train_loss_step"]] == STEPS
        for key in EVERY:
            assert [step for step, _ in logged[key]] == STEPS, key
            if key != "tricks/data_wait":  # callback_metrics has the share of the epoch
                assert logged[key][-1][1] == pytest.approx(last[key], rel=1e-6)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", [name for name, trick in SETTINGS.items() if not trick.images])
def test_each_trick_logs_what_is_said_here(name: str, tmp_path: Path) -> None:
    trick = SETTINGS[name]
    module = build(lambda: trick.module(NormNet, "on")())
    with pytest.raises(FloatingPointError, match="not finite") if trick.stops else nullcontext():
        fit(module, logger=CSVLogger(tmp_path, "", ""), callbacks=trick.make_callbacks("on"), log_every_n_steps=1)
    assert {key for key in from_csv(tmp_path) if key.startswith("tricks/")} == KEYS.get(public_name(name), set())
