"""DeepSpeed ZeRO: optimizer states, gradients and weights in slices, one a process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, final

import lightning.pytorch as pl
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
from lightning_tricks.core.lightning.trainer import is_fitting, will_step
from lightning_tricks.core.safe_load.reader import load_zero_file
from lightning_tricks.core.trick import announce
from lightning_tricks.core.weights.zero import load_full_weights
from lightning_tricks.strategies.atomic_folder import AtomicFolders
from lightning_tricks.strategies.base import PresetPrecision, PresetStrategy
from lightning_tricks.strategies.zero.config import Offload, Stage, zero_config

__all__ = ["ZeROPreset"]

OLDEST = "0.19.0"  # 0.17 and 0.18 accumulate wrongly in stage 2; 0.18.9 fails with torch 2.13


def require_deepspeed() -> None:
    """Raise unless DeepSpeed is there, and new enough."""
    try:
        import deepspeed
    except ImportError as error:
        raise ImportError("ZeROPreset needs DeepSpeed: pip install 'lightning-tricks[deepspeed]'") from error
    if TorchVersion(deepspeed.__version__) < OLDEST:
        raise ImportError(
            f"ZeROPreset needs DeepSpeed {OLDEST} or newer, got {deepspeed.__version__}:"
            " pip install -U 'lightning-tricks[deepspeed]'"
        )


def check_clipping(preset: str, algorithm: str | None) -> None:
    """Raise for gradients that are to be clipped by value."""
    if algorithm == "value":
        raise MisconfigurationException(
            f"strategy={preset!r} clips gradients by their norm, got gradient_clip_algorithm='value'."
            " Pass gradient_clip_algorithm='norm', or leave it out."
        )


def check_device(preset: str, device_type: str, precision: str) -> None:
    """DeepSpeed decides for one kind of device as it is imported."""
    from deepspeed.accelerator import get_accelerator

    its = get_accelerator().device_name()
    if precision == "16-mixed" and its == device_type and not get_accelerator().is_fp16_supported():
        raise MisconfigurationException(
            f"strategy={preset!r} trains in '16-mixed', which DeepSpeed does not support on this {its}. Use a preset in"
            " bf16, or preset(..., precision='bf16-mixed')."
        )
    if its != device_type:
        raise MisconfigurationException(
            f"strategy={preset!r} trains on {device_type}, but DeepSpeed was imported for {its}. Set"
            f" DS_ACCELERATOR={device_type} in the environment before Python starts, or choose another accelerator=."
        )


def check_compiled(preset: str, module: nn.Module) -> None:
    """Raise for submodules that torch.compile has wrapped, whose weights ZeRO-3 does not find; it looks for them."""
    if compiled := [name for name, each in module.named_modules() if isinstance(each, OptimizedModule)]:
        raise MisconfigurationException(
            f"strategy={preset!r} gathers weights as their modules run, and cannot where torch.compile(submodule)"
            f" stands in between, got {compiled[0]!r}. Leave torch.compile out and add"
            " callbacks=[lightning_tricks.Compile()]."
        )


def check_nvme(preset: str, path: str) -> None:
    """Raise unless the folder can be written to and DeepSpeed can use it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not os.path.isdir(path) or not os.access(path, os.W_OK):
        raise MisconfigurationException(
            f"strategy={preset!r} offloads to nvme_path={path!r}, which is no folder that can be written to. Make it,"
            " or pass one on the NVMe disk."
        )
    if not AsyncIOBuilder().is_compatible():
        raise MisconfigurationException(
            f"strategy={preset!r} reads and writes nvme_path={path!r} by DeepSpeed's async_io, which needs libaio and"
            " cannot be built here. Install it (apt install libaio-dev), or pass offload='cpu'."
        )


def check_file(path: str | Path) -> None:
    """Raise for a folder, where one file is asked for."""
    if os.path.isdir(path):
        raise MisconfigurationException(
            f"load_full_weights=True loads one file, got the folder ckpt_path={str(path)!r}. Leave load_full_weights"
            " out to load shards."
        )


def check_shards(preset: str, path: Path, ranks: int | None) -> None:
    """Raise for one file, and for the shards of other than so many ranks, if that matters."""
    if path.is_file():
        raise MisconfigurationException(
            f"ckpt_path={str(path)!r} is one file, and strategy={preset!r} loads shards: pass load_full_weights=True to"
            " take the weights in it, without optimizer states."
        )
    saved = len(list(path.glob("*/*_optim_states.pt")))
    if ranks is not None and saved not in (0, ranks):
        raise MisconfigurationException(
            f"ckpt_path={str(path)!r} has the shards of {saved} processes, and DeepSpeed loads them on as many, got"
            f" {ranks}. Resume on {saved}, or make its weights one file, with lightning-tricks consolidate, and load"
            " that into the module."
        )


def refuse_code(strategy: ParallelStrategy, folder: Path) -> None:
    """Raise on all ranks before one of them unpickles, as DeepSpeed does, what could run code."""
    latest = folder / "latest"
    files = sorted((folder / latest.read_text().strip()).glob("*.pt")) if latest.is_file() else []
    wrong = None
    try:
        for file in files[strategy.global_rank :: strategy.world_size]:
            load_zero_file(file)
    except ValueError as error:
        wrong = error
    if not strategy.reduce_boolean_decision(wrong is None):
        raise wrong or ValueError(f"another rank has refused a file in {folder}.")


@final
class ZeROPreset(AtomicFolders, PresetStrategy, DeepSpeedStrategy):
    """ZeRO of an ordinary LightningModule: the presets whose names begin with ``zero``.

    Per device and for P weights on N devices, AdamW in 16 bits needs ``2P + 2P + 12P`` bytes for weights, gradients
    and optimizer states (with their fp32 masters). Stage 1 divides the 12P by N, stage 2 the gradients' 2P as well,
    stage 3 all; ``offload`` moves what is divided to the host, or to a disk.

    What differs from Lightning's ``DeepSpeedStrategy``:

    - It runs on CPU, too: ``accelerator="cpu"``, gloo, nothing compiled.
    - ``accumulate_grad_batches`` averages gradients over the batches of a step, and the last batches of an epoch are a
      step, as with every other strategy; ``BatchSizeWarmup`` works. Lightning's divides by ``accumulate_grad_batches``
      twice, and its steps run across epochs, apart from ``global_step`` and the schedulers.
    - Whole weights from a file (``load_full_weights``) reach the fp32 masters, from which the next step starts, and
      the buffers of each rank; in any stage.
    - ``trainer.validate(ckpt_path=...)`` works in stage 3.
    - A folder that could run code, which DeepSpeed would do, is refused unless you allow what is in it.
    - ``self.clip_gradients(optimizer, ...)`` in a module that steps by itself clips in its next step. In stages 1 and 2
      such a module steps after each ``manual_backward``: DeepSpeed would forget the gradients of an earlier one.

    "Mixed" means here what it means to DeepSpeed: the *module itself* is cast, and so is every floating-point tensor of
    a batch, targets too; nothing is autocast, and only masters and optimizer states are fp32. Compute a loss that
    needs more in fp32: ``F.mse_loss(self(x).float(), y.float())``. "16-mixed" scales the loss; a step that overflows
    is skipped, and counted, as with torch's GradScaler.

    DeepSpeed 0.19.0 or newer is needed (``pip install 'lightning-tricks[deepspeed]'``), tested up to 0.19.8. In stage
    2, 0.17.6 and 0.18.2 forget all but the last batch of a step.

    Args:
        precision: What to train in: "bf16-mixed", "16-mixed" or "32-true"; optimizer states are fp32 in each.
        stage: What is sharded: optimizer states (1), gradients too (2), weights too (3).
        offload: Where optimizer states, and in stage 3 the weights, wait: "none" on the device, "cpu" in host memory,
            "nvme" on a disk (stage 3).
        nvme_path: Folder on that disk.
        config: Parts of a DeepSpeed configuration, merged over the one made here (see ``strategy.config``) for what
            has no argument. It is never written to.
        load_full_weights: Whether a ``ckpt_path`` is one file with whole weights, of any strategy, rather than a
            folder of shards. It has no optimizer states to resume with.
        exclude_frozen_parameters: Leave weights that do not train out of checkpoints.
        process_group_backend: What processes talk by; by default nccl on CUDA, gloo on CPU.
        timeout: How long they wait for one another.

    Raises:
        ImportError: If DeepSpeed is missing or too old.
        ValueError: If arguments do not go together, or ``config`` contradicts them; for a folder that could run code.
        MisconfigurationException: At the start of a run, if DeepSpeed works on other devices than the Trainer or not in
            fp16 there, the NVMe disk cannot be used, gradients are to be clipped by value, or ``ckpt_path`` is one
            file or has the shards of another number of processes; in training, for a second ``manual_backward`` before
            a step in stages 1 and 2.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(strategy=ZeROPreset(stage=2), accelerator="cpu", devices=1, logger=False).precision
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
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        require_deepspeed()
        check_type("nvme_path", nvme_path, str, NoneType)
        check_bool("load_full_weights", load_full_weights)
        check_bool("exclude_frozen_parameters", exclude_frozen_parameters)
        check_type("process_group_backend", process_group_backend, str, NoneType)
        check_type("timeout", timeout, timedelta, NoneType)
        self.stage, self.offload, self.nvme_path = stage, offload, nvme_path
        self._waits_for_step = False  # with gradients, of a module that steps by itself
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
        # DeepSpeed is handed the index of a rank's device, which devices of CPU have not
        numbered = [torch.device("cpu", i) if d.type == "cpu" else d for i, d in enumerate(devices or [])]
        self._parallel_devices = numbered if devices else devices

    # -- a run --------------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        assert self.config is not None
        check_clipping(self.strategy_name, self.lightning_module.trainer.gradient_clip_algorithm)
        check_device(self.strategy_name, self.device_type, self.precision)
        if self.nvme_path is not None:
            check_nvme(self.strategy_name, self.nvme_path)
        for written in ("gradient_accumulation_steps", "gradient_clipping"):  # by Lightning, in an earlier run
            self.config.pop(written, None)
        self._config_initialized = False  # so that it writes them anew, from the Trainer of this run
        # torch's, for each of DeepSpeed's collectives in each step: nothing that a user can do
        warnings.filterwarnings("ignore", r"`torch\.distributed\..*_tensor` is deprecated", FutureWarning)
        self._waits_for_step = False
        self.precision_plugin.clip_gradients = self._clip  # type: ignore[method-assign]  # Lightning's does nothing
        if isinstance(self.accelerator, CPUAccelerator):
            import deepspeed

            # gloo reduces as well; this faster way within a host takes a minute of compilation
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            announce(self.lightning_module.trainer)
            super(DeepSpeedStrategy, self).setup_environment()  # leaves out Lightning's check for CUDA
        else:
            super().setup_environment()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if self.stage == 3:
            check_compiled(self.strategy_name, trainer.lightning_module)
        super().setup(trainer)

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return False  # Lightning's loop says which batches make a step, and DeepSpeed is told

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        yield  # `backward` tells DeepSpeed, whose own no_sync knows no sharded gradients

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._require_no_gradients()
        else:
            self.deepspeed_engine.set_gradient_accumulation_boundary(will_step(self.lightning_module.trainer))
            kwargs["scale_wrt_gas"] = False  # Lightning has divided the loss already
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            self._waits_for_step = False
            self.deepspeed_engine.optimizer.clip_grad = 0.0  # until it is asked for again
        return output

    def _require_no_gradients(self) -> None:
        """Raise for a second backward pass before a step, in whose place DeepSpeed would forget the first."""
        if self._waits_for_step and self.stage < 3:
            raise MisconfigurationException(
                f"strategy={self.strategy_name!r} keeps the gradients of one manual_backward() for each"
                " optimizer.step(), got another one before it. Step after each, add up the losses, train with automatic"
                " optimization and accumulate_grad_batches, or choose stage 3."
            )
        self._waits_for_step = True

    def _clip(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Have DeepSpeed clip in the step to come, in which it knows the norm of all gradients."""
        if clip_val:
            check_clipping(self.strategy_name, gradient_clip_algorithm)
        self.deepspeed_engine.optimizer.clip_grad = float(clip_val)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.load_full_weights:
            checkpoint_path = self.broadcast(checkpoint_path)
            check_file(checkpoint_path)
            return super(DeepSpeedStrategy, self).load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        again = self.stage == 3 or is_fitting(self.lightning_module.trainer)
        folder = Path(self.broadcast(checkpoint_path))
        check_shards(self.strategy_name, folder, self.world_size if again else None)
        self.require_whole(folder)
        refuse_code(self, folder)
        held = self.deepspeed_engine.optimizer
        if held is not None and not hasattr(held, "_restore_from_bit16_weights"):
            # DeepSpeed calls it after loading weights into stage 3 without an optimizer, where no master is to follow
            held._restore_from_bit16_weights = lambda: None
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self.load_full_weights:  # else DeepSpeed has loaded them
            fitting = is_fitting(self.lightning_module.trainer)
            load_full_weights(self.lightning_module, checkpoint["state_dict"], strict=strict, masters=fitting)
