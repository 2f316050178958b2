"""Sharding by FSDP2; apart from ``FSDP2Preset``, which adds the split of layers that few need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_count, check_type
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.safe_load.damage import refuse_program
from lightning_tricks.core.selection import check_patterns
from lightning_tricks.strategies.async_save import error_of
from lightning_tricks.strategies.atomic_folder import AtomicFolders, Group
from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy
from lightning_tricks.strategies.fsdp2.blocks import checkpoint_blocks, sharding_groups
from lightning_tricks.strategies.fsdp2.checkpoint_files import full_state, load_module, load_optimizer
from lightning_tricks.strategies.fsdp2.prepare import prepare, require_untied
from lightning_tricks.strategies.fsdp2.root import Root


def backends_with_host(kind: str) -> str | None:
    """The backends of a process group for a type of device and for host memory; None for torch's own choice."""
    return None if kind == "cpu" else f"cpu:gloo,{kind}:{distributed.get_default_backend_for_device(kind)}"


class ShardedPreset(AtomicFolders, PresetStrategy, ModelParallelStrategy):
    """Shards a module among all processes, or among those of each copy of it; see ``FSDP2Preset`` for the arguments."""

    precisions = ("bf16-mixed", "32-true")

    def __init__(
        self,
        *,
        precision: PresetPrecision,
        offload: bool,
        modules: str | Sequence[str] | None,
        activation_checkpointing: bool,
        replicas: int | Literal["nodes"],
        save_distributed_checkpoint: bool,
        async_save: bool,
        process_group_backend: str | None,
        timeout: timedelta,
    ) -> None:
        check_bool("offload", offload)
        check_bool("activation_checkpointing", activation_checkpointing)
        if replicas != "nodes":
            check_count("replicas", replicas)
        check_bool("save_distributed_checkpoint", save_distributed_checkpoint)
        check_patterns("modules", modules, optional=True)
        check_type("process_group_backend", process_group_backend, str, NoneType)
        check_type("timeout", timeout, timedelta)
        self.offload = offload
        self.modules = modules
        self.activation_checkpointing = activation_checkpointing
        self.replicas = replicas
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self._root: Root | None = None
        self._mesh: DeviceMesh | None = None
        self._loads_file = False
        super().__init__(
            precision=precision,
            async_save=async_save,
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
        self._data_parallel_size, self._tensor_parallel_size = self._mesh_shape(processes)
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

    def _mesh_shape(self, processes: int) -> tuple[int, int]:
        """The number of processes with other samples, and of those that compute one batch together."""
        return processes, 1

    @override
    def setup(self, trainer: L.Trainer) -> None:
        module = self._module
        if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} shards with fully_shard, got modules wrapped in"
                " FullyShardedDataParallel. Remove that wrapper."
            )
        validation, fit = trainer.validate_loop, trainer.fit_loop.epoch_loop.val_loop
        for loop in (fit, validation, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # whose tensors have no versions, which torch's FSDP2 asks for
        if self._layer_sync is not None:  # Set by Trainer(sync_batchnorm=True).
            self._layer_sync.apply(module)
        require_untied(module)  # before a plan is compared with ties that a real device would undo
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

    def _shard(self, module: L.LightningModule) -> None:
        """Shard what the user has not sharded, group by group: a device never holds two unsharded groups."""
        groups = sharding_groups(module, self.modules)
        if self.activation_checkpointing:
            checkpoint_blocks(module, self.modules, self._undo)
        for group in [*groups, *([] if isinstance(module, FSDPModule) else [module])]:
            prepare(group, self.root_device)
            self._shard_group(group)

    def _shard_group(self, group: nn.Module) -> None:
        offload = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda") if self.offload else OffloadPolicy()
        fully_shard(group, mesh=self._mesh, offload_policy=offload)

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
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self._module.automatic_optimization:
            self.root.expect_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
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
    def _write(self, checkpoint: dict[str, Any], folder: Path, group: Group) -> BaseException | None:
        from lightning_tricks.strategies.fsdp2.checkpoint_files import write_folder

        return error_of(partial(write_folder, checkpoint, folder, group, with_rest=self.is_global_zero))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        from lightning_tricks.strategies.fsdp2.checkpoint_files import read_module, read_optimizer

        self.finish_saving()
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
