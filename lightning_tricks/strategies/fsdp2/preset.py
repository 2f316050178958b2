"""Fully sharded data parallelism (FSDP2): each process holds one shard of weights, gradients and optimizer states."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, final

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, distributed, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_count, check_type
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.ranks import samples_differ_in
from lightning_tricks.core.safe_load.damage import refuse_program
from lightning_tricks.core.selection import check_patterns
from lightning_tricks.core.weights.fsdp2 import FSDP2
from lightning_tricks.strategies.atomic_folder import AtomicFolders
from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy
from lightning_tricks.strategies.fsdp2.agreement import Agreement
from lightning_tricks.strategies.fsdp2.blocks import checkpoint_blocks, sharding_groups
from lightning_tricks.strategies.fsdp2.comparison import compare_at_first
from lightning_tricks.strategies.fsdp2.files import full_state, load_module, load_optimizer
from lightning_tricks.strategies.fsdp2.plan import Plan, check_plan, planned_layers, require_split_among, split
from lightning_tricks.strategies.fsdp2.prepare import prepare, require_untied
from lightning_tricks.strategies.fsdp2.root import Root

__all__ = ["FSDP2Preset"]


def backends_with_host(kind: str) -> str | None:
    """The backends of a process group for a type of device and for host memory; None for torch's own choice."""
    return None if kind == "cpu" else f"cpu:gloo,{kind}:{distributed.get_default_backend_for_device(kind)}"


@final
class FSDP2Preset(AtomicFolders, PresetStrategy, ModelParallelStrategy):
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
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(strategy=FSDP2Preset(), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
    """

    precisions = ("bf16-mixed", "32-true")

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
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
    ) -> None:
        check_bool("offload", offload)
        check_bool("activation_checkpointing", activation_checkpointing)
        if replicas != "nodes":
            check_count("replicas", replicas)
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
        check_bool("save_distributed_checkpoint", save_distributed_checkpoint)
        if modules is not None:
            check_patterns("modules", modules)
        check_type("process_group_backend", process_group_backend, str, NoneType)
        check_type("timeout", timeout, timedelta)
        self.offload = offload
        self.modules = modules
        self.activation_checkpointing = activation_checkpointing
        self.replicas = replicas
        self.tensor_parallel = tensor_parallel
        self.plan = plan
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._root: Root | None = None
        self._mesh: DeviceMesh | None = None
        self._agreement: Agreement | None = None  # Of tensor-parallel groups, if they have several processes.
        self._loads_file = False
        super().__init__(
            precision=precision,
            save_distributed_checkpoint=save_distributed_checkpoint,
            tensor_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    # -- setup --------------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        processes = self.num_nodes * self.num_processes
        replicas = self.num_nodes if self.replicas == "nodes" else self.replicas
        if processes % replicas:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} shares the processes out among copies of the model, got"
                f" replicas={self.replicas} for {processes} processes: choose a number of copies that divides theirs."
            )
        parts = self.num_processes if self.tensor_parallel == "node" else self.tensor_parallel
        if processes % parts:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} splits layers among groups of processes, got"
                f" tensor_parallel={self.tensor_parallel} for {processes} processes: choose a number that divides"
                " theirs."
            )
        self._data_parallel_size, self._tensor_parallel_size = processes // parts, parts
        if self.offload and self._process_group_backend is None:
            self._process_group_backend = backends_with_host(self.root_device.type)
        super().setup_environment()
        if self.offload and "cpu" not in (found := distributed.get_backend_config()):
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} adds up the norms of gradients in host memory, for which the process"
                f" group needs a backend, got {found!r}. Ray makes it by TorchConfig(backend=...), others by"
                f" init_process_group(...): pass {backends_with_host(self.root_device.type)!r}, or leave the group to"
                " the strategy."
            )
        self._mesh = self.device_mesh["data_parallel"]
        if replicas > 1:
            shape, names = (replicas, processes // replicas), ("replicate", "shard")
            self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        if parts > 1:
            self._agreement = Agreement(self.device_mesh)
            self._undo.callback(samples_differ_in(self._mesh.get_group()))

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} shards with fully_shard, got modules wrapped in"
                " FullyShardedDataParallel. Remove that wrapper."
            )
        if self._agreement is not None:
            self._agreement.share_random_numbers(self.root_device)
            self._undo.callback(wrap_method(self.precision_plugin, "clip_grad_by_norm", self._clip_by_norm))
        validation, fit = trainer.validate_loop, trainer.fit_loop.epoch_loop.val_loop
        for loop in (fit, validation, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # whose tensors have no versions, which torch's FSDP2 asks for
        self._shard(module)
        self._root = Root(module)
        # Lightning's strategy requires a configure_model hook that shards. The user's own hook has already run.
        # Not through wrap_method: Lightning looks through a wrapper, and would find the hook not overridden.
        module.configure_model = self._shard
        try:
            super().setup(trainer)
        finally:
            del module.configure_model
        if len(self.optimizers) > 1:  # toggle_optimizer would freeze the shards, but not the gathered weights.
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} trains with one optimizer, got {len(self.optimizers)}. Make their"
                " parameters groups of one optimizer, or choose a DDP preset."
            )

    def _shard(self, module: pl.LightningModule) -> None:
        """Shard what the user has not sharded, group by group: a device never holds two unsharded groups."""
        if self._layer_sync is not None:  # Set by Trainer(sync_batchnorm=True).
            self._layer_sync.apply(module)
        offload = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda") if self.offload else OffloadPolicy()
        groups = sharding_groups(module, self.modules)
        require_untied(module)
        parts = self.device_mesh["tensor_parallel"]
        planned: dict[nn.Module, ParallelStyle] = {}
        if isinstance(module, FSDPModule):  # From an earlier run.
            require_split_among(parts.size(), module)
        elif self.plan is not None or parts.size() > 1:
            planned = planned_layers(module, self.plan, parts.size())
        if self.activation_checkpointing:
            checkpoint_blocks(module, self.modules, self._undo)
        left = dict(planned)
        for group in [*groups, *([] if isinstance(module, FSDPModule) else [module])]:
            prepare(group, self.root_device)
            if self._agreement is not None:
                split({layer: left.pop(layer) for layer in group.modules() if layer in left}, parts)
            fully_shard(group, mesh=self._mesh, offload_policy=offload)
        if self._agreement is not None:
            compare_at_first(module, planned, self.root_device)

    @override
    def model_to_device(self) -> None:
        """Move the submodules without parameters; sharded weights are on their device already."""
        for submodule in self._module.modules():
            if not any(True for _ in submodule.parameters()):
                submodule.to(self.root_device)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._root is not None:
            self._root.recover()

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.root.run(partial(super().training_step, *args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.root.run(partial(super().validation_step, *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.root.run(partial(super().test_step, *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.root.run(partial(super().predict_step, *args, **kwargs))

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
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self._module.automatic_optimization:
            self.root.expect_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._agreement is not None:
            self._agreement.require_same_step(closure_loss, self._module)
        if self._module.automatic_optimization:
            self.root.end_step()
        else:
            self.root.unshard()

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        if not self._module.automatic_optimization:
            self.root.unshard()
        return output

    def _clip_by_norm(self, _: Any, optimizer: Optimizer, clip_val: float) -> None:
        """Clip gradients by their norm; torch's own takes those of one mesh only."""
        weights = FSDP2(self._module)
        found = [(p, p.grad) for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        if parts := [part for _, gradient in found if (part := weights.local(gradient)) is not None]:
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

    @property
    def root(self) -> Root:
        """The root that runs the steps."""
        assert self._root is not None, "the root is made in setup()"
        return self._root

    @property
    def _module(self) -> Any:
        """The LightningModule; after setup it is also an FSDPModule."""
        assert self.lightning_module is not None, "the module is set in connect()"
        return self.lightning_module

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.root.broadcast_buffers()
        if self.save_distributed_checkpoint:
            return super().lightning_module_state_dict()
        return full_state(self._module.state_dict(), keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.save_distributed_checkpoint:
            return super().optimizer_state(optimizer)
        return full_state(optimizer.state_dict(), keep=self.is_global_zero)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from lightning_tricks.strategies.fsdp2.folders import read_module, read_optimizer

        path = Path(self.broadcast(checkpoint_path))
        self.require_complete(path)
        self._loads_file = path.is_file()
        refuse_program(path if self._loads_file else path / "meta.pt")
        if self._loads_file:  # Lightning runs its hooks, then loads it through the methods below.
            return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        checkpoint = torch.load(path / "meta.pt", map_location="cpu", weights_only=weights_only)
        read_module(path, self._module, strict=self._module.strict_loading)
        for index, optimizer in enumerate(self.optimizers if is_fitting(self._module.trainer) else []):
            read_optimizer(path, self._module, optimizer, index=index)
        return checkpoint

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return self._loads_file

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._loads_file:
            load_module(self._module, checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer(optimizer, state)
