"""How the losses of a batch are changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_tricks.core.mixed_targets.divisors import Divisors, Loss

Weight = float | Tensor  # one weight for all samples, or weights of shape (B,)
Choose = Callable[[Tensor], tuple[Tensor, float] | None]
"""A function of the samples' losses (B,): the indices of the samples that count and a factor of their mean, or None
if all samples count.
"""
ChangeArguments = Callable[[Loss, dict[str, Any]], dict[str, Any]]

Observe = Callable[[str, Mapping[str, Any], Tensor], None]


class LossPlan:
    """How the losses of one batch are changed; its targets and all that is computed from them share one plan.

    Args:
        lam: Weight of the first branch, in [0, 1]; one number, or one per sample of shape (B,).
        choose: Function that chooses the samples that count by their losses (B,); None if all count.
        record: Function that is called with the losses of the samples (B,).
        observe: Function that is called with the name and the arguments of each loss of torch, and the samples of the
            entries along the first dimension of its target.
    """

    def __init__(
        self,
        lam: Weight = 1.0,
        *,
        choose: Choose | None = None,
        record: Callable[[Tensor], None] | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.lam = lam
        self.choose = choose
        self.record = record
        self.observe = observe
        self.mix_predictions: tuple[float, Tensor] | None = None  # weight and partners, to mix the input of a loss
        # A function of a loss of torch and its arguments by name, which gives the arguments to call it with.
        self.change_arguments: ChangeArguments | None = None
        self.divisors: Divisors | None = None  # those of the step's means; None if nobody asks
        self.only_looks = False  # whether no trick of the batch changes its losses
        self.remedy = ""  # what to do about a loss that cannot follow the plan; empty for leaving the tricks out
        self.tricks, self.number = "the trick", 0  # names of the tricks and number of the batch, for error messages
        self.samples = 0
        self._ids: dict[int, Tensor] = {}  # the samples' numbers, each repeated so many times
        self.losses = 0  # number of losses that followed the plan
        self.unclear = ""  # why the last loss that did not follow the plan could not
        self.open = True  # False once the batch is done, when its targets are plain labels again

    @property
    def by_samples(self) -> bool:
        """Whether samples count differently."""
        return isinstance(self.lam, Tensor) or self.choose is not None or self.record is not None

    @property
    def needs_torch_loss(self) -> bool:
        """Whether only a loss of torch may see the target; a formula by hand could be the negative of a loss."""
        changes = (self.choose, self.observe, self.mix_predictions, self.change_arguments, self.divisors)
        return any(change is not None for change in changes)

    def number_samples(self, samples: int, device: torch.device) -> Tensor | None:
        """Note how many samples the batch has, and return their numbers (B,); None if all samples count equally."""
        self.samples = samples
        if self.by_samples and 1 not in self._ids:  # all targets share them, so that they are known again
            self._ids[1] = torch.arange(samples, device=device)
        return self._ids.get(1)

    def repeated_ids(self, times: int) -> Tensor:
        """The samples' numbers, each ``times`` times one after the other (B * times,)."""
        if times not in self._ids:
            self._ids[times] = self._ids[1][:, None].expand(-1, times).reshape(-1)
        return self._ids[times]

    def times_repeated(self, sample_ids: Tensor) -> int | None:
        """How many times each sample's number is repeated, without a look at them; None for any other numbers."""
        return next((times for times, ids in self._ids.items() if ids is sample_ids), None)

    def refusal(self, rule: str) -> MisconfigurationException:
        """The error for a loss that cannot follow the plan."""
        remedy = self.remedy or f"Where a library computes the loss, leave {self.tricks} out."
        return MisconfigurationException(f"{self.tricks}, batch {self.number}: {rule} {remedy}")

    def unclear_loss(self, reason: str) -> MisconfigurationException:
        """The error for a loss with a part that cannot follow the plan."""
        return self.refusal(f"a part of the loss is ambiguous: {reason}")

    def weights(self, branches: int) -> list[Weight]:
        """The weights of the branches."""
        return [self.lam, 1 - self.lam][:branches]


def counted_targets(plan: LossPlan, trick: str, module: type) -> float | Tensor:
    """The number of targets by which the means of a step's losses are divided.

    Args:
        plan: The plan of the step's batch, whose divisors were noted, with a remedy.
        trick: The trick that counts, for the error message.
        module: The class of the module, for the error message.

    Raises:
        MisconfigurationException: If there is none, or if losses are divided by different numbers.
    """
    found = list(plan.divisors.found.values()) if plan.divisors else []
    if not found:
        why = plan.unclear or f"no loss of {module.__name__}.training_step was computed from the targets."
        raise MisconfigurationException(f"{trick} cannot count the targets: {why} {plan.remedy}")
    if len(found) > 1 and any(float(each) != float(found[0]) for each in found):  # for which a GPU waits
        raise MisconfigurationException(
            f"{trick} cannot weigh a sum of losses that are means over different numbers of targets,"
            f" {', '.join(f'{float(each):g}' for each in found)}. {plan.remedy}"
        )
    return found[0]
