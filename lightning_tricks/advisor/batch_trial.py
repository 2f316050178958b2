"""A few training steps with batches of one size, on all ranks: do they run out of memory?"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_tricks.core.loaders import resizable, resize_batches, train_loader
from lightning_tricks.core.ranks import extremes
from lightning_tricks.core.steps import EpochPlan
from lightning_tricks.core.trainer import callbacks_of, grad_scaler
from lightning_tricks.core.wrapping import wrap_method
from lightning_tricks.modules.sam_setup import SAMCallback
from lightning_tricks.schedules.undone_fit import UndoneFit

_FITS, _FULL, _FAILED = range(3)  # what a rank tells the others
_SIGNS = ("out of memory", "can't allocate memory", "Cannot allocate memory", "std::bad_alloc", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is used up: of a device, of the host, of cuDNN or of cuBLAS.

    >>> out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or is_oom_error(error):
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error) for sign in _SIGNS)


def require_trials(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise if ranks would wait for one that runs out of memory, or a callback sizes the batches."""
    strategy = trainer.strategy
    if trainer.world_size > 1 and isinstance(strategy, ModelParallelStrategy):
        found = f"{type(strategy).__name__} on {trainer.world_size} devices, which wait for one that runs out of memory"
    elif trainer.world_size > 1 and getattr(strategy, "compression", None) == "local_sgd":
        found = "local SGD, whose devices wait for one that runs out of memory: find it with another compression"
    elif trainer.world_size > 1 and not module.automatic_optimization:
        found = (
            f"{type(module).__name__}.automatic_optimization=False on {trainer.world_size} devices, which wait for one"
            " that runs out of memory: find it on one device"
        )
    elif plans := [each for each in callbacks_of(trainer, Callback) if isinstance(each, EpochPlan)]:
        found = f"{type(plans[0]).__name__}, which sizes the batches: find it without"
    else:
        return
    raise MisconfigurationException(f"find_batch_size cannot work with {found}.")


class BatchTrial(UndoneFit):
    """Tries one batch size; to be used once.

    No rank waits inside a step for another that has run out of memory: gradients are not averaged, which takes no less
    memory, and after each batch, and after an error, the ranks tell each other how it went.

    Args:
        size: Samples of a batch on each device; all that there are if it is more.
        steps: Optimizer steps.
        accumulation: Batches of each.
        margin: Share of a CUDA device's memory to leave free.
    """

    def __init__(self, size: int, *, steps: int, accumulation: int, margin: float) -> None:
        super().__init__()
        self._size, self._accumulation, self._margin = size, accumulation, margin
        self._left = steps * accumulation  # batches
        self._available = 0  # samples
        self._verdict = _FITS
        self._begun = False

    def run(self, trainer: pl.Trainer, module: Any, loaders: Any, datamodule: Any) -> tuple[bool, int]:
        """Whether the size fits on every rank, and the samples that the rank with the fewest has."""
        sharp = hasattr(module, "_sam_recorder")  # whose second pass takes memory, too
        try:
            self.fit(trainer, module, loaders, datamodule, [SAMCallback()] if sharp else [])
        except Exception:
            if self._verdict != _FULL:
                raise
            self.exception = None  # with it go the tensors of its frames
        if self._verdict == _FULL:
            garbage_collection_cuda()
        return self._verdict == _FITS, self._available

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # undone with what the strategy and the module are
        wrap_method(trainer.strategy, "process_dataloader", _resizable)
        wrap_method(pl_module, "log", lambda *_, **__: None)  # which may wait for other ranks
        if trainer.world_size > 1:
            wrap_method(pl_module, "all_gather", _refuse_all_gather)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        trainer.limit_train_batches = 1.0
        trainer.reload_dataloaders_every_n_epochs = 0  # type: ignore[attr-defined]
        if pl_module.automatic_optimization:
            trainer.accumulate_grad_batches = self._accumulation
        scaler = grad_scaler(trainer)
        if scaler is not None:  # from 65536 it skips the first steps, which then make no optimizer states
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loaders = train_loader(trainer).flattened
        samples = sized_len(loaders[0].batch_sampler.sampler)
        if len(loaders) != 1 or samples is None:
            found = f"{len(loaders)} loaders" if len(loaders) != 1 else "a sampler without a length"
            raise MisconfigurationException(f"find_batch_size sizes the batches of one DataLoader, got {found}.")
        self._available, _ = extremes(trainer, samples)
        size = min(self._size, self._available)
        trainer.limit_train_batches = self._available // size  # epochs that end at once on all ranks
        batches = loaders[0].batch_sampler
        batches.batch_size, batches.base, batches.drop_last = 0, 1, True  # to be sized anew; full batches only
        resize_batches(trainer, size)
        _let_ranks_be(trainer.strategy.model)
        if (device := trainer.strategy.root_device).type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._begun = True

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell(trainer, _FULL if self._over_margin(trainer.strategy.root_device) else _FITS)
        if self._verdict != _FITS:
            raise RuntimeError("find_batch_size: another rank has failed, see its error.")
        self._left -= 1
        trainer.should_stop = self._left <= 0

    def _over_margin(self, device: torch.device) -> bool:
        if device.type != "cuda":
            return False
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_allocated(device) > (1 - self._margin) * total

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if not self._begun or self._verdict != _FITS or not isinstance(exception, Exception):
            return
        full = out_of_memory(exception)
        if full:
            traceback.clear_frames(exception.__traceback__)  # which hold the batch and its activations
            garbage_collection_cuda()
        self._tell(trainer, _FULL if full else _FAILED)

    def _tell(self, trainer: pl.Trainer, state: int) -> None:
        _, self._verdict = extremes(trainer, state)


def _resizable(process: Callable[[Any], Any], loader: Any) -> DataLoader[Any]:
    return resizable(process(loader), "find_batch_size")


def _refuse_all_gather(*_: Any, **__: Any) -> None:
    raise MisconfigurationException(
        "find_batch_size cannot work with all_gather in training_step, at which devices wait for one that runs out of"
        " memory: find it on one device."
    )


def _let_ranks_be(model: nn.Module | None) -> None:
    """Average neither gradients nor buffers, nor the statistics of SyncBatchNorm, over the ranks."""
    if not isinstance(model, DistributedDataParallel):
        return
    model.require_backward_grad_sync = model.require_forward_param_sync = False
    model.static_graph = False  # whose first backward averages gradients in any case
    norms = [each for each in model.modules() if isinstance(each, nn.SyncBatchNorm)]
    if norms:
        alone, _ = torch.distributed.new_subgroups(1)
        for norm in norms:
            norm.process_group = alone
