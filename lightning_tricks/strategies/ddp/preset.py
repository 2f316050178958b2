"""Data parallelism: one whole model a process, gradients averaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.averaging.callback import AveragingCallback
from lightning_tricks.core.checks import check_bool
from lightning_tricks.core.lightning.trainer import callbacks_of, keep_user_samplers
from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy
from lightning_tricks.strategies.ddp.compression import Compression, Compressor, LocalSGD, make_compressor

__all__ = ["DDPPreset"]

_UNUSED = "Expected to have finished reduction in the prior iteration"


def unused_parameters(message: str, module: nn.Module) -> list[str]:
    """The names of the parameters that torch's message about an unfinished reduction gives by their indices."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = [name for name, each in module.named_parameters() if each.requires_grad and name not in ignored]
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    return [names[int(index)] for index in found[1].split()] if found else []


@final
class DDPPreset(PresetStrategy, DDPStrategy):
    """One whole model a process, gradients averaged: the presets ``ddp_bf16``, ``ddp_fp16``, ``ddp_compressed_bf16``.

    With ``devices=1, num_nodes=1`` it is ``SinglePreset``: no process group, no wrapper, the loaders' own samplers.

    ``compression`` says how gradients travel, on every backend: "bf16" and "fp16" round them, which halves the bytes.
    "powersgd" sends a matrix ``M`` of n x m as ``P Q'`` of rank r, which is (n + m) r numbers, where that halves the
    bytes at least, and adds what is lost to the next gradient. What is lost is not saved: a resumed fit begins with two
    whole steps and none. "local_sgd" averages gradients within a node only (on one node not at all) and, every
    ``local_sgd_period`` steps, the weights of all; also before validation and at the end of each epoch. A checkpoint
    averages weights and optimizer states, so that its resume is exact.

    Args:
        precision: What to train in: "bf16-mixed", "16-mixed" or "32-true".
        compression: How gradients travel: "none", "bf16", "fp16", "powersgd" or "local_sgd".
        powersgd_rank: The rank r of "powersgd", 4 if not given; 1 to 4 for vision, up to 32 for language.
        local_sgd_period: Optimizer steps of "local_sgd" between averages of the weights, 8 if not given.
        compression_start: Optimizer steps in which gradients still travel whole, if not given 1000 for "powersgd"
            (2 at least) and 0 for "local_sgd".
        gradient_as_bucket_view: Keep gradients in DDP's buckets, which saves a copy of them.
        **settings: Further arguments of Lightning's ``DDPStrategy`` and of torch's ``DistributedDataParallel``, such as
            ``find_unused_parameters``, ``static_graph``, ``timeout``.

    Raises:
        ValueError: For a compression argument that is out of range or has no effect, and for a ``ddp_comm_hook``
            besides a compression.
        MisconfigurationException: When training starts with "local_sgd" and a callback that averages weights, or an
            optimizer that shards its states: each rank would average, or have states of, weights of its own.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(strategy=DDPPreset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
        >>> DDPPreset(compression="bf16", powersgd_rank=2)
        Traceback (most recent call last):
        ValueError: powersgd_rank has no effect with compression='bf16', got 2. Leave it out, or pass ...

    References:
        PowerSGD: https://arxiv.org/abs/1905.13727, local SGD: https://arxiv.org/abs/1808.07217
    """

    def __init__(
        self,
        *,
        precision: PresetPrecision = "bf16-mixed",
        compression: Compression = "none",
        powersgd_rank: int | None = None,
        local_sgd_period: int | None = None,
        compression_start: int | None = None,
        gradient_as_bucket_view: bool = True,
        **settings: Any,
    ) -> None:
        check_bool("gradient_as_bucket_view", gradient_as_bucket_view)
        self.compression = compression
        self._compressor = make_compressor(
            compression,
            powersgd_rank=powersgd_rank,
            local_sgd_period=local_sgd_period,
            compression_start=compression_start,
        )
        hooks = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
        self._users_hook = {name: settings[name] for name in hooks if settings.get(name) is not None}
        if self._compressor is not None and self._users_hook:
            raise ValueError(
                f"compression={compression!r} brings its own communication hook, got {', '.join(self._users_hook)} as"
                " well. Leave one of them out."
            )
        super().__init__(precision=precision, gradient_as_bucket_view=gradient_as_bucket_view, **settings)

    @override
    def setup_distributed(self) -> None:
        if not self.alone:
            super().setup_distributed()
        elif self.lightning_module is not None:
            keep_user_samplers(self.lightning_module.trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.alone:
            Strategy.setup(self, trainer)  # that of DDP needs a process group
        else:
            super().setup(trainer)
        if isinstance(self._active, LocalSGD):
            self._require_no_averages(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> Any:  # Strategy.setup wraps by it, and there is no public name
        return model if self.alone else super()._setup_model(model)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        hook: Callable[..., Any] | None = self._users_hook.get("ddp_comm_hook")
        if self._compressor is not None:
            self._compressor.register(self.model, self.num_processes)
        elif hook is not None and self.root_device.type != "cuda":  # where Lightning leaves it out
            wrapper = self._users_hook.get("ddp_comm_wrapper")
            self.model.register_comm_hook(self._users_hook.get("ddp_comm_state"), wrapper(hook) if wrapper else hook)

    @property
    def _active(self) -> Compressor | None:
        """What compresses gradients now."""
        return self._compressor if isinstance(self.model, DistributedDataParallel) else None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._active and self.lightning_module is not None:
            self._active.begin(self.lightning_module.trainer.global_step)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._active and self.lightning_module is not None:
            trainer, scaler = self.lightning_module.trainer, getattr(self.precision_plugin, "scaler", None)
            # global_step does not count the step just made before this returns
            look = trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps
            self._active.after_step(1.0 if scaler is None else scaler.get_scale(), look)
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._agree()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._agree()
        if self._active:
            for optimizer in self.optimizers:  # which may be saved when the fit is over
                self._active.agree_on_states(optimizer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._agree()  # all ranks save together
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if self._active:
            self._active.agree_on_states(optimizer)
        return super().optimizer_state(optimizer)

    def _agree(self) -> None:
        if self._active:
            self._active.agree()

    def _require_no_averages(self, trainer: pl.Trainer) -> None:
        found: list[Any] = [
            each
            for kind in (AveragingCallback, WeightAveraging, StochasticWeightAveraging)
            for each in callbacks_of(trainer, kind)
        ]
        found += [each for each in trainer.optimizers if hasattr(each, "consolidate_state_dict")]
        if found:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} with compression='local_sgd' lets each node have weights of its own"
                f" for a while, got {type(found[0]).__name__}, which would keep them. Leave it out, or choose"
                " compression='bf16' or 'powersgd'."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        found = [each for each in exception.args if isinstance(each, str) and _UNUSED in each]
        if found and self.lightning_module is not None:
            exception.args = (self._explained(found[0], self.lightning_module),)
        super().on_exception(exception)

    def _explained(self, message: str, module: nn.Module) -> str:
        names = ", ".join(unused_parameters(message, module)) or "torch does not say which"
        remedy = f'Trainer(**lt.preset("{self.strategy_name}", find_unused_parameters=True))'
        if self.strategy_name == type(self).__name__:  # made without preset()
            remedy = f"Trainer(strategy=lt.{self.strategy_name}(..., find_unused_parameters=True))"
        return (
            f"These parameters had no part in the loss of training_step, so their gradients never came: {names}. Use"
            f" them, freeze them by requires_grad_(False), or have DDP look for them in each step: {remedy}."
        )
