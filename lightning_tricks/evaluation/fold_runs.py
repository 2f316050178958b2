"""Trains folds in turn or in worker processes, and stores results; apart from cross_validate, whose process waits."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from lightning_tricks.checkpoints.files import load
from lightning_tricks.core.checks import check_type
from lightning_tricks.core.lightning.loaders import on_device
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.core.lightning.trainer import callbacks_of, heed_sigterm
from lightning_tricks.core.replay.rerun import modes_kept
from lightning_tricks.core.report import progress
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import new_folder, require_own
from lightning_tricks.evaluation.fold_data import FoldData
from lightning_tricks.evaluation.folds import Fold
from lightning_tricks.evaluation.fresh import (
    Fresh,
    caller_unchanged,
    marked_is_empty,
    parts_of_module,
    parts_of_trainer,
)
from lightning_tricks.evaluation.plan import locked, this_rank, write_json
from lightning_tricks.evaluation.predictions import in_order, joined, require_mean

RESULTS = r"fold\d+(\.pt)?"  # names in the folder of a cross-validation


class FoldRuns:
    """The folds, of which each is trained once.

    Args:
        make_module: Function of the fold's number that makes a LightningModule.
        make_trainer: Function of the fold's number and folder that makes a Trainer.
        data: The samples.
        folds: Their positions in the folds.
        folder: Folder of the results.
        seed: Seed of the first fold.
        predict: Whether samples are predicted.
    """

    def __init__(
        self,
        make_module: Callable[[int], L.LightningModule],
        make_trainer: Callable[[int, Path], L.Trainer],
        data: FoldData,
        folds: Sequence[Fold],
        folder: Path,
        seed: int,
        predict: bool,
    ) -> None:
        self.make_module, self.make_trainer, self.data, self.folds = make_module, make_trainer, data, folds
        self.folder, self.seed, self.predict = folder, seed, predict
        self._given = Fresh()
        every = [sample for fold in folds for sample in fold.validation]
        self._repeats = len(set(every)) < len(every)

    def result(self, number: int) -> Path:
        """The file with the result of a fold."""
        return self.folder / f"fold{number}.pt"

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"fold{number}"

    def read(self, number: int) -> dict[str, Any]:
        """The result of a fold.

        Raises:
            ValueError: If its file is damaged.
        """
        try:
            result = load(self.result(number))
            if not {"metrics", "checkpoints", "predictions"} <= result.keys():
                raise ValueError(f"{self.result(number)} is no result of a fold.")
        except (ValueError, IsADirectoryError) as error:
            raise ValueError(f"{error} Remove it, and fold {number} is trained again.") from error
        return result

    def all(self, workers: int) -> None:
        """Train the folds that have no result yet."""
        left = [number for number in range(len(self.folds)) if not self.result(number).exists()]
        for number in {*range(len(self.folds))} - {*left}:
            self.read(number)  # which tells of damage before hours of training
        for number in left if this_rank() == 0 else ():
            require_own(self._folder_of(number), "fit")
        if left:
            with locked(self.folder):
                self._train(left, workers)

    def _train(self, left: Sequence[int], workers: int) -> None:
        if workers == 1 or len(left) < 2:
            for number in progress(left, "cross-validation"):
                with caller_unchanged():
                    self.one(number)
            return
        if "LOCAL_RANK" in os.environ:
            raise MisconfigurationException(
                f"workers={workers} starts processes itself, got a process that torchrun or a DDP Trainer has started:"
                " pass workers=1, or start the program once."
            )
        try:
            pickle.dumps(self)
        except Exception as error:
            raise TypeError(
                f"workers={workers} needs make_module, dataset, make_trainer and loader that pickle, got {error}:"
                " define the functions at the top of a module."
            ) from error
        with ProcessPoolExecutor(workers, get_context("spawn"), _end_with_parent) as pool:
            running = [pool.submit(self._in_worker, number) for number in left]
            try:
                for future in progress(as_completed(running), "cross-validation", len(left)):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_given": Fresh()}  # objects of this process, to which no other has references

    def _in_worker(self, number: int) -> None:
        self.one(number, alone=True)

    def one(self, number: int, *, alone: bool = False) -> None:
        """Train, validate and predict a fold, and write its result; what is left of an interrupted one is removed.

        Args:
            number: Number of the fold.
            alone: Whether other folds run at the same time, each in one process.

        Raises:
            FileExistsError: If the fold's folder is none of an earlier run.
        """
        folder = self._folder_of(number)
        if this_rank() == 0:
            new_folder(folder, "fit")
        L.seed_everything(self.seed + number, workers=True, verbose=False)
        module = self.make_module(number)
        require_same_lightning(module, "cross_validate")
        check_type("what make_module returns", module, L.LightningModule)
        trainer = self.make_trainer(number, folder)
        require_same_lightning(trainer, "cross_validate")
        check_type("what make_trainer returns", trainer, L.Trainer)
        self._given.require("make_module", parts_of_module(module))
        self._given.require("make_trainer", parts_of_trainer(trainer))
        _check(trainer, module, self.predict, alone)
        loaders = self.data.of(self.folds[number])
        outside = loaders["val_dataloaders"] if "val_dataloaders" in loaders else loaders["datamodule"].val_dataloader()
        tried = outside if self.predict and not is_overridden("predict_step", module) else None
        trainer.callbacks.append(writer := _Writer(folder, tried))  # type: ignore[attr-defined]
        with marked_is_empty(folder):
            trainer.fit(module, **loaders)
        heed_sigterm(trainer)
        trainer.strategy.barrier()
        best, *_ = writer.checkpoints()
        given = {"datamodule": loaders.get("datamodule"), "dataloaders": loaders.get("val_dataloaders")}
        trusted: dict[str, Any] = {**given, "ckpt_path": best, "weights_only": False}  # this run has written it
        (metrics,) = trainer.validate(module, verbose=False, **trusted)
        heed_sigterm(trainer)
        if self.predict:
            trainer.predict(module, return_predictions=False, **trusted)
            heed_sigterm(trainer)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._write(number, writer, dict(metrics))
        trainer.strategy.barrier()
        if not self.result(number).exists():
            raise MisconfigurationException(
                f"rank {trainer.global_rank} does not see {self.result(number)}, which rank 0 has written: pass the"
                " same folder on all ranks, on a disk that they share."
            )

    def _write(self, number: int, writer: _Writer, metrics: dict[str, Any]) -> None:
        result = {
            "metrics": {name: float(value) for name, value in metrics.items()},
            "checkpoints": [self._inside(path) for path in writer.checkpoints()],
            "predictions": self._predictions(number, writer) if self.predict else None,
        }
        with atomic_write(self.result(number)) as temporary, temporary.open("xb") as file:
            torch.save(result, file)  # given a path, torch 2.9 misses a disk that is full near the end

    def _inside(self, path: str) -> str:
        """The path from the folder, which may be moved; the absolute one of a file outside of it."""
        relative = os.path.relpath(path, self.folder)
        return os.path.abspath(path) if relative.startswith("..") else relative

    def _predictions(self, number: int, writer: _Writer) -> Any:
        """The predictions of all ranks, in the order of the fold's samples."""
        found = [torch.load(file, weights_only=True) for file in sorted(writer.folder.glob("predictions-*.pt"))]
        positions = [position for each in found for position in each["positions"]]
        expected = len(self.folds[number].validation)
        if sorted(positions) != list(range(expected)):
            raise MisconfigurationException(
                f"predict must give each of the {expected} samples once, got {len(positions)} predictions: let the"
                " Trainer distribute the samples (use_distributed_sampler=True), and return something for each batch."
            )
        outputs = joined([each["outputs"] for each in found], [len(each["positions"]) for each in found])
        if self._repeats:
            require_mean(outputs)
        return in_order(outputs, positions)


def _end_with_parent() -> None:
    """End this process when its parent ends, even if killed; else it would write to the folder of the next run."""
    parent = parent_process()
    assert parent is not None, "a pool has started this process"

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def _check(trainer: L.Trainer, module: L.LightningModule, predict: bool, alone: bool) -> None:
    """Raise unless a Trainer can validate and predict a fold."""
    if trainer.limit_val_batches == 0 or not is_overridden("validation_step", module):
        raise MisconfigurationException(
            "cross_validate needs a module with validation_step and a Trainer that validates, got"
            f" {type(module).__name__} and limit_val_batches={trainer.limit_val_batches}."
        )
    if predict and trainer.limit_predict_batches != 1.0:
        raise MisconfigurationException(
            "predict=True predicts all samples, got a Trainer with limit_predict_batches="
            f"{trainer.limit_predict_batches}: leave it (or fast_dev_run) out, or pass predict=False."
        )
    if alone and trainer.world_size > 1:
        raise MisconfigurationException(
            f"workers= gives every fold one process, got a Trainer for {trainer.world_size}: pass workers=1, or"
            " devices=[fold % 8] for as many GPUs."
        )


class _Writer(BasePredictionWriter):
    """Writes the paths of the checkpoints and the predictions of each rank, for processes that a strategy starts end.

    Args:
        folder: Folder of the fold.
        tried: Loader of which a batch is predicted before the first step, by a module without a step of its own for it.
    """

    def __init__(self, folder: Path, tried: Any = None) -> None:
        super().__init__("epoch")
        self.folder, self.tried = folder, tried

    def checkpoints(self) -> list[str]:
        """The checkpoints that the fit has left, the best first."""
        return json.loads((self.folder / "checkpoints.json").read_text())

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.tried is None:
            return
        try:
            with modes_kept(pl_module), torch.no_grad(), isolate_rng(include_cuda=torch.cuda.is_initialized()):
                batch = on_device(trainer, pl_module, next(iter(self.tried)))
                pl_module.eval()
                trainer.strategy.predict_step(batch, 0)
        except Exception as error:
            raise MisconfigurationException(
                f"predict=True needs predict_step in {type(pl_module).__name__}, got the default, which gives forward"
                f" the batch as it is ({type(error).__name__}: {error}): define predict_step, or pass predict=False."
            ) from error

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        monitoring = [each for each in callbacks_of(trainer, ModelCheckpoint) if each.monitor and each.best_model_path]
        if monitoring:
            best = [monitoring[0].best_model_path]
            best += [path for path in monitoring[0].best_k_models if path not in best]
        else:
            best = [str(self.folder / "last.ckpt")]
            trainer.save_checkpoint(best[0], weights_only=True)
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "checkpoints.json", best)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.world_size == 1 or not (trainer.sanity_checking or trainer.state.fn == TrainerFn.VALIDATING):
            return  # later in a fit there are metrics of the training, too
        names = sorted(trainer.callback_metrics)
        mine = torch.tensor([float(trainer.callback_metrics[name]) for name in names]).nan_to_num()
        both = torch.cat([mine, -mine]).to(trainer.strategy.root_device)
        largest, negated_smallest = trainer.strategy.reduce(both, reduce_op="max").cpu().view(2, -1)
        if differ := [name for name, apart in zip(names, largest != -negated_smallest, strict=True) if apart]:
            raise MisconfigurationException(
                f"the ranks must agree on what the validation logs, got different values of {', '.join(differ)}: log it"
                " with sync_dist=True, or as a torchmetrics Metric."
            )

    @override
    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        batches = [list(map(int, batch)) for loader in batch_indices for batch in loader]
        part = {
            "positions": [position for batch in batches for position in batch],
            "outputs": joined(predictions, [len(batch) for batch in batches]),
        }
        path = self.folder / f"predictions-{trainer.global_rank}.pt"
        with atomic_write(path) as temporary, temporary.open("xb") as file:
            torch.save(part, file)
