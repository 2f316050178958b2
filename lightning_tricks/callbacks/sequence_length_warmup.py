"""Sequence-length warm-up: shorter sequences first."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, final

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.batches.form import in_form_of
from lightning_tricks.core.batches.growing import GrowingInputs
from lightning_tricks.core.batches.paths import Names, Path, described, get, is_attention_mask, put, spelled, walk
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_count

__all__ = ["SequenceLengthWarmup"]

_IGNORED = -100  # the label that torch's losses leave out
_PLACES = re.compile(r"(^|_)(starts?|ends?|(seq)?len(gth)?s?|spans?|offsets?|positions?)(_|$)")


@final
class SequenceLengthWarmup(GrowingInputs):
    """Trains on the beginnings of sequences first: they grow to their full length by ``stop``, which saves time.

    ``length = (initial + (1 - initial) * step / stop) * full length``, rounded to ``multiple_of``, the full one from
    ``stop`` on; the full length is that of each batch. It is the same within an accumulation window, and resumed
    exactly; ranks have equal lengths where their batches have. Validation has full sequences.

    All tensors (B, ..., T, ...) that have T entries along ``dim`` as the inputs do are cut, by their first entries:
    tokens, attention masks, positions, labels of tokens. Labels of samples stay, so that a classifier learns them from
    the beginning of a text, without its last tokens. A part that may belong to places in the sequence in another way is
    refused by its path: other lengths, matrices over pairs of positions, starts, ends and lengths, and floating-point
    tensors (B, T), which may be soft labels unless they are called ``attention_mask``. Name it in ``inputs`` to have it
    cut, or in ``target`` to leave it as it is, if it has another length. Refused as well are sequences that are padded
    on the left, and batches of which only ignored labels (-100) would be left: those of prompts whose answers are at
    the end.

    Beside ``Compile`` there are at most 8 lengths for a full one: growth is in seven equal stages. Batches with no more
    than ``multiple_of`` tokens stay as they are.

    Args:
        initial: Share of the length at first, in (0, 1]; 1.0 changes nothing.
        stop: When sequences have their full length (int optimizer steps, float fraction of training).
        multiple_of: The number of which smaller lengths are multiples, at least 1.
        dim: The dimension of the sequence in the inputs, at least 1; the samples are in dimension 0.
        inputs: Key, index or path (such as "batch.0") of the sequences, or a list of those; None to find tokens
            (B, T) or features (B, T, F) in pairs and under usual names.
        target: Key, index or path of the targets, in the same form.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At the first batch, if there are no sequences, or for a part that cannot be cut with
            them; at a batch that is padded on the left, or would lose all its labels; when training starts, for a
            fraction of a training whose length is unknown.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[SequenceLengthWarmup(0.25, stop=0.3)], accelerator="cpu", logger=False)

    References:
        Li et al., The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models,
        arXiv 2108.06084; Press et al., Shortformer, arXiv 2012.15832.
    """

    start = 0
    durations = ("stop",)

    def __init__(
        self,
        initial: float = 0.25,
        *,
        stop: int | float = 0.3,
        multiple_of: int = 8,
        dim: int = 1,
        inputs: Names = None,
        target: Names = None,
    ) -> None:
        check_count("dim", dim)
        self.initial, self.multiple_of, self.dim = initial, multiple_of, dim
        self.stop, self.inputs, self.target = stop, inputs, target
        super().__init__()

    @override
    def _shrunk(self, context: BatchContext, size: Callable[[int], int]) -> Any:
        batch, inputs = context.batch, self.inputs_in(context.batch)
        for path in inputs:
            self._require_sequences(batch, path)
        sizes = {full: size(full) for full in (get(batch, path).shape[self.dim] for path in inputs)}
        targets, samples = self.targets_if_any(batch), len(get(batch, inputs[0]))
        named = {*inputs, *(targets if self.target is not None else [])}
        for path, part in walk(batch):
            if path not in named:
                self._require_clear(batch, path, samples, set(sizes))
            if isinstance(part, Tensor) and self._is_alike(part, samples, {n for n in sizes if sizes[n] < n}):
                cut = part.narrow(self.dim, 0, sizes[part.shape[self.dim]])
                self._require_kept(path, part, cut, path in targets)
                cut = in_form_of(cut, part, spelled(path), "SequenceLengthWarmup")
                context.batch = put(context.batch, path, cut)
        return context.batch

    def _is_alike(self, part: Tensor, samples: int, lengths: set[int]) -> bool:
        """Whether a tensor has the length of an input in the dimension of the sequence."""
        return part.ndim > self.dim and part.shape[self.dim] in lengths and part.shape[0] in (1, samples)

    def _require_sequences(self, batch: Any, path: Path) -> None:
        """Raise unless an input looks like a sequence, or is named as one."""
        x = get(batch, path)
        # More dimensions are those of images, and of tokens those of several texts for a sample.
        usual = (self.dim + 1, self.dim + 2) if x.is_floating_point() else (self.dim + 1,)
        if x.is_nested or x.ndim <= self.dim or (self.inputs is None and x.ndim not in usual):
            raise MisconfigurationException(
                f"SequenceLengthWarmup(dim={self.dim}) needs tokens (B, T) or features (B, T, F), got"
                f" {described(x, spelled(path))}: name sequences in inputs=, and their dimension in dim=."
            )

    def _require_clear(self, batch: Any, path: Path, samples: int, lengths: set[int]) -> None:
        """Raise for a part of which it is not clear whether and how it belongs to places in the sequences."""
        part, problem = get(batch, path), ""
        if isinstance(part, Tensor) and part.is_nested:
            problem = "is a nested tensor: pad it"
        elif isinstance(part, Tensor) and self._is_alike(part, samples, lengths):
            if not lengths.isdisjoint(part.shape[self.dim + 1 :]):
                problem = "has their length in two dimensions: compute it in training_step"
            # By its shape alone, a part (B, T) may as well be labels of T classes, which are not to be cut.
            elif part.is_floating_point() and part.ndim == 2 and not is_attention_mask(path):
                problem = "may be numbers of tokens or of classes: name it in inputs= if it is to be cut"
        elif any(isinstance(name, str) and _PLACES.search(name) for name in path):
            problem = "may be places in them: compute it in training_step, or name it in target= to leave it as it is"
        elif isinstance(part, Tensor):
            sizes = part.shape if part.shape[:1] not in ((1,), (samples,)) else part.shape[1:]
            if not lengths.isdisjoint(sizes):
                problem = "has their length in another dimension: compute it in training_step"
            elif part.ndim == self.dim + 1 and not part.is_floating_point() and part.shape[self.dim] > 1:
                problem = "has another length: name it in inputs= to have it cut, too, or in target= to leave it"
        if problem:
            raise MisconfigurationException(
                f"SequenceLengthWarmup cuts sequences of {' and '.join(map(str, sorted(lengths)))} entries, and"
                f" {spelled(path)} {problem}. The batch has {described(batch)}."
            )

    def _require_kept(self, path: Path, part: Tensor, cut: Tensor, is_target: bool) -> None:
        """Raise if what is left of a part would train on nothing."""
        if (
            path
            and path[-1] == "attention_mask"
            and ((part.select(self.dim, 0) == 0) & (part != 0).any(self.dim)).any()
        ):
            raise MisconfigurationException(
                f"SequenceLengthWarmup keeps the beginning of sequences, but {spelled(path)} is 0 there: pad on the"
                ' right (tokenizer.padding_side="right").'
            )
        if is_target and not part.is_floating_point() and (cut == _IGNORED).all() and (part != _IGNORED).any():
            raise MisconfigurationException(
                f"SequenceLengthWarmup would leave no label in {spelled(path)}: the first {cut.shape[self.dim]} of"
                f" {part.shape[self.dim]} are all {_IGNORED}. Give a larger initial=, or leave the warm-up out."
            )
