"""Does a trick help on this task? Fits with and without it, paired by seed, and what they show."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, Literal
from urllib.parse import quote

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.adapters.base import weights_checksum
from lightning_tricks.core.checks import check_bool, check_choice, check_count, check_range, check_type
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.trainer import heed_sigterm
from lightning_tricks.core.report import progress
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import new_folder, require_folder, require_own
from lightning_tricks.evaluation.comparison import Comparison, Mode, Run
from lightning_tricks.evaluation.fresh import (
    Fresh,
    caller_unchanged,
    marked_is_empty,
    parts_of_module,
    parts_of_trainer,
)
from lightning_tricks.evaluation.plan import locked, read_record, require_lock, require_plan, this_rank, write_record

__all__ = ["Comparison", "compare"]

Arm = Callable[[Path], tuple[Any, ...]]
Checkpoint = Literal["last", "best"]
RESULTS = r"[^.].*"  # names in the folder of an arm, without temporary files of a process that was killed
MOST_BYTES = 255  # of a name on most disks
LENGTH_BYTES = 60  # of what at_equal_time adds to a name
EQUAL = 0.05  # the share by which times may differ to be called equal: epochs are whole numbers


def compare(
    arms: Mapping[str, Arm],
    *,
    metric: str,
    mode: Mode,
    folder: str | Path,
    seeds: int | Sequence[int] = 5,
    checkpoint: Checkpoint = "last",
    equal_time: bool = False,
) -> Comparison:
    """Train with and without tricks over seeds: paired differences, 95% intervals, cost, and what is inconclusive.

    For each seed ``s`` and arm ``a``, ``d_s = metric_s(a) - metric_s(baseline)``; the interval is that of the mean of
    ``d_s`` by Student's t. Both runs of a pair start from ``seed_everything(s)``, and so from the same weights if the
    networks are the same, and each epoch from random numbers drawn from ``(s, epoch)``, so that both see the same order
    of the data although a trick or a validation draws random numbers.

    A run is measured after its fit, by ``trainer.validate`` and, if there is a test loader, ``trainer.test``. A metric
    that is not finite and, in an arm other than the baseline, an error of the fit are reported, and give no interval.

    Finished runs are files in ``folder``: the same call goes on where it was interrupted, does a run again that was
    not finished or failed, and reads any other metric. More arms may be added.

    Args:
        arms: For each name, a function that makes a Trainer, a module and what else ``trainer.fit`` takes (a
            DataModule, or loaders for training and validation), all of them new ones, from the folder of the run, which
            is meant for ``default_root_dir``. The first arm is the baseline.
        metric: Name of a metric that is logged in validation or test.
        mode: "max" if more of the metric is better, "min" if less is.
        folder: Folder of the runs, created if needed; on several machines one that they share.
        seeds: Number of seeds, at least 2, or the seeds.
        checkpoint: Weights that are measured: "last", those of the end of training, or "best", those that the Trainer's
            ``ModelCheckpoint`` calls best.
        equal_time: Whether the baseline is also fitted for ``max_epochs`` and ``max_steps`` times the ratio of times,
            rounded, for each arm whose time differs by more than 5%. Schedules must take their length from the Trainer.

    Returns:
        The runs, with their table (``print``), ``plot()`` and ``to_dict()``.

    Raises:
        ValueError: For fewer than two arms or seeds, a metric that is not logged, or a folder with runs of other
            settings or in which another process trains.
        TypeError: If an arm does not give a Trainer and a module.
        OSError: For a file in place of a folder, files of others in the folder of an arm, and a folder that is removed
            meanwhile.
        MisconfigurationException: For a module, Trainer, callback or loader that an arm gives twice, and a Trainer that
            was used.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from lightning_tricks.examples.digits import Digits, DigitsData
        >>> from lightning_tricks.examples.tasks import QUIET
        >>> def fit(folder, *tricks):
        ...     trainer = L.Trainer(max_epochs=1, limit_train_batches=2, callbacks=[*tricks], **QUIET)
        ...     return trainer, Digits(), DigitsData(noise=0.4)
        >>> from lightning_tricks import EMA, compare
        >>> arms = {"plain": fit, "EMA": lambda folder: fit(folder, EMA(decay=0.5))}
        >>> with TemporaryDirectory() as folder:
        ...     result = compare(arms, metric="val_accuracy", mode="max", seeds=2, folder=folder)
        >>> list(result.runs), result.verdict("EMA")
        (['plain', 'EMA'], 'inconclusive')

    References:
        Bouthillier et al., Accounting for variance in machine learning benchmarks, MLSys 2021.
    """
    if len(arms) < 2:
        raise ValueError(f"arms must be at least two, the baseline first: there is nothing to compare; got {[*arms]}.")
    _check_names(arms, equal_time=equal_time is True)
    check_type("metric", metric, str)
    place = folder_of("folder", folder)
    check_choice("mode", mode, ("max", "min"))
    check_choice("checkpoint", checkpoint, ("last", "best"))
    check_bool("equal_time", equal_time)
    chosen, baseline = _seeds(seeds), next(iter(arms))
    require_lock(place)
    runs = _Runs(place, chosen, checkpoint, metric)
    with caller_unchanged():
        settings = {name: runs.prepare(name, arm) for name, arm in arms.items()}
        if equal_time and not settings[baseline]["length"]:
            raise ValueError(f"equal_time=True needs max_epochs or max_steps in {baseline!r}, whose length it changes.")
        made = runs.make(arms, baseline)
        result = Comparison(metric, mode, chosen, made, notes=_notes(settings))
        if equal_time:
            equal, longer = at_equal_time(result, arms[baseline], settings[baseline]["length"])
            for name, arm in longer.items():
                runs.prepare(name, arm)
            result = Comparison(metric, mode, chosen, {**made, **runs.make(longer, baseline)}, equal, result.notes)
    return result


def _check_names(arms: Mapping[str, Arm], *, equal_time: bool) -> None:
    """Raise unless all names can be those of folders, that of the baseline also when a length is added to it."""
    if unfit := [name for name in arms if not isinstance(name, str) or not name or name.startswith(".")]:
        raise ValueError(f"arms must have names that can be those of folders, and no dot in front, got {unfit}.")
    for place, name in enumerate(arms):
        most = MOST_BYTES - (LENGTH_BYTES if equal_time and place == 0 else 0)
        if (size := len(_quoted(name))) > most:
            raise ValueError(
                f"arms must have names of at most {most} bytes as a folder, got {size} in {name[:40]!r}...: choose a"
                " shorter one."
            )


def _quoted(name: str) -> str:
    """The name of an arm's folder."""
    return quote(name, safe=" ,+=()")


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    if not isinstance(seeds, list | tuple | range):
        check_count("seeds", seeds, 2)  # type: ignore[arg-type]
        return list(range(seeds))  # type: ignore[arg-type]
    for place, seed in enumerate(seeds):
        check_count(f"seeds[{place}]", seed, 0)
        check_range(f"seeds[{place}]", seed, 0, 2**32 - 1)
    if len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(f"seeds must be at least two different ones: one run has no interval; got {list(seeds)}.")
    return list(seeds)


class _Runs:
    """The runs in a folder: finished ones are read, the others made.

    An arm has a folder of its own, with what it was in ``plan.json`` and the figures of a finished run in
    ``seed0.json``, beside the folder ``seed0`` of what the run itself has written.
    """

    def __init__(self, folder: Path, seeds: Sequence[int], checkpoint: Checkpoint, metric: str) -> None:
        self._folder, self._seeds, self._checkpoint, self._metric = folder, seeds, checkpoint, metric
        self._given = Fresh()

    def prepare(self, name: str, arm: Arm) -> dict[str, Any]:
        """Make the arm's objects once, without a fit, and keep their settings or compare them with those kept."""
        trainer, module, *data = self._new(name, arm, self._seeds[0])
        if self._checkpoint == "best" and not any(
            getattr(each, "monitor", None) for each in trainer.checkpoint_callbacks
        ):
            raise ValueError(
                f'checkpoint="best" needs a ModelCheckpoint with monitor, which the arm {name!r} lacks: add one, or'
                ' take checkpoint="last".'
            )
        limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
        plan = {
            "seeds": list(self._seeds),
            "checkpoint": self._checkpoint,
            "versions": f"torch {torch.__version__}, lightning {L.__version__}",
            "configuration": getattr(arm, "settings", None),  # of the command's arms
            "length": {limit: value for limit, value in limits.items() if value not in (None, -1)},
            "initial weights": _checksum(module),
            **{
                f"{type(each).__name__} {number}": _settings(each, self._of(name))
                for number, each in enumerate([module, *_parts(data), *trainer.callbacks])
            },
        }
        folder = self._of(name)
        require_folder(folder)
        require_plan(folder / "plan.json", plan, RESULTS)
        for seed in self._seeds if not this_rank() else ():
            if not os.path.lexists(folder / f"seed{seed}.json"):
                require_own(folder / f"seed{seed}", "fit")
        return plan

    def make(self, arms: Mapping[str, Arm], baseline: str) -> dict[str, list[Run]]:
        """The runs of all arms, seed by seed, so that a machine that becomes slower does so for all of them."""
        jobs = [(seed, name) for seed in self._seeds for name in arms]
        runs: dict[str, list[Run]] = {name: [] for name in arms}
        paths = {(seed, name): self._of(name) / f"seed{seed}.json" for seed, name in jobs}
        done: dict[Any, Run] = {job: read_record(path) for job, path in paths.items() if path.exists()}
        with locked(self._folder) if len(done) < len(jobs) else nullcontext():
            for seed, name in progress(jobs, "compare"):
                job = seed, name
                run = done.get(job) or self._run(name, arms[name], seed, paths[job], may_fail=name != baseline)
                if self._metric not in (found := run.get("metrics", [self._metric])):
                    raise ValueError(
                        f"the arm {name!r} logs no metric={self._metric!r} in validation or test, but {sorted(found)}:"
                        " take one of them; the finished runs are kept."
                    )
                runs[name].append(run)
        return runs

    def _run(self, name: str, arm: Arm, seed: int, path: Path, *, may_fail: bool) -> Run:
        own = path.with_suffix("")
        if not this_rank():
            new_folder(own, "fit")  # in place of that of a run that was killed
        gc.collect()  # a module and its Trainer know each other: those of the last run still hold their memory
        trainer, module, *data = self._new(name, arm, seed)
        trainer.callbacks.insert(0, _EpochSeeds(seed))
        try:
            begin = time.perf_counter()
            with marked_is_empty(own):
                trainer.fit(module, *data)
            heed_sigterm(trainer)
            seconds = time.perf_counter() - begin
            run: Run = {"metrics": _measured(trainer, module, data, self._checkpoint), "seconds": seconds}
        except Exception as error:
            if not may_fail or trainer.world_size > 1:  # other ranks may be waiting
                raise
            with atomic_write(own / "error.txt") as file:
                file.write_text(traceback.format_exc())
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        run = trainer.strategy.broadcast({**run, "epochs": trainer.current_epoch, "steps": trainer.global_step})
        if trainer.is_global_zero:
            write_record(path, run)
        return run

    def _new(self, name: str, arm: Arm, seed: int) -> tuple[Any, ...]:
        """What an arm makes with a seed, all of it new."""
        L.seed_everything(seed, workers=True, verbose=False)
        made = arm(self._of(name) / f"seed{seed}")
        if not isinstance(made, tuple) or len(made) < 2:
            raise TypeError(f"the arm {name!r} must give (trainer, module, ...), got {type(made).__name__}.")
        trainer, module, *data = made
        for thing, kind in ((trainer, L.Trainer), (module, L.LightningModule)):
            require_same_lightning(thing, "compare")
            if not isinstance(thing, kind):
                raise TypeError(f"the arm {name!r} must give (trainer, module, ...), got {type(thing).__name__}.")
        loaders = [(f"the {type(part).__name__}", part) for part in _parts(data)]
        self._given.require(f"the arm {name!r}", parts_of_trainer(trainer) + parts_of_module(module) + loaders)
        return made

    def _of(self, name: str) -> Path:
        return self._folder / _quoted(name)


def _parts(data: Sequence[Any]) -> list[Any]:
    """The DataModule or the loaders among the arguments of ``trainer.fit``."""
    return [part for part in CombinedLoader(data).flattened if hasattr(part, "__weakref__")]


class _EpochSeeds(Callback):
    """Seeds every epoch, so that both runs of a pair see the same order of the data whatever either draws."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        drawn = Random(f"{self._seed} {trainer.current_epoch}").getrandbits(32)
        L.seed_everything(drawn, workers=True, verbose=False)


def _measured(trainer: L.Trainer, module: Any, data: Sequence[Any], checkpoint: Checkpoint) -> dict[str, float]:
    """All metrics of validation and test."""
    source = data[0] if data and isinstance(data[0], L.LightningDataModule) else module
    own = [] if source is module else [source]
    loaders = {"validate": own or [each for each in data[1:2] if each is not None], "test": own}
    found: dict[str, float] = {}
    for stage, step in (("validate", "validation_step"), ("test", "test_step")):
        loader = "val_dataloader" if stage == "validate" else "test_dataloader"
        given = loaders[stage] if source is module else []
        if is_overridden(step, module) and (given or is_overridden(loader, source)):
            path = {"ckpt_path": "best", "weights_only": False} if checkpoint == "best" else {}
            for rows in getattr(trainer, stage)(module, *loaders[stage], **path, verbose=False):
                found.update(rows)
            heed_sigterm(trainer)
    return found


def at_equal_time(result: Comparison, arm: Arm, limits: Mapping[str, int]) -> tuple[dict[str, str], dict[str, Arm]]:
    """For each arm of another time the name of a baseline that takes as long, and how those are made."""
    equal: dict[str, str] = {}
    longer: dict[str, Arm] = {}
    for name in result.runs:
        if abs(result.time(name) - 1) <= EQUAL or not isfinite(result.time(name)):
            continue
        lengths = {limit: max(1, round(result.time(name) * value)) for limit, value in limits.items()}
        equal[name] = result.baseline
        if lengths != limits:
            told = " and ".join(f"{value} {limit.removeprefix('max_')}" for limit, value in lengths.items())
            equal[name] = f"{result.baseline}, {told}"
            longer[equal[name]] = partial(_fit_of_length, arm, lengths)
    return equal, longer


def _fit_of_length(arm: Arm, lengths: Mapping[str, int], folder: Path) -> tuple[Any, ...]:
    trainer, *rest = arm(folder)
    trainer.fit_loop.max_epochs = lengths.get("max_epochs", trainer.max_epochs)
    trainer.fit_loop.epoch_loop.max_steps = lengths.get("max_steps", trainer.max_steps)
    return trainer, *rest


def _notes(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    baseline = next(iter(settings.values()))
    best = baseline["checkpoint"] == "best"
    notes = ["Measured with the weights that ModelCheckpoint calls best."] if best else []
    others = [name for name, each in settings.items() if each["initial weights"] != baseline["initial weights"]]
    if others:
        notes += [f"Other initial weights than the baseline's, since the network is another: {', '.join(others)}."]
    return notes


def _checksum(module: L.LightningModule) -> str:
    """Of the weights that exist when the module is made: not of those on the meta device or without a shape."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return weights_checksum({name: value for name, value in state.items() if not (value.is_meta or is_lazy(value))})


def _settings(thing: object, folder: Path) -> dict[str, str]:
    """The public attributes that say how something was made, as text; the folder of the runs may be moved."""
    found = {**vars(thing), **getattr(thing, "hparams", {})}
    plain = {name: repr(value) for name, value in found.items() if not name.startswith("_") and _is_plain(value)}
    return {name: text.replace(str(folder.resolve()), "") for name, text in plain.items()}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 20 and all(map(_is_plain, value))
    return isinstance(value, str | int | float | None) or (is_dataclass(value) and " at 0x" not in repr(value))
