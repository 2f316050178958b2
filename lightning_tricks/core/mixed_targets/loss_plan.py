"""What becomes of the losses of a batch."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

Weight = float | Tensor  # of samples: one for all, or one each of shape (B,)
Choose = Callable[[Tensor], tuple[Tensor, float] | None]
"""Takes the loss of each sample, (B,), and gives the numbers of those that count and a factor of their mean.

None if all count.
"""


class LossPlan:
    """What becomes of the losses of one batch; shared by its targets and all that is computed from them.

    Args:
        lam: Weight of the first branch, in [0, 1]; one number, or one for each sample of shape (B,).
        choose: Which samples count, by the loss of each; None for all.
        record: Is told the loss of each sample.
    """

    def __init__(
        self, lam: Weight = 1.0, *, choose: Choose | None = None, record: Callable[[Tensor], None] | None = None
    ) -> None:
        self.lam = lam
        self.choose = choose
        self.record = record
        self.mix_predictions: tuple[float, Tensor] | None = None  # weight and partners, to mix what a loss compares
        self.tricks, self.number = "the trick", 0  # what changed the batch, and which it is, for error messages
        self.samples = 0
        self.losses = 0  # how many were computed by it
        self.unclear = ""  # why the last one that was not could not be
        self.open = True  # while its batch is in work; afterwards its targets are plain labels

    @property
    def by_samples(self) -> bool:
        """Whether samples count differently."""
        return isinstance(self.lam, Tensor) or self.choose is not None or self.record is not None

    @property
    def needs_torch_loss(self) -> bool:
        """Whether a loss of torch has to see the target; another formula may be the negative of a loss."""
        return self.choose is not None or self.mix_predictions is not None

    def refusal(self, rule: str) -> MisconfigurationException:
        """The error for a loss that cannot be computed by the plan."""
        return MisconfigurationException(
            f"{self.tricks}, batch {self.number}: {rule} Where a library computes the loss, leave {self.tricks} out."
        )

    def unclear_loss(self, reason: str) -> MisconfigurationException:
        """The error for a loss of which some part cannot be computed by the plan."""
        return self.refusal(f"the loss has a part that cannot be told: {reason}")

    def weights(self, branches: int) -> list[Weight]:
        """The weight of each branch."""
        return [self.lam, 1 - self.lam][:branches]
