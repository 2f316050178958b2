"""Mixtures of experts balanced without a loss: the biases of their routers follow the loads of the experts."""

from __future__ import annotations

from typing import Any, final

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.checks import check_range, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.step_watch import StepObserver
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.ranks import sample_group
from lightning_tricks.core.trick import Trick

__all__ = ["MoEBalance", "balance_experts_"]


@torch.no_grad()
def balance_experts_(bias: Tensor, load: Tensor, rate: float) -> None:
    """Move the bias of each expert towards equal loads, in place: ``bias += rate * sign(mean(load) - load)``.

    Args:
        bias: What is added to the scores by which experts are chosen (E,).
        load: The number of tokens that each expert got (E,).
        rate: The step, at least 0.

    Raises:
        TypeError: For a rate that is no number.
        ValueError: For one out of range.

    Example:
        >>> bias = torch.zeros(3)
        >>> balance_experts_(bias, torch.tensor([5, 1, 3]), 0.5)
        >>> bias
        tensor([-0.5000,  0.5000,  0.0000])
    """
    check_range("rate", rate, 0.0)
    bias += rate * torch.sign(load.sum() - len(load) * load)  # E times the difference, which rounds no integer


@final
class MoEBalance(Trick):
    """Balances the experts of a mixture by the biases of its router, without a balancing loss.

    After every optimizer step ``bias += rate * sign(mean(load) - load)``, where the load of an expert is the number of
    tokens that it got since the step before, over all ranks and accumulated batches. A router is any module with two
    buffers of one entry per expert: ``expert_bias`` in fp32, which it adds to the scores by which it chooses experts
    (and not to the weights of their outputs), and ``tokens_per_expert``, to which it adds the tokens of each expert
    while it trains::

        def forward(self, x):  # (tokens, d)
            scores = self.gate(x).sigmoid()
            chosen = (scores + self.expert_bias).topk(self.k).indices
            if self.training:
                with torch.no_grad():
                    self.tokens_per_expert += chosen.flatten().bincount(minlength=len(self.expert_bias))

    These are torchtitan's names. The callback sets the counts to zero after each step and when a fit ends or fails. The
    biases must be part of the module's ``state_dict``, by which a fit resumes exactly.

    Args:
        rate: The step of the biases, at least 0; scores by a sigmoid are between 0 and 1.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, if no module is such a router, or if its buffers differ in shape, have
            16 bits, in which small steps are rounded away, or checkpoints lack the biases.

    Example:
        >>> trainer = L.Trainer(callbacks=[MoEBalance()], accelerator="cpu", logger=False)

    References:
        Wang et al., arXiv 2408.15664.
    """

    conflicts = (Conflict(("MoEBalance",), "both would move the biases of the routers"),)

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__()
        check_range("rate", rate, 0.0)
        self.rate = rate
        self._observer = StepObserver()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._undo.callback(self._observer.stop)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        found = routers(pl_module)
        if lost := [
            f"{name}.expert_bias" for name, router in found.items() if "expert_bias" not in router.state_dict()
        ]:
            raise MisconfigurationException(
                f"MoEBalance moves {some(lost)}, which no checkpoint would have: register the buffer with"
                " persistent=True."
            )
        if not found:
            raise MisconfigurationException(
                f"MoEBalance({self.rate}) found no router in {type(pl_module).__name__}: a module with the buffers"
                " expert_bias and tokens_per_expert, both of one entry per expert. Register them in your router, or"
                " leave MoEBalance out."
            )

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._observer.start(trainer)
        # An exception may leave the counts of an unfinished batch.
        self._undo.callback(_forget_counts, pl_module)

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._observer.follow(trainer)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not self._observer.stepped():
            return
        for router in routers(pl_module).values():
            bias, load = router.expert_bias, router.tokens_per_expert
            if trainer.world_size > 1:
                dist.all_reduce(load, group=sample_group())  # strategy.reduce would wait for the devices of all ranks
            balance_experts_(bias, load, self.rate)
            load.zero_()


def _forget_counts(module: nn.Module) -> None:
    for router in routers(module).values():
        router.tokens_per_expert.zero_()


def routers(module: nn.Module) -> dict[str, Any]:
    """The routers of a module by name, those with ``expert_bias`` and ``tokens_per_expert``.

    Raises:
        MisconfigurationException: If their buffers cannot be balanced.
    """
    found: dict[str, Any] = {}
    for name, layer in module.named_modules():
        buffers = dict(layer.named_buffers(recurse=False))
        if not {"expert_bias", "tokens_per_expert"} <= buffers.keys():
            continue
        bias, load, found[name] = buffers["expert_bias"], buffers["tokens_per_expert"], layer
        narrow = [b for b in (bias, load) if b.dtype in (torch.bfloat16, torch.float16)]
        if bias.ndim != 1 or bias.shape != load.shape or not bias.is_floating_point() or narrow:
            raise MisconfigurationException(
                f"MoEBalance needs {name}.expert_bias and {name}.tokens_per_expert of one entry per expert, the first"
                f" in fp32 and neither in 16 bits, got {bias.dtype} {tuple(bias.shape)} and {load.dtype}"
                f" {tuple(load.shape)}: register them so, and keep them in fp32 where weights are in 16 bits."
            )
    return found
