"""Labels that are probably wrong, found while a network trains on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.core.batches.callback import BatchCallback
from lightning_tricks.core.batches.paths import Names
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.exact.reading import Reading, follow_reading
from lightning_tricks.core.figures import pyplot
from lightning_tricks.core.lightning.trainer import data_parallel, extremes, is_fitting
from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import unused
from lightning_tricks.evaluation.label_report import LabelReport, label_margins

__all__ = ["LabelErrors"]


class _Seen(NamedTuple):
    """What was seen of one batch.

    Args:
        numbers: The numbers of its samples (B,).
        values: Their losses, margins, probabilities of the labels, labels and other classes (B, 5), on the device.
    """

    numbers: list[int]
    values: Tensor


class _Sums:
    """Sums over the epochs for each sample of a data set, in host memory.

    Attributes:
        sums: How often each sample was seen, and the sums of loss, margin, probability and its square (n, 5).
        last: The label and the most likely other class when it was seen last (n, 2); -1 if there are none.
    """

    def __init__(self, samples: int = 0) -> None:
        self.sums = torch.zeros(samples, 5, dtype=torch.float64, device="cpu")
        self.last = torch.full((samples, 2), -1, device="cpu")

    def grow(self, samples: int) -> None:
        """Make room for so many samples."""
        if (more := samples - len(self.sums)) > 0:
            self.sums, self.last = F.pad(self.sums, (0, 0, 0, more)), F.pad(self.last, (0, 0, 0, more), value=-1)

    def add(self, seen: list[_Seen]) -> None:
        """Add batches; samples whose losses are not finite are left out."""
        if not seen:
            return
        numbers = torch.tensor([number for batch in seen for number in batch.numbers], device="cpu")
        values = torch.cat([batch.values for batch in seen]).cpu()
        finite = values[:, 0].isfinite()
        numbers, values = numbers[finite], values[finite].double()
        self.grow(int(numbers.max()) + 1 if len(numbers) else 0)
        loss, margin, confidence = values[:, :3].unbind(1)
        self.sums.index_add_(
            0, numbers, torch.stack([torch.ones_like(loss), loss, margin, confidence, confidence**2], 1)
        )
        self.last[numbers] = values[:, 3:].long()

    def join(self, other: _Sums) -> None:
        """Add the sums of later batches."""
        self.grow(len(other.sums))
        other.grow(len(self.sums))
        self.sums += other.sums
        self.last = other.last.where(other.last >= 0, self.last)

    def report(self) -> LabelReport:
        """The means of the samples that were seen."""
        sample = self.sums[:, 0].nonzero().flatten()
        count, *sums = self.sums[sample].unbind(1)
        loss, margin, confidence, square = (total / count for total in sums)
        return LabelReport(
            sample=sample,
            label=self.last[sample, 0],
            other=self.last[sample, 1],
            epochs=count.long(),
            loss=loss.float(),
            margin=margin.float(),
            confidence=confidence.float(),
            variability=(square - confidence**2).clamp(min=0).sqrt().float(),
        )


@final
class LabelErrors(BatchCallback):
    """Finds samples whose labels are probably wrong: their margins stay small over the epochs.

    ``margin = logit[label] - max(other logits)``; its mean over the epochs is the area under the margin (AUM). A
    network learns what samples have in common before it learns single ones by heart, so that a wrong label has the
    logits of others against it for many epochs. Beside the margins there are the mean losses, and mean and standard
    deviation of the label's probability (data maps). They are those of the losses of ``torch.nn.functional`` in the
    training step, without another forward pass. Margins need ``cross_entropy``, ``nll_loss`` or
    ``binary_cross_entropy_with_logits``; without them samples are compared by their losses. Several margins of a sample
    (pixels, tokens, labels) have their mean.

    A sample is known by the number that the loader's sampler gives; the data set stays as it is. Training is bit for
    bit as without. A device is waited for once an epoch, and all ranks' samples are put together then and in
    checkpoints; a fit that is resumed amid an epoch goes on exactly, as with ``ExactResume``. 56 bytes a sample are in
    host memory.

    Args:
        folder: The folder for ``label_errors.json`` and ``label_errors.png``, written when training ends; files that
            are there stay, and the new ones are called ``label_errors-v1`` and so on. None to write nothing.
        start: When it begins to look (int optimizer steps, float fraction of training).
        stop: When it ends, as ``start``. A network that has learned everything by heart tells little more.
        target: Key, index or path (such as "batch.1") of the labels, or a list of those; None to find them in pairs and
            under usual names.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        NotADirectoryError: If the folder is a file.
        ImportError: At setup, with a folder, if matplotlib is missing.
        MisconfigurationException: When training starts, for a loader whose samples have no numbers, such as that of an
            IterableDataset; at the first batch, for several loaders or numbers that are not those of single samples,
            and if labels are not found or no loss was computed from them.

    Example:
        >>> callback = LabelErrors("runs/labels")
        >>> trainer = L.Trainer(callbacks=[callback], accelerator="cpu", logger=False)
        >>> # after trainer.fit: print(callback.report), callback.report.suspects(), callback.report.plot()

    References:
        Pleiss et al. 2020, Identifying Mislabeled Data using the Area Under the Margin Ranking, arXiv 2001.10528;
        Swayamdipta et al. 2020, Dataset Cartography, arXiv 2009.10795.
    """

    conflicts = (
        Conflict(
            ("MixingCallback", "HardExampleFilter"),
            "labels are judged by the loss of each sample, but samples are mixed or left out",
            "Look for wrong labels in a training without it",
        ),
        Conflict(
            ("SAMHooks",),
            "the samples of a full batch are looked at, but micro_batch_size runs parts of it",
            "Remove micro_batch_size",
            lambda trick, hooks: hooks.sam.micro_batch_size is not None,
        ),
    )

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        start: int | float = 0,
        stop: int | float = 1.0,
        target: Names = None,
    ) -> None:
        self.folder = None if folder is None else str(folder_of("folder", folder))
        self.start, self.stop, self.inputs, self.target = start, stop, None, target
        super().__init__()
        self._reading: Reading | None = None
        self._numbers: list[int] = []  # of the samples in the present batch
        self._losses: list[Tensor] = []  # of the present batch's samples, of each loss of the step
        self._judged: list[Tensor] = []  # margins, probabilities, labels and other classes of these losses (4, B)
        self._seen: list[_Seen] = []  # what was seen since the last transfer
        self._mine, self._all = _Sums(), _Sums()  # of this rank since ranks were put together, and of all ranks before

    @property
    def report(self) -> LabelReport:
        """What was found until now; under several ranks until the end of the last epoch.

        Raises:
            ValueError: If no sample was seen yet.
        """
        if not len(self._all.sums):
            raise ValueError("This LabelErrors has seen no sample yet: fit a module with it first.")
        return self._all.report()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        if self.folder is not None:
            pyplot()
        self._reading = follow_reading(trainer, type(self).__name__)
        self._seen, self._mine, self._all = [], _Sums(), _Sums()

    @override
    def _begin(self) -> None:
        self._losses, self._judged = [], []

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        paths = self.targets_in(context.batch)
        self._numbers = self._numbers_of(self._samples(context.batch, paths=paths))
        samples = len(self._numbers)
        context.plan.record = self._note_losses
        context.plan.observe = lambda name, call, ids: self._note_logits(name, call, ids, samples)
        context.plan_targets(self, paths)

    @override
    def _check(self, trainer: L.Trainer, context: BatchContext) -> None:
        self._change(trainer, context)
        self._numbers = []

    def _numbers_of(self, samples: int) -> list[int]:
        assert self._reading is not None, "set in setup"
        numbers = self._reading.numbers()
        known = isinstance(numbers, list | tuple) and all(isinstance(number, int) for number in numbers)
        if not known or len(numbers) != samples or min(numbers) < 0:
            raise MisconfigurationException(
                f"LabelErrors needs one loader whose sampler gives the number of each sample, got {numbers!r:.60} for a"
                f" batch of {samples}: use a DataLoader of torch without a state of its own, and a collate function"
                " that keeps all samples."
            )
        return list(numbers)

    def _note_losses(self, losses: Tensor) -> None:
        if not is_replaying():
            self._losses.append(losses)

    @torch.no_grad()
    def _note_logits(self, name: str, call: Mapping[str, Any], ids: Tensor, samples: int) -> None:
        """Note the margins of a loss of torch, if it has any."""
        if is_replaying() or "input" not in call or not call["input"].requires_grad:
            return
        judged = _judged(name, call, len(ids))
        if judged is None:
            return
        counts, values, classes = judged
        total = values.new_zeros(3, samples).index_add(1, ids, torch.stack([counts, *values]))
        alone = classes.new_full((2, samples), -1)
        if len(ids) == samples and classes.shape[1] == samples:
            alone[:, ids] = classes
        self._judged.append(torch.cat([total[1:] / total[0], alone.to(values.dtype)]))

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not (self._losses and self._numbers):
            return
        losses = torch.stack(self._losses).detach().float()
        loss = losses.masked_fill(losses == -torch.inf, 0.0).sum(0)
        loss = loss.masked_fill((losses == -torch.inf).all(0), -torch.inf)  # no entry of the sample counts
        unknown = [loss.new_full((2, len(loss)), value) for value in (torch.nan, -1.0)]
        judged = self._judged[0] if self._judged else torch.cat(unknown)
        self._seen.append(_Seen(self._numbers, torch.cat([loss[None], judged.float()]).T))
        self._losses, self._judged, self._numbers = [], [], []

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._join(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._join(trainer)
        if self.folder is None or not trainer.is_global_zero or not len(self._all.sums):
            return
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.report.to_json(unused(folder, "label_errors", ".json"))
        figure, _ = self.report.plot()
        with atomic_write(unused(folder, "label_errors", ".png")) as temporary:
            figure.savefig(temporary, format="png", dpi=150)
        pyplot().close(figure)

    def _join(self, trainer: L.Trainer, *, ranks: bool = True) -> None:
        """Put together what was seen; by all ranks, which take part, or by this one alone."""
        self._mine.add(self._seen)
        self._seen = []
        if ranks and trainer.world_size > 1:
            self._mine.grow(extremes(trainer, len(self._mine.sums))[1])
            sums, last = (part.float().to(trainer.strategy.root_device) for part in vars(self._mine).values())
            dist.all_reduce(sums)
            dist.all_reduce(last, dist.ReduceOp.MAX)
            copies = trainer.world_size // data_parallel(trainer)[1]  # processes that share a batch
            self._mine.sums, self._mine.last = sums.cpu().double() / copies, last.cpu().long()
        self._all.join(self._mine)
        self._mine = _Sums()

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the sums of all ranks, which take part, unless an error has come between them."""
        if "callbacks" in checkpoint and self._reading is not None:
            self._join(trainer, ranks=sys.exc_info()[0] is None)
            checkpoint["callbacks"][self.state_key] = {**self.state_dict(), **vars(self._all)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "sums" in state_dict:
            self._all.sums, self._all.last = state_dict["sums"].clone(), state_dict["last"].clone()

    @property
    @override
    def state_key(self) -> str:
        return type(self).__name__


def _judged(name: str, call: Mapping[str, Any], entries: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """What a loss of torch says of its labels, by entries of the first dimension; None if it has no logits.

    Returns:
        The numbers of labels that count (entries,), the sums of their margins and probabilities (2, entries), and,
        where an entry has one label, that label and the most likely other class (2, entries); else (2, 0).
    """
    logits, target = call["input"], call["target"]
    if name == "binary_cross_entropy_with_logits":
        margin = (logits * (2 * target - 1)).float().reshape(entries, -1)
        values = torch.stack([margin.sum(1), margin.sigmoid().sum(1)])
        return torch.full_like(values[0], margin.shape[1]), values, target.new_empty(2, 0).long()
    if name not in ("cross_entropy", "nll_loss") or target.is_floating_point() or logits.shape[1] < 2:
        return None
    labels = target.reshape(-1)
    counts = labels != call["ignore_index"]
    margin, confidence, other = label_margins(
        logits.movedim(1, -1).reshape(-1, logits.shape[1]), labels.where(counts, 0)
    )
    both = torch.stack([margin, confidence]).masked_fill(~counts, 0.0).reshape(2, entries, -1).sum(2)
    classes = torch.stack([labels, other]) if len(labels) == entries else labels.new_empty(2, 0)
    return counts.reshape(entries, -1).sum(1).to(both.dtype), both, classes
