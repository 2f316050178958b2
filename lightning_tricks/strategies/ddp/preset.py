"""Data parallelism: each process has a full copy of the model, and gradients are averaged."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, final

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.trainer import grad_scaler, keep_user_samplers
from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy
from lightning_tricks.strategies.ddp.compression import Compression, Compressor, LocalSGD, average, make_compressor

__all__ = ["DDPPreset"]

_UNUSED = "Expected to have finished reduction in the prior iteration"


def unused_parameters(message: str, module: nn.Module) -> list[str]:
    """Names of the parameters whose indices torch's message about an unfinished reduction lists."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = [name for name, p in module.named_parameters() if p.requires_grad and name not in ignored]
    match = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
    return [names[int(index)] for index in match[1].split()] if match else []


_OWN_STATES = re.compile("8bit|4bit|Fp8|GaLore|SOAP|Prodigy", re.IGNORECASE)  # classes of optimizers


@final
class DDPPreset(PresetStrategy, DDPStrategy):
    """Data parallelism: the presets ``ddp_bf16``, ``ddp_fp16``, ``ddp_compressed_bf16`` and ``ddp_diloco_bf16``.

    Each process has a full copy of the model, and gradients are averaged. With ``devices=1, num_nodes=1`` it works
    like ``SinglePreset``: no process group, no wrapper, and the loaders keep their samplers.

    ``compression`` reduces what the gradients cost to send, on every backend. "bf16" and "fp16" round them, which
    halves the bytes. "powersgd" sends an n x m matrix ``M`` as ``P Q'`` of rank r, which is (n + m) r numbers, if that
    at least halves the bytes, and adds the error to the next gradient. Errors are not saved: a resumed fit starts
    without them and with two uncompressed steps. "local_sgd" averages gradients within a node only (with a single node
    not at all) and the weights of all nodes every ``local_sgd_period`` steps, before validation and at the end of each
    epoch. A checkpoint averages weights and optimizer states, so that resuming from it is exact. ``EMA``, ``SWA`` and
    ``PostHocEMA`` are averages over the steps of the mean weights.

    With ``outer_lr`` and ``outer_momentum`` that is DiLoCo: ``x`` are the weights of the last synchronisation, ``y``
    the mean of the ranks' weights, and every ``local_sgd_period`` steps ``g = x - y``, ``m = outer_momentum * m + g``,
    ``x = x - outer_lr * (g + outer_momentum * m)``, where all ranks go on from. ``fragments`` of the model take turns,
    as in Streaming DiLoCo: as many bytes, but fewer at a time. Validation, epochs and checkpoints still average the
    weights, and end no period. ``x`` and ``m`` are in the checkpoint, from which any number of ranks resumes; a
    run without outer steps leaves them, with a warning.

    Args:
        precision: The precision to train in: "bf16-mixed", "16-mixed" or "32-true".
        compression: The compression of gradients: "none", "bf16", "fp16", "powersgd" or "local_sgd".
        powersgd_rank: The rank r of "powersgd", at least 1, by default 4; 1 to 4 for vision, up to 32 for language.
        local_sgd_period: The number of optimizer steps between averages of the weights, at least 1, by default 8.
        outer_lr: The learning rate of the outer optimizer of "local_sgd", above 0, by default 1; DiLoCo has 0.7.
        outer_momentum: Its Nesterov momentum, in [0, 1), by default 0; DiLoCo has 0.9. With the defaults of both there
            is no outer optimizer, which takes 8 bytes a weight.
        fragments: The number of parts of the model, of about the same size, that "local_sgd" synchronises in turn, at
            least 1 and at most ``local_sgd_period``, by default 1.
        compression_start: The number of optimizer steps with uncompressed gradients, by default 1000 for "powersgd"
            (never fewer than 2) and 0 for "local_sgd".
        gradient_as_bucket_view: Whether gradients are views into DDP's buckets, which saves a copy of them.
        async_save: Whether training goes on while the checkpoints of ``ModelCheckpoint`` are written, from a copy in
            host memory; see ``docs/strategies.md``.
        **settings: Further arguments of Lightning's ``DDPStrategy`` and of torch's ``DistributedDataParallel``, such as
            ``find_unused_parameters``, ``static_graph``, ``timeout``.

    Raises:
        TypeError: For a value of the wrong type, or an argument that neither of them has.
        ValueError: If a compression argument is out of range or has no effect, or if a ``ddp_comm_hook`` is given
            in addition to a compression.
        MisconfigurationException: When training starts with "local_sgd" and Lightning's averages of weights, a teacher
            that is one, averages of ours in "16-mixed", or an optimizer that shards its states: the weights of the
            ranks differ between averages. With more fragments than layers. With an outer optimizer and
            ``RewindOnSpike``, Lookahead (Ranger has it, too) or schedule-free optimizers, which set weights back.

    Example:
        >>> import lightning as L
        >>> L.Trainer(strategy=DDPPreset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
        >>> DDPPreset(compression="bf16", powersgd_rank=2)
        Traceback (most recent call last):
        ValueError: powersgd_rank has no effect with compression='bf16', got 2. Leave it out, or pass ...

    References:
        PowerSGD: https://arxiv.org/abs/1905.13727, local SGD: https://arxiv.org/abs/1808.07217, DiLoCo:
        https://arxiv.org/abs/2311.08105, Streaming DiLoCo: https://arxiv.org/abs/2501.18512
    """

    conflicts = (
        Conflict(
            ("WeightAveraging", "StochasticWeightAveraging"),
            "with compression='local_sgd' each node has other weights between averages, and these average those of rank"
            " 0",
            "Take EMA or SWA, or choose compression='bf16' or 'powersgd'",
            lambda preset, other: preset.is_apart,
        ),
        Conflict(
            ("TeachingCallback",),
            "with compression='local_sgd' each node has other weights between averages, and would learn from an average"
            " of its own",
            "Remove the callback, give it another module as the teacher, or choose compression='bf16' or 'powersgd'",
            lambda preset, other: preset.is_apart and other.module is None,
        ),
        Conflict(
            ("AveragingCallback", "PostHocEMA"),
            "with compression='local_sgd' each node skips the steps that overflow in fp16 by itself, and the averages"
            " would be over other steps on each",
            "Choose precision='bf16-mixed' or '32-true', or remove the callback",
            lambda preset, other: preset.is_apart and preset.precision == "16-mixed",
        ),
        Conflict(
            ("RewindOnSpike",),
            "a rewind sets back neither the momentum of the outer optimizer nor the weights that it steps from",
            "Remove RewindOnSpike, or outer_lr and outer_momentum",
            lambda preset, other: not preset.is_single_process and preset.has_outer_optimizer,
        ),
    )

    def __init__(
        self,
        *,
        precision: PresetPrecision = "bf16-mixed",
        compression: Compression = "none",
        powersgd_rank: int | None = None,
        local_sgd_period: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        fragments: int | None = None,
        compression_start: int | None = None,
        gradient_as_bucket_view: bool = True,
        async_save: bool = False,
        **settings: Any,
    ) -> None:
        check_bool("gradient_as_bucket_view", gradient_as_bucket_view)
        taken = {**signature(DDPStrategy).parameters, **signature(DistributedDataParallel).parameters}
        known = taken.keys() - {"module", "kwargs"}
        if unknown := [name for name in settings if name not in known]:
            raise TypeError(
                f"DDPPreset has no argument {some(unknown)}; DDPStrategy has {some(sorted(known), len(known))}."
            )
        self.compression, self.compression_start = compression, compression_start
        self.powersgd_rank, self.local_sgd_period = powersgd_rank, local_sgd_period
        self.outer_lr, self.outer_momentum, self.fragments = outer_lr, outer_momentum, fragments
        self._compressor = make_compressor(
            compression,
            powersgd_rank=powersgd_rank,
            local_sgd_period=local_sgd_period,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            fragments=fragments,
            compression_start=compression_start,
        )
        hooks = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
        self._user_hook = {name: settings[name] for name in hooks if settings.get(name) is not None}
        if self._compressor is not None and self._user_hook:
            raise ValueError(
                f"compression={compression!r} brings its own communication hook, got {', '.join(self._user_hook)} as"
                " well. Remove one of them."
            )
        super().__init__(
            precision=precision, async_save=async_save, gradient_as_bucket_view=gradient_as_bucket_view, **settings
        )

    @property
    def is_apart(self) -> bool:
        """Whether several processes train with "local_sgd"."""
        return self.compression == "local_sgd" and not self.is_single_process

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether "local_sgd" has an outer optimizer."""
        return isinstance(self._compressor, LocalSGD) and self._compressor.has_outer

    @override
    def setup_distributed(self) -> None:
        if not self.is_single_process:
            super().setup_distributed()
        elif self.lightning_module is not None:
            keep_user_samplers(self.lightning_module.trainer)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if self.is_single_process:
            Strategy.setup(self, trainer)  # DDPStrategy.setup would need a process group.
        else:
            super().setup(trainer)
        if isinstance(self._active, LocalSGD):
            self._check_local_sgd(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> Any:  # Strategy.setup wraps the model with this private method.
        return model if self.is_single_process else super()._setup_model(model)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        hook: Callable[..., Any] | None = self._user_hook.get("ddp_comm_hook")
        if self._compressor is not None:
            self._compressor.register(self.model, self.num_processes)
        elif hook is not None and self.root_device.type != "cuda":  # Lightning registers it on CUDA only.
            wrapper = self._user_hook.get("ddp_comm_wrapper")
            self.model.register_comm_hook(self._user_hook.get("ddp_comm_state"), wrapper(hook) if wrapper else hook)

    @property
    def _active(self) -> Compressor | None:
        """The compressor, if the model is wrapped in DDP."""
        return self._compressor if isinstance(self.model, DistributedDataParallel) else None

    @property
    def trains_apart(self) -> bool:
        """Whether ranks may have weights of their own at present."""
        return isinstance(self._active, LocalSGD)

    def average_weights(self) -> None:
        """Replace weights that differ between ranks by their means; all ranks take part."""
        if self._active:
            self._active.average_weights()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors on the device by their means over the ranks, in place."""
        average(tensors)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._active and self.lightning_module is not None:
            self._active.begin(self.lightning_module.trainer.global_step)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if self._active and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            scaler = grad_scaler(trainer)
            # global_step does not yet count this step.
            average_now = trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps
            self._active.after_step(1.0 if scaler is None else scaler.get_scale(), average_now)
        return output

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self.average_weights()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.average_weights()
        if self._active:
            for optimizer in self.optimizers:  # The user may save a checkpoint after the fit.
                self._active.average_states(optimizer)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.average_weights()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if self._active:
            self._active.average_states(optimizer)
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        outer = self._compressor and self._compressor.outer_state()  # also after the fit, when there is no DDP
        if outer and "optimizer_states" in checkpoint:
            checkpoint["outer_optimizer"] = outer
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if "outer_optimizer" not in checkpoint:
            return
        if self._active and self.has_outer_optimizer:
            self._active.load_outer_state(checkpoint["outer_optimizer"])
        else:
            rank_zero_warn(
                "The checkpoint is DiLoCo's, and this run has no outer optimizer: training goes on from the mean of its"
                " workers, without the momentum of the outer steps. To keep it, train on several devices with the"
                " strategy 'ddp_diloco_bf16', or with outer_lr and outer_momentum as they were."
            )

    @override
    def teardown(self) -> None:
        if self._active:
            self._active.end()
        super().teardown()

    def _check_local_sgd(self, trainer: L.Trainer) -> None:
        """Raise for optimizers whose states are not those of one process, or have no mean."""
        for optimizer in trainer.optimizers:
            if _OWN_STATES.search(name := type(optimizer).__name__):
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} with compression='local_sgd' averages the states of optimizers,"
                    f" and {name} keeps states in few bits, or in numbers and bases of each rank's own, which have no"
                    " mean. Take another optimizer, such as AdamW, or choose compression='bf16' or 'powersgd'."
                )
            if hasattr(optimizer, "consolidate_state_dict"):
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} with compression='local_sgd' has different weights on each node"
                    f" between averages, got {name}, which shards its states among all nodes. Take another optimizer,"
                    " or choose compression='bf16' or 'powersgd'."
                )
            if self.has_outer_optimizer and re.search("Lookahead|Ranger|ScheduleFree", name):
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} with an outer optimizer moves the weights, got {name}, which"
                    " moves them back to a copy of its own. Take the optimizer within it, AdamW for instance, or leave"
                    " outer_lr and outer_momentum out."
                )

    @override
    def on_exception(self, exception: BaseException) -> None:
        messages = [argument for argument in exception.args if isinstance(argument, str) and _UNUSED in argument]
        if messages and self.lightning_module is not None:
            exception.args = (self._explain_unused(messages[0], self.lightning_module),)
        super().on_exception(exception)

    def _explain_unused(self, message: str, module: nn.Module) -> str:
        names = ", ".join(unused_parameters(message, module)) or "torch does not say which"
        remedy = f'Trainer(**lt.preset("{self.strategy_name}", find_unused_parameters=True))'
        if self.strategy_name == type(self).__name__:  # The strategy was created without preset().
            remedy = f"Trainer(strategy=lt.{self.strategy_name}(..., find_unused_parameters=True))"
        return (
            f"These parameters had no part in the loss of training_step and got no gradients: {names}. Use them, freeze"
            f" them with requires_grad_(False), or let DDP look for them in each step: {remedy}."
        )
