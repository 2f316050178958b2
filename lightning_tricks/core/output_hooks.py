"""Hooks after layers, which stay when a BatchNorm layer becomes a SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_tricks.core.selection import is_called


def hook_output(model: nn.Module, name: str, hook: Callable[..., Any]) -> None:
    """Register a forward hook after a submodule, and after the SyncBatchNorm that may take its place.

    ``Trainer(sync_batchnorm=True)`` makes new layers, without the hooks of the BatchNorm layers. Whatever holds the
    layer looks after that before it runs.

    Args:
        model: The network.
        name: Name of the submodule.
        hook: The forward hook; it must be possible to pickle it.
    """
    path, _, own = name.rpartition(".")
    layer, parent = model.get_submodule(name), model.get_submodule(path)
    layer.register_forward_hook(hook)
    if isinstance(layer, _BatchNorm):
        kept = KeptHook(parent, own, hook)
        parts = path.split(".") if path else []
        for holder in (model.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)):
            if is_called(holder):  # no ModuleList; a Sequential may be iterated, so its holders look as well
                holder.register_forward_pre_hook(kept)


class KeptHook:
    """A forward pre-hook of what holds a BatchNorm layer: gives a forward hook to the layer's SyncBatchNorm."""

    def __init__(self, parent: nn.Module, name: str, hook: Callable[..., Any]) -> None:
        self.parent, self.name, self.hook = parent, name, hook
        self.layer = getattr(parent, name)  # the layer that has the hook

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Look for a new layer."""
        layer = getattr(self.parent, self.name)
        if isinstance(layer, nn.SyncBatchNorm) and layer is not self.layer:
            layer.register_forward_hook(self.hook)
            self.layer = layer
