"""The root of a sharded module: a step runs inside of it, as if the step were the module's forward pass."""

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

_interrupted: WeakSet[nn.Module] = WeakSet()  # of which torch < 2.13 cannot forget the step that failed


class Root:
    """Gathers the weights outside of all blocks for a step, and tells them of the backward pass to come.

    The arguments of the step do not go through the module, so a batch arrives as it is; nor is the module called, whose
    own hooks and ``forward`` are left alone.

    Args:
        module: A LightningModule that went through ``fully_shard``.

    Raises:
        MisconfigurationException: With torch before 2.13, for a module with a step that was interrupted.
    """

    def __init__(self, module: Any) -> None:
        if module in _interrupted:
            raise MisconfigurationException(
                f"A step of {type(module).__name__} was interrupted under FSDP2, which torch {torch.__version__} cannot"
                " undo: make a new module and load a checkpoint, or use torch 2.13 or newer."
            )
        self.module = module
        self._began = self._inside_step = False  # whether ever, and now
        module.run_gathered = _call
        register_fsdp_forward_method(module, "run_gathered")
        self._inside: Callable[[Callable[[], Any]], Any] = module.__dict__.pop("run_gathered")
        # torch warns of writing into views, behind which its hook is lost. The root has another, on the loss.
        name = re.escape(type(module).__name__)
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \({name}\) returned a view")

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step; the weights stay gathered after it only for a backward pass to come."""
        self.share_buffers()
        self._began = self._inside_step = True
        output = self._inside(step)
        if not (torch.is_grad_enabled() and self.module.automatic_optimization):
            self.module.reshard()
            self.end()
        return output

    def end(self) -> None:
        """Tell of the end of a step, its backward pass included."""
        self._inside_step = False

    def share_buffers(self) -> None:
        """Take the buffers of the first rank, as DDP does before each forward pass; all ranks take part."""
        broadcast(float_buffers(self.module).values())

    def expect_backward(self, loss: Tensor) -> None:
        """Tell of the backward pass from a loss inside of a step that has not ended."""
        self._inside(lambda: loss)

    def gather(self) -> None:
        """Let the rest of a step find the weights, as they are now; all ranks take part."""
        self.module.reshard()
        self.module.unshard()

    def recover(self) -> None:
        """Free what an interrupted step has gathered; no other rank is needed."""
        for each in self.module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
        if self._began and hasattr(self.module, "reset_iter_state"):  # torch 2.13
            self.module.reset_iter_state()
        elif self._inside_step:
            _interrupted.add(self.module)


def _call(step: Callable[[], Any]) -> Any:
    return step()
