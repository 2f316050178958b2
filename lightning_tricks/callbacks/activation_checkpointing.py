"""Activation checkpointing: activations inside blocks are recomputed in the backward pass, or wait in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, final, get_args

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_count
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.replay.recompute import recompute, require_python
from lightning_tricks.core.selection import check_patterns, select_blocks
from lightning_tricks.core.trick import Trick

__all__ = ["ActivationCheckpointing"]

Policy = Literal["full", "selective", "offload"]


@final
class ActivationCheckpointing(Trick):
    """Blocks keep only their inputs; activations inside are recomputed in the backward pass, with equal gradients.

    For L blocks with activations of A bytes and inputs of I bytes, a step keeps ``L*I + A`` instead of ``L*A`` bytes,
    and runs the forward pass of every block twice. The second run has the random numbers (torch, Python, NumPy) and the
    state of the first, so dropout is the same, and BatchNorm statistics are updated once. Blocks of any module are
    wrapped while it trains, under the same names, and restored when the fit ends or fails. Validation is not changed.
    It works under DDP, FSDP2 and DeepSpeed, and inside code that the module compiles.

    ``policy="selective"`` keeps the results of matrix products, convolutions and attention, and recomputes all else. It
    takes more memory and less time, which pays where those operations are long; in eager code, torch needs time to tell
    the operations apart. ``benchmarks/cost/speed.py`` measures both. torch raises in the backward pass if a layer
    writes into such a result (an in-place activation right after a convolution): make it ``inplace=False``, or use
    "full". It also raises in a second backward pass through one graph. With both policies torch raises for a block that
    writes into its own input, and for ``torch.func.grad``.

    ``policy="offload"`` computes nothing again: activations wait in host memory (pinned, with CUDA) and come back in
    the backward pass, so it takes the time of two transfers, and as much host memory. Without an accelerator nothing
    moves. Compiled graphs break around such blocks, which ``torch.compile(fullgraph=True)`` refuses.

    Args:
        modules: Regular expressions searched in submodules' names, or names of classes ("BertLayer"); one or a
            sequence. Of nested modules only the outermost are taken. Or a number of parameters, for the innermost
            submodules with at least so many. None for modules of one class that repeat in a ModuleList or Sequential.
        policy: "full" to recompute everything, "selective", or "offload".

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, if no block is found, for one that torch.jit has compiled, or on a
            device that torch has no module for (XLA); in the backward pass, for a block that changes what cannot be set
            back for its second run: a file, a closure, a tensor inside a container or a weight that is not written by
            its ``.data``.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ActivationCheckpointing()], accelerator="cpu", logger=False)

    References:
        Chen et al., arXiv 1604.06174; for "selective" Korthikanti et al., arXiv 2205.05198.
    """

    conflicts = (
        Conflict(
            ("ActivationCheckpointing",),
            "both wrap the same blocks, whose forward pass then runs three times",
            "Remove one of them, or name other modules",
            lambda one, other: one.modules == other.modules,
        ),
    )

    def __init__(self, modules: str | int | Sequence[str] | None = None, *, policy: Policy = "full") -> None:
        if isinstance(modules, int):
            check_count("modules", modules)
        elif modules is not None:
            check_patterns("modules", modules)
        check_choice("policy", policy, get_args(Policy))
        super().__init__()
        self.modules = modules
        self.policy = policy

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # The blocks exist only now, after configure_model.
        try:
            found = select_blocks(pl_module, self.modules)
        except ValueError as error:
            raise MisconfigurationException(
                f"ActivationCheckpointing(modules={self.modules!r}) selects nothing in {type(pl_module).__name__}:"
                f" {error}"
            ) from None
        _require_known_device(pl_module.device)
        torch.compiler.reset()  # code that was compiled earlier would still keep activations
        for name, block in found.items():
            parts = [block] if self.policy == "offload" else block.modules()
            require_python(parts, name, "ActivationCheckpointing")
            run = partial(offload, block) if self.policy == "offload" else partial(recompute, block, self.policy)
            self._wrap(block, "forward", run)


def _require_known_device(device: torch.device) -> None:
    """Raise for a device without a module of torch (as torch.cuda), which torch.utils.checkpoint asks."""
    if not hasattr(torch, device.type):
        raise MisconfigurationException(
            "ActivationCheckpointing: torch recomputes and moves activations on cuda, mps, xpu and cpu, got a device"
            f" of type {device.type!r}: leave it out there, and call torch_xla.utils.checkpoint in the module instead."
        )


@partial(torch.compiler.disable, recursive=False)  # code that is compiled inside the block stays compiled
def offload(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``forward(*args, **kwargs)`` of a block; what it saves for the backward pass goes to host memory.

    Weights stay where they are, and so does what is in host memory already. A saved tensor that is written before the
    backward pass raises there, as without this function.

    Args:
        block: The module whose weights stay.
        forward: The block's forward method.
        args: Positional arguments of ``forward``.
        kwargs: Keyword arguments of ``forward``.

    Example:
        >>> layer, x = nn.Linear(4, 4), torch.randn(8, 4)
        >>> offload(layer, layer.forward, x).sum().backward()
        >>> layer.weight.grad.shape
        torch.Size([4, 4])
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    stays = {weight.untyped_storage().data_ptr() for weight in block.parameters()}

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        if saved.device.type == "cpu" or saved.untyped_storage().data_ptr() in stays:
            return partial(_unchanged, saved, saved._version)
        ordered = saved.is_cuda  # which makes copies in pinned memory, amid its other work, so that the host goes on
        return partial(saved.detach().to("cpu", non_blocking=ordered).to, saved.device, non_blocking=ordered)

    with saved_tensors_hooks(pack, lambda packed: packed()):
        return forward(*args, **kwargs)


def _unchanged(saved: Tensor, version: int) -> Tensor:
    if saved._version != version:  # torch does not look once there are hooks
        raise RuntimeError(
            f"A tensor {tuple(saved.shape)} that the backward pass needs has been written by an in-place operation: it"
            f" is at version {saved._version}, and was saved at version {version}."
        )
    return saved
