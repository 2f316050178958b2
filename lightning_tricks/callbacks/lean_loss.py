"""A network with a large vocabulary trains without its logits."""

from __future__ import annotations

from typing import final

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_tricks.core.checks import check_type
from lightning_tricks.core.lightning.engine import UNSHARDED, Engine, require_engine
from lightning_tricks.core.trick import Trick
from lightning_tricks.losses.lean_loss import Head, head_of

__all__ = ["LeanLoss"]


@final
class LeanLoss(Trick):
    """Computes ``F.cross_entropy(hidden @ weight.T + bias, target)`` in chunks while training, as ``lean_loss`` does.

    For N tokens and a vocabulary of V, the N*V logits and their gradients are never in memory at once; the time is that
    of one more product of the head. The loss stays that of the module's own code, so label shift, ``ignore_index``,
    label smoothing and ``num_items_in_batch`` count as before. Validation, prediction and generation have logits, and
    so has ``logits.detach()``, for a metric.

    Args:
        module: The name of a transformers model in the LightningModule, or of the nn.Linear that is the head.

    Raises:
        TypeError: For a value of the wrong type.
        MisconfigurationException: At fit start, if there is no such head, or if FSDP2 or ZeRO-3 shards its weights; in
            the first forward pass, if logits or targets are changed before the loss (soft caps, scales, Mixup); before
            the first step, if no loss was computed from this head.

    Example:
        >>> trainer = L.Trainer(callbacks=[LeanLoss("model")], accelerator="cpu", logger=False)

    References:
        Wijmans et al., arXiv 2411.09009.
    """

    def __init__(self, module: str = "model") -> None:
        super().__init__()
        check_type("module", module, str)
        self.module = module

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        whole = (*UNSHARDED, Engine.ZERO0, Engine.ZERO1, Engine.ZERO2)
        require_engine(trainer, type(self).__name__, *whole, why="which keep the weights of the head in one piece")
        try:
            head = head_of(pl_module.get_submodule(self.module))
        except (AttributeError, ValueError) as error:
            raise MisconfigurationException(f"{self.written()}: {error}") from None
        self._head = Head(head)
        self._wrap(head, "forward", self._head)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if not self._head.losses:
            raise MisconfigurationException(
                f"{self.written()} saved nothing: no F.cross_entropy has had the logits of this head. Name the model"
                " that the loss comes from, or remove it."
            )
