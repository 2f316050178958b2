"""A fit that is resumed amid an epoch goes on bit for bit."""

from __future__ import annotations

from typing import final

import lightning as L
from typing_extensions import override

from lightning_tricks.core.exact.reading import follow_reading
from lightning_tricks.core.trick import Trick

__all__ = ["ExactResume"]


@final
class ExactResume(Trick):
    """A fit that is resumed amid an epoch goes on bit for bit, with samples and random numbers of an unbroken one.

    Lightning alone keeps the number of the batch, and begins the loader's order again: some samples come twice and
    others never. Here every checkpoint holds, for all ranks, how the pass over each loader began, how many batches it
    has had, and the states of the random generators of torch, the device, NumPy, Python, and of loader workers. A
    resumed fit asks the samplers for the numbers of the samples once more and goes on after those that were seen; it
    loads none of them again, but up to ``num_workers - 1`` batches. An unbroken fit is the same with and without it.

    Samplers may be torch's, those of this package, or a user's, whose generators, plain attributes or ``state_dict``
    are restored; one that draws from the global generators between batches does so from a stream of its own. A loader
    with ``state_dict`` and ``load_state_dict``, such as torchdata's, goes on by these, on every rank.

    With another number of processes or another batch size the samples of the epoch that are left are dealt out anew, so
    that each comes once, if their order is known: all in order, shuffled without replacement, by a DistributedSampler,
    in ``LengthBuckets`` or ``TokenBuckets``, or by a DistributedWeightedSampler. ``Preemption`` does all of this, too.

    Raises:
        MisconfigurationException: When training starts: for a loader whose position cannot be known, such as that of an
            IterableDataset without a ``state_dict``, with ``in_order=False``, or a ``training_step`` that takes a
            ``dataloader_iter``. In a fit that is resumed amid an epoch: if the checkpoint was saved without it, or the
            samples that are left are not known, since the sampler gives others or its settings have changed.

    Example:
        >>> trainer = L.Trainer(callbacks=[ExactResume()], accelerator="cpu", logger=False)
        >>> # trainer.fit(module, data, ckpt_path="last.ckpt")
    """

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            follow_reading(trainer, "ExactResume")
