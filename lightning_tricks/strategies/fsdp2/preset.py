"""The presets of FSDP2: sharding, which is in sharded.py, and layers that are split (tensor parallelism)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, final

import lightning as L
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, distributed, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_count
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.ranks import samples_differ_in
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.strategies.base import PresetPrecision
from lightning_tricks.strategies.fsdp2.agreement import Agreement
from lightning_tricks.strategies.fsdp2.comparison import StepComparison, compare_at_first
from lightning_tricks.strategies.fsdp2.plan import Plan, check_plan, planned_layers, require_split_among, split
from lightning_tricks.strategies.fsdp2.sharded import ShardedPreset

__all__ = ["FSDP2Preset"]


@final
class FSDP2Preset(ShardedPreset):
    """FSDP2 for an ordinary LightningModule: the presets ``fsdp2_*``, ``hsdp_bf16`` and ``tp_bf16``.

    Each process keeps a shard of every weight, its gradient and its optimizer state, all in fp32. The weights of a
    block are gathered when it runs and freed afterwards, in the forward and the backward pass. The weights of the
    root, which is everything outside of the blocks, stay gathered until the step ends. Every process must run the same
    blocks in the same order. Gradients are reduced after every batch, even if they accumulate: otherwise each device
    would hold all of them unsharded.

    Args:
        precision: The precision to train in: "bf16-mixed" or "32-true".
        offload: Whether weights, gradients and optimizer states stay in host memory, where the optimizer steps.
        modules: The submodules to gather one at a time: one regular expression or class name, or a sequence of them,
            searched in dotted names. By default the repeated blocks and the large layers outside of them.
        activation_checkpointing: Whether to recompute each block in the backward pass instead of keeping its
            activations.
        replicas: The number of copies of the model, which divides the number of processes, or "nodes" for one copy a
            node (hybrid sharding, HSDP). The processes of a copy, which are neighbours, hold one shard of it each:
            weights are gathered among them, and gradients are reduced among the copies, too.
        tensor_parallel: The number of neighbouring processes that compute one batch together, each with its part of the
            layers in ``plan``; it divides the number of processes, or is "node" for those of a node. The parts are
            sharded among the other processes, which have other samples.
        plan: How layers are split, by patterns as in ``modules``: "colwise" (a part of the outputs), "rowwise" (a part
            of the inputs, and the sum of the outputs) or another style, see ``docs/strategies.md``, or an object of
            ``torch.distributed.tensor.parallel``. By default the plan of the transformers model in the module.
        save_distributed_checkpoint: Whether a checkpoint is a folder of shards; otherwise it is one file, which any
            strategy can load.
        async_save: Whether training goes on while the checkpoints of ``ModelCheckpoint`` are written, from a copy in
            host memory; see ``docs/strategies.md``.
        process_group_backend: The backend of ``torch.distributed``; by default the accelerator's.
        timeout: The time limit of a collective operation.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: For ``tensor_parallel`` with ``replicas``, a plan with nothing to split, and a style that there is
            not.
        MisconfigurationException: At setup, for numbers that do not divide the number of processes, a layer that cannot
            be split, several optimizers, ``activation_checkpointing`` without blocks, modules wrapped by FSDP1, or
            weights on the meta device that are tied or cannot be initialized; with torch before 2.13, also for a module
            with an interrupted step. In the first step, for processes that should compute the same and do not.

    Example:
        >>> import lightning as L
        >>> L.Trainer(strategy=FSDP2Preset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
    """

    def __init__(
        self,
        *,
        precision: PresetPrecision = "bf16-mixed",
        offload: bool = False,
        modules: str | Sequence[str] | None = None,
        activation_checkpointing: bool = False,
        replicas: int | Literal["nodes"] = 1,
        tensor_parallel: int | Literal["node"] = 1,
        plan: Plan | None = None,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        super().__init__(
            precision=precision,
            offload=offload,
            modules=modules,
            activation_checkpointing=activation_checkpointing,
            replicas=replicas,
            save_distributed_checkpoint=save_distributed_checkpoint,
            async_save=async_save,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if tensor_parallel != "node":
            check_count("tensor_parallel", tensor_parallel)
        if replicas != 1 and tensor_parallel != 1:
            raise ValueError(
                f"tensor_parallel splits one copy of the model, got tensor_parallel={tensor_parallel!r} and"
                f" replicas={replicas!r}: remove one of them."
            )
        if plan is not None:
            check_plan(plan)
            if tensor_parallel == 1:
                raise ValueError("plan splits layers among tensor_parallel processes, got tensor_parallel=1: set it.")
        self.tensor_parallel = tensor_parallel
        self.plan = plan
        self._agreement: Agreement | None = None  # Of tensor-parallel groups, if they have several processes.
        self._comparison: StepComparison | None = None  # For the first step.
        self._left: dict[nn.Module, ParallelStyle] = {}  # The layers that are still to be split.

    # -- setup --------------------------------------------------------------------------------------------------------

    @override
    def _mesh_shape(self, processes: int) -> tuple[int, int]:
        parts = self.num_processes if self.tensor_parallel == "node" else self.tensor_parallel
        if processes % parts:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} splits layers among groups of processes, got"
                f" tensor_parallel={self.tensor_parallel} for {processes} processes: choose a number that divides"
                " theirs."
            )
        return processes // parts, parts

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.device_mesh["tensor_parallel"].size() > 1:
            self._agreement = Agreement(self.device_mesh)
            self._undo.callback(samples_differ_in(self.device_mesh["data_parallel"].get_group()))

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if self._agreement is not None:
            self._agreement.share_random_numbers(self.root_device)
            self._undo.callback(wrap_method(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm))
        super().setup(trainer)

    @override
    def _shard(self, module: L.LightningModule) -> None:
        parts = self.device_mesh["tensor_parallel"].size()
        planned: dict[nn.Module, ParallelStyle] = {}
        if isinstance(module, FSDPModule):  # From an earlier run.
            require_split_among(parts, module)
        elif self.plan is not None or parts > 1:
            planned = planned_layers(module, self.plan, parts)
        self._left = dict(planned)
        super()._shard(module)
        if self._agreement is not None:
            compare_at_first(module, planned, self.root_device)
            if StepComparison.is_due(module, planned):
                self._comparison = StepComparison(module, planned, self.root_device)

    @override
    def _shard_group(self, group: nn.Module) -> None:
        if self._agreement is not None:
            layers = {layer: self._left.pop(layer) for layer in group.modules() if layer in self._left}
            split(layers, self.device_mesh["tensor_parallel"])
        super()._shard_group(group)

    # -- processes that compute the same ------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        if self._agreement is not None:
            self._agreement.begin(self._module)

    @override
    def on_validation_end(self) -> None:
        if self._agreement is not None:  # Before the loader workers of the next epoch are seeded.
            self._agreement.share_random_numbers(self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._agreement is not None and batch_idx == 0:
            self._agreement.share_random_numbers(self.root_device)
            self._agreement.require_same_batch(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._comparison is not None:
            comparison, self._comparison = self._comparison, None
            with torch.no_grad():
                self.root.run(partial(comparison.run, *args, **kwargs))
        return super().training_step(*args, **kwargs)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._agreement is not None:
            self._agreement.require_same_step(closure_loss, self._module)
        super().post_backward(closure_loss)

    def _clip_by_norm(self, _: Any, optimizer: Optimizer, clip_val: float) -> None:
        """Clip gradients by their norm; torch's own takes those of one mesh only."""
        weights = FSDP2(self._module)
        found = [(p, p.grad) for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        if parts := weights.parts(gradient for _, gradient in found):
            norm = weights.norm(parts, of=[parameter for parameter, _ in found])
            torch._foreach_mul_(parts, (clip_val / (norm + 1e-6)).clamp(max=1.0))

    # -- processes with other samples ---------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        # Lightning would seed loader workers by the rank of the process.
        seeds = self._agreement is not None and os.environ.get("PL_SEED_WORKERS", "0") != "0"
        if seeds and getattr(dataloader, "worker_init_fn", "none") is None:
            rank = self.distributed_sampler_kwargs["rank"]
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
        return super().process_dataloader(dataloader)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return super().reduce(tensor, group or self._samples, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        everyone = group is None or group is distributed.group.WORLD  # LightningModule.all_gather passes the latter.
        return super().all_gather(tensor, self._samples if everyone else group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), distributed.group.WORLD, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @property
    def _samples(self) -> Any:
        """The group of processes with other samples, if there are others with the same."""
        return None if self._agreement is None else self.device_mesh["data_parallel"].get_group()
