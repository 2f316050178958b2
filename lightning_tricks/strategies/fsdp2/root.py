"""The root of a sharded module, which runs a step as its forward pass; apart from the strategy, which is no module."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_tricks.core.weights.tensors import float_buffers
from lightning_tricks.strategies.fsdp2.prepare import broadcast

_interrupted: WeakSet[nn.Module] = WeakSet()  # Modules with a failed step that torch < 2.13 cannot undo.


class Root:
    """Unshards the root's own weights, those outside of all blocks, for a step and its backward pass.

    The step's arguments do not pass through FSDP2's hooks, so the batch stays as it is. The module itself is not
    called: its own hooks and its ``forward`` are left alone.

    Args:
        module: A LightningModule that went through ``fully_shard``.

    Raises:
        MisconfigurationException: With torch before 2.13, for a module with an interrupted step.
    """

    def __init__(self, module: Any) -> None:
        if module in _interrupted:
            raise MisconfigurationException(
                f"A step of {type(module).__name__} was interrupted under FSDP2, which torch {torch.__version__} cannot"
                " undo. Create a new module and load a checkpoint, or use torch 2.13 or newer."
            )
        self.module = module
        self._has_run = False  # Whether any step has begun.
        self._in_step = False  # Whether a step has begun and not ended.
        module.run_gathered = _call
        register_fsdp_forward_method(module, "run_gathered")
        # An attribute of the module would outlive the fit, and go with copies and pickles of the module.
        self._run_unsharded: Callable[[Callable[[], Any]], Any] = module.__dict__.pop("run_gathered")
        # torch warns that its backward hook is lost when a view is written into. The root's hook on the loss remains.
        name = re.escape(type(module).__name__)
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view")

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step; the weights stay unsharded afterwards only if a backward pass follows."""
        self.broadcast_buffers()
        self._has_run = self._in_step = True
        output = self._run_unsharded(step)
        # In manual optimization the backward pass is a part of the step, and nothing is left that needs full weights.
        if not (torch.is_grad_enabled() and self.module.automatic_optimization):
            self.module.reshard()
            self.end_step()
        return output

    def end_step(self) -> None:
        """Note that a step has ended, including its backward pass."""
        self._in_step = False

    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks, as DDP does before each forward pass; all ranks take part."""
        broadcast(float_buffers(self.module).values())

    def expect_backward(self, loss: Tensor) -> None:
        """Prepare for a backward pass from a loss within a step that has not ended."""
        self._run_unsharded(lambda: loss)

    def unshard(self) -> None:
        """Gather the current weights for the rest of a step; all ranks take part."""
        self.module.reshard()
        self.module.unshard()

    def recover(self) -> None:
        """Free what an interrupted step has gathered, without communication."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._has_run and hasattr(self.module, "reset_iter_state"):  # New in torch 2.13.
            self.module.reset_iter_state()
        elif self._in_step:
            _interrupted.add(self.module)


def _call(step: Callable[[], Any]) -> Any:
    return step()
