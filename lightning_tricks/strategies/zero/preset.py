"""DeepSpeed ZeRO: each process holds one shard of optimizer states, gradients and weights."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, Literal, final

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, ParallelStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torch.torch_version import TorchVersion
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_type
from lightning_tricks.core.fit_start import announce
from lightning_tricks.core.install import pip_install, required
from lightning_tricks.core.lightning.compiler import prepare_to_compile, remove_stale_locks
from lightning_tricks.core.lightning.patching import wrap_method
from lightning_tricks.core.lightning.trainer import is_fitting, will_step
from lightning_tricks.core.safe_load.damage import zero_tag
from lightning_tricks.core.safe_load.files import load_zero_file
from lightning_tricks.core.weights.zero import load_full_weights
from lightning_tricks.strategies.atomic_folder import AtomicFolders
from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy
from lightning_tricks.strategies.zero.config import Offload, Stage, zero_config

__all__ = ["ZeROPreset"]

# 0.17 and 0.18 accumulate gradients incorrectly in stage 2, 0.18.9 fails with torch 2.13, and 0.19.0 now and then
# validates other weights than it has loaded, in stage 3 with offload (2 of 6 runs; 0.19.8 in none of 12).
OLDEST_DEEPSPEED = "0.19.8"


def require_deepspeed() -> None:
    """Raise unless DeepSpeed is installed and new enough."""
    with required("ZeROPreset needs DeepSpeed", "deepspeed"):
        import deepspeed
    if TorchVersion(deepspeed.__version__) < OLDEST_DEEPSPEED:
        raise ImportError(
            f"ZeROPreset needs DeepSpeed {OLDEST_DEEPSPEED} or newer, got {deepspeed.__version__}:"
            f" {pip_install('deepspeed')}"
        )


def check_clipping(preset: str, algorithm: str | None) -> None:
    """Raise if gradients are to be clipped by value."""
    if algorithm == "value":
        raise MisconfigurationException(
            f"strategy={preset!r} clips gradients by their norm, got gradient_clip_algorithm='value'."
            " Pass gradient_clip_algorithm='norm', or remove it."
        )


def check_muon(preset: str, optimizer: Optimizer) -> None:
    """Raise for DeepSpeed's own Muon, of which DeepSpeed would clip the steps in the place of the gradients."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if isinstance(optimizer, MuonWithAuxAdam):
        raise MisconfigurationException(
            f"strategy={preset!r} cannot clip the gradients of {type(optimizer).__name__}: DeepSpeed takes the norm of"
            " what it has orthogonalized, which says nothing of the gradients, and makes every step small. Leave"
            " gradient_clip_val= out, or take lightning_tricks.optimizer('muon', ...) with strategy='fsdp2_bf16'."
        )


def check_device(preset: str, device_type: str, precision: str) -> None:
    """Raise unless DeepSpeed supports the device, a choice that it makes when it is imported, and the precision."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = accelerator.device_name()
    if precision == "16-mixed" and supported == device_type and not accelerator.is_fp16_supported():
        raise MisconfigurationException(
            f"strategy={preset!r} trains in '16-mixed', which DeepSpeed does not support on this {supported}. Use a"
            " preset in bf16, or preset(..., precision='bf16-mixed')."
        )
    if supported != device_type:
        raise MisconfigurationException(
            f"strategy={preset!r} trains on {device_type}, but DeepSpeed was imported for {supported}. Set"
            f" DS_ACCELERATOR={device_type} in the environment before Python starts, or choose another accelerator=."
        )


def check_compiled(preset: str, module: nn.Module) -> None:
    """Raise if torch.compile has wrapped a submodule: ZeRO-3 would not find the weights inside the wrapper."""
    if compiled := [name for name, submodule in module.named_modules() if isinstance(submodule, OptimizedModule)]:
        raise MisconfigurationException(
            f"strategy={preset!r} gathers the weights of each submodule when it runs, which torch.compile(submodule)"
            f" prevents, got {compiled[0]!r}. Leave torch.compile out and add callbacks=[lightning_tricks.Compile()]."
        )


def check_nvme(preset: str, path: str) -> None:
    """Raise unless the folder is writable and DeepSpeed can use it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        raise MisconfigurationException(
            f"strategy={preset!r} offloads to nvme_path={path!r}, which is not a writable folder. Create it, or pass"
            " another folder on the NVMe disk."
        )
    if not AsyncIOBuilder().is_compatible():
        raise MisconfigurationException(
            f"strategy={preset!r} reads and writes nvme_path={path!r} with DeepSpeed's async_io, which needs libaio"
            " and cannot be built here. Install libaio (apt install libaio-dev), or pass offload='cpu'."
        )


def check_file(path: str | Path) -> None:
    """Raise unless the path is one file."""
    if os.path.isdir(path):
        raise MisconfigurationException(
            f"load_full_weights=True loads one file, got the folder ckpt_path={str(path)!r}. Leave"
            " load_full_weights= out to load shards."
        )


def check_shards(preset: str, path: Path, ranks: int | None) -> None:
    """Raise unless the path is a folder with the shards of ``ranks`` processes; None accepts any number."""
    if path.is_file():
        raise MisconfigurationException(
            f"ckpt_path={str(path)!r} is one file, and strategy={preset!r} loads shards. Pass load_full_weights=True"
            " to load its weights, without optimizer states."
        )
    saved = len(list(path.glob("*/*_optim_states.pt")))
    if ranks is not None and saved not in (0, ranks):
        raise MisconfigurationException(
            f"ckpt_path={str(path)!r} has the shards of {saved} processes, and DeepSpeed needs as many to load them,"
            f" got {ranks}. Resume on {saved}, or write its weights to one file with lightning-tricks consolidate and"
            " load that file into the module."
        )


def refuse_code(strategy: ParallelStrategy, folder: Path) -> None:
    """Raise on all ranks if a file could run code, before DeepSpeed unpickles it."""
    refusal = None
    try:
        files = sorted(zero_tag(folder).glob("*.pt")) if (folder / "latest").is_file() else []
        for file in files[strategy.global_rank :: strategy.world_size]:
            load_zero_file(file)
    except ValueError as error:
        refusal = error
    if not strategy.reduce_boolean_decision(refusal is None):
        raise refusal or ValueError(f"another rank has refused a file in {folder}.")


@final
class ZeROPreset(AtomicFolders, PresetStrategy, DeepSpeedStrategy):
    """DeepSpeed ZeRO for an ordinary LightningModule: the presets whose names begin with ``zero``.

    On each of N devices, AdamW in 16 bits needs ``2P + 2P + 12P`` bytes for P weights: weights, gradients, and
    optimizer states with the fp32 master weights. Stage 1 divides the 12P by N, stage 2 also the gradients' 2P, stage
    3 all of it. ``offload`` moves what is divided to host memory or to a disk.

    Differences from Lightning's ``DeepSpeedStrategy``:

    - It also runs on a CPU, ``accelerator="cpu"``, with gloo and without compiling anything.
    - ``accumulate_grad_batches`` averages gradients over the batches of a step, and the last batches of an epoch make
      a step, as with every other strategy; ``BatchSizeWarmup`` works. Lightning's strategy divides by
      ``accumulate_grad_batches`` twice, and its steps extend across epochs, out of step with ``global_step`` and the
      schedulers.
    - Full weights from a file (``load_full_weights``) reach the fp32 master weights, from which the next step starts,
      and the buffers of every rank, in any stage.
    - ``trainer.validate(ckpt_path=...)`` works in stage 3.
    - A checkpoint folder that could run code is refused unless you allow what is in it; DeepSpeed would run it.
    - With manual optimization, ``self.clip_gradients(optimizer, ...)`` clips in the optimizer's next step. In stages 1
      and 2 such a module must step after each ``manual_backward``: DeepSpeed would forget the gradients of an earlier
      one.

    "Mixed" has DeepSpeed's meaning: the *module itself* and every floating-point tensor of a batch, including targets,
    are cast. Nothing is autocast; only master weights and optimizer states are fp32. Compute a loss that needs more
    precision in fp32: ``F.mse_loss(self(x).float(), y.float())``. "16-mixed" scales the loss; a step that overflows is
    skipped, and counted, as with torch's GradScaler.

    This strategy needs DeepSpeed 0.19.8 or newer (the extra ``deepspeed``). In stage 2, 0.17.6 and 0.18.2 forget all
    but the last batch of a step, and 0.19.0 may validate other weights than it has loaded in stage 3.

    Args:
        precision: The precision to train in: "bf16-mixed", "16-mixed" or "32-true"; optimizer states are always fp32.
        stage: The ZeRO stage: shard optimizer states (1), gradients too (2), weights too (3).
        offload: The place of optimizer states, and in stage 3 of the weights: "none" (the device), "cpu" (host
            memory) or "nvme" (a disk, in stage 3 only).
        nvme_path: A folder on the NVMe disk; required for "nvme" only.
        config: Parts of a DeepSpeed configuration, for settings without an argument here. They are merged over the
            preset's configuration (see ``strategy.config``); the dictionary is never modified.
        load_full_weights: Whether ``ckpt_path`` is one file with full weights, saved by any strategy, instead of a
            folder of shards. Optimizer states are not resumed from such a file.
        exclude_frozen_parameters: Whether checkpoints leave out weights that are not trained.
        async_save: Always False: DeepSpeed saves from the memory that training changes.
        process_group_backend: The backend of ``torch.distributed``; by default nccl on CUDA, gloo on a CPU.
        timeout: The time limit of a collective operation.

    Raises:
        ImportError: If DeepSpeed is missing or too old.
        ValueError: If arguments cannot be combined, if ``config`` contradicts them, or if a checkpoint folder could
            run code.
        MisconfigurationException: At the start of a run, if DeepSpeed was imported for other devices or does not
            support fp16 on them, if the NVMe disk cannot be used, if gradients are to be clipped by value, or if
            ``ckpt_path`` is one file or has the shards of another number of processes. In training, for a second
            ``manual_backward`` before a step in stages 1 and 2, and before a step that would clip beside DeepSpeed's
            own Muon.

    Example:
        >>> import lightning as L
        >>> L.Trainer(strategy=ZeROPreset(stage=2), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'

    References:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
        https://arxiv.org/abs/1910.02054; Ren et al., "ZeRO-Offload", USENIX ATC 2021, https://arxiv.org/abs/2101.06840
    """

    def __init__(
        self,
        *,
        precision: PresetPrecision = "bf16-mixed",
        stage: Stage = 3,
        offload: Offload = "none",
        nvme_path: str | None = None,
        config: dict[str, Any] | None = None,
        load_full_weights: bool = False,
        exclude_frozen_parameters: bool = False,
        async_save: Literal[False] = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        require_deepspeed()
        check_type("nvme_path", nvme_path, str, NoneType)
        check_bool("load_full_weights", load_full_weights)
        check_bool("exclude_frozen_parameters", exclude_frozen_parameters)
        if async_save:
            raise ValueError(
                "async_save=True writes copies of weights and optimizer states, got a ZeRO preset, whose checkpoints"
                " DeepSpeed writes itself from the memory that training changes. Choose fsdp2_bf16, or leave it out."
            )
        check_type("process_group_backend", process_group_backend, str, NoneType)
        check_type("timeout", timeout, timedelta, NoneType)
        self.stage, self.offload, self.nvme_path = stage, offload, nvme_path
        self._has_gradients = False  # Whether manual_backward() has run since the last step.
        super().__init__(
            precision=precision,
            config=zero_config(stage=stage, offload=offload, nvme_path=nvme_path, precision=precision, config=config),
            load_full_weights=load_full_weights,
            exclude_frozen_parameters=exclude_frozen_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    @override
    def make_precision_plugin(self) -> Precision:
        return DeepSpeedPrecision(self.precision)

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    @override
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        # DeepSpeed needs the index of a rank's device, and Lightning's CPU devices have none.
        numbered = [torch.device("cpu", i) if d.type == "cpu" else d for i, d in enumerate(devices or [])]
        self._parallel_devices = numbered if devices else devices

    # -- a run --------------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        assert self.config is not None
        check_clipping(self.strategy_name, self.lightning_module.trainer.gradient_clip_algorithm)
        check_device(self.strategy_name, self.device_type, self.precision)
        remove_stale_locks()
        if self.nvme_path is not None:
            check_nvme(self.strategy_name, self.nvme_path)
            prepare_to_compile("async_io")
        # Let Lightning take these two from the Trainer again: an earlier run may have written others.
        for key in ("gradient_accumulation_steps", "gradient_clipping"):
            self.config.pop(key, None)
        self._config_initialized = False
        # torch warns at each of DeepSpeed's collectives, and the user cannot change them.
        warnings.filterwarnings("ignore", r"`torch\.distributed\..*_tensor` is deprecated", FutureWarning)
        self._has_gradients = False
        self._undo.callback(wrap_method(self.precision_plugin, "clip_gradients", self._clip))
        if isinstance(self.accelerator, CPUAccelerator):
            import deepspeed

            # DeepSpeed's shared-memory reduction is faster than gloo but takes a minute to compile.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            announce(self.lightning_module.trainer)
            super(DeepSpeedStrategy, self).setup_environment()  # Skips Lightning's check for CUDA.
        else:
            super().setup_environment()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        if self.stage == 3:
            check_compiled(self.strategy_name, trainer.lightning_module)
        super().setup(trainer)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return False  # Lightning's loop counts the batches of a step; backward() tells DeepSpeed.

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        yield  # DeepSpeed's no_sync does not support sharded gradients; see backward().

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._require_step_after_backward()
        else:
            self.deepspeed_engine.set_gradient_accumulation_boundary(will_step(self.lightning_module.trainer))
            kwargs["scale_wrt_gas"] = False  # Lightning has already divided the loss.
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._has_gradients = False
            self.deepspeed_engine.optimizer.clip_grad = 0.0  # A call of clip_gradients() is for one step only.
        return output

    def _require_step_after_backward(self) -> None:
        """Raise for a second backward pass before a step: DeepSpeed would forget the gradients of the first."""
        if self._has_gradients and self.stage < 3:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} keeps the gradients of one manual_backward() for each"
                " optimizer.step(), got another one before it. Step after each, add up the losses, train with automatic"
                " optimization and accumulate_grad_batches, or choose stage 3."
            )
        self._has_gradients = True

    def _clip(
        self,
        original: Callable[..., None],  # does nothing
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Let DeepSpeed clip in the next step, where it knows the norm of all gradients."""
        if clip_val:
            check_clipping(self.strategy_name, gradient_clip_algorithm)
            check_muon(self.strategy_name, self.deepspeed_engine.basic_optimizer)
        self.deepspeed_engine.optimizer.clip_grad = float(clip_val)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.load_full_weights:
            checkpoint_path = self.broadcast(checkpoint_path)
            check_file(checkpoint_path)
            return super(DeepSpeedStrategy, self).load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        loads_shards = self.stage == 3 or is_fitting(self.lightning_module.trainer)
        folder = Path(self.broadcast(checkpoint_path))
        check_shards(self.strategy_name, folder, self.world_size if loads_shards else None)
        self.require_complete(folder)
        refuse_code(self, folder)
        optimizer = self.deepspeed_engine.optimizer
        if optimizer is not None and not hasattr(optimizer, "_restore_from_bit16_weights"):
            # In stage 3 without an optimizer there are no master weights, but DeepSpeed calls this to update them.
            optimizer._restore_from_bit16_weights = lambda: None
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.load_full_weights:  # Otherwise DeepSpeed has already loaded them.
            fitting = is_fitting(self.lightning_module.trainer)
            load_full_weights(self.lightning_module, checkpoint["state_dict"], strict=strict, masters=fitting)
