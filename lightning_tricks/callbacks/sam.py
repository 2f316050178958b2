"""Sharpness-aware minimization (SAM) for a LightningModule whose class is another library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.modules.sam.engine import SAMEngine
from lightning_tricks.modules.sam.rules import SAM
from lightning_tricks.modules.sam.trainer_hooks import SAMHooks

__all__ = ["SAMCallback"]


@final
class SAMCallback(SAMHooks):
    """Sharpness-aware minimization without a subclass: the gradient is taken at ``w + rho * g/||g||``.

    The same as ``SAMMixin`` with ``sam = SAM(...)``, bit for bit, for a module that a library makes; see there what
    happens to a training step. A ``backward`` of the module's own is called with the loss at the perturbed weights. In
    manual optimization a module has to say itself where SAM works, which takes the mixin.

    Args:
        rho: Radius of the perturbation, at least 0; 0.05 is common for clean data, 0.1 to 0.5 under label noise.
        adaptive: Whether to perturb large weights more (ASAM); good radii are about ten times those of SAM.
        eta: The number that ASAM adds to ``|w|``, at least 0.
        every_n_steps: The number of optimizer steps of which one is perturbed, at least 1; ``rho`` is not scaled.
        micro_batch_size: The number of samples that are perturbed by their own gradient (m-sharpness); None for the
            full batch. It takes a third forward pass, and needs losses that are means over samples.
        parameters: The parameters that are perturbed: regular expressions searched in their names, or names of classes,
            for the parameters of their instances; one or a sequence. "norm" for those of all normalization layers. None
            for all that the optimizer trains.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range, or an invalid regular expression.
        MisconfigurationException: At setup for manual optimization and beside ``SAMMixin``; otherwise as the mixin.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[SAMCallback(rho=0.05)], accelerator="cpu", logger=False)

    References:
        Foret et al., arXiv 2010.01412.
    """

    name = "SAMCallback"
    conflicts = (
        *SAMHooks.conflicts,
        Conflict(("SAMHooks",), "every training step would be perturbed by both"),
    )

    def __init__(
        self,
        rho: float = 0.05,
        *,
        adaptive: bool = False,
        eta: float = 0.01,
        every_n_steps: int = 1,
        micro_batch_size: int | None = None,
        parameters: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.sam = SAM(rho, adaptive, eta, every_n_steps, micro_batch_size, parameters)
        self.rho, self.adaptive, self.eta = rho, adaptive, eta
        self.every_n_steps, self.micro_batch_size, self.parameters = every_n_steps, micro_batch_size, parameters

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if is_fitting(trainer) and not pl_module.automatic_optimization:
            name = type(pl_module).__name__
            raise MisconfigurationException(
                f"SAMCallback works inside automatic optimization, got {name} with automatic_optimization=False: make a"
                f" subclass {name}(SAMMixin, ...) whose training_step calls self.sam_backward(closure)."
            )
        super().setup(trainer, pl_module, stage)

    @override
    def _install(self, engine: SAMEngine, pl_module: Any) -> None:
        self._wrap(pl_module, "backward", partial(_backward, engine))
        self._wrap(pl_module, "log", _log_once)


def _backward(engine: SAMEngine, original: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """The module's own backward pass, with the loss at the perturbed weights."""
    engine.descend(loss, lambda uphill: original(uphill, *args, **kwargs))


def _log_once(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Log what the first run of a step logs, and nothing in the second."""
    if not is_replaying():
        original(*args, **kwargs)
