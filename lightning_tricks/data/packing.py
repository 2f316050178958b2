"""Several sequences in one row, without padding, for causal language models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

__all__ = ["pack_sequences"]

IGNORED = -100  # the target that torch's cross-entropy leaves out


def pack_sequences(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pack sequences into one row, as a ``collate_fn`` for ``self.model(**batch)``; they do not attend to each other.

    ``position_ids`` begin at 0 for every sequence, which is where transformers cuts its causal mask, and the first
    token of a sequence is no target. transformers does not look at them while it fills a cache of keys, as its models
    do by default, so that sequences would attend to one another and no error be raised: ``use_cache`` is in the batch,
    and False. The loss is the mean over all tokens, as of a padded batch whose padding is no target.

    Args:
        samples: Sequences with ``"input_ids"`` and, if they differ, ``"labels"``, lists or tensors (length,).

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each (1, sum of lengths), and ``use_cache=False``.

    Raises:
        ValueError: For no samples, or labels of another length than the input.

    Example:
        >>> pack_sequences([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])["labels"]
        tensor([[-100,    6,    7, -100,    9]])
    """
    inputs = [as_list(sample["input_ids"]) for sample in samples]
    labels = [as_list(sample.get("labels", sample["input_ids"])) for sample in samples]
    if not samples or [*map(len, inputs)] != [*map(len, labels)]:
        found = f"{[*map(len, inputs)]} and {[*map(len, labels)]}"
        raise ValueError(f"samples must be sequences with labels of the same lengths as input_ids, got {found}.")
    return {
        "input_ids": row(inputs),
        "labels": row([IGNORED, *label[1:]] if label else [] for label in labels),
        "position_ids": row(range(len(sequence)) for sequence in inputs),
        "use_cache": False,
    }


def as_list(values: Any) -> list[int]:
    """The integers of a list or a tensor."""
    return values.tolist() if isinstance(values, Tensor) else list(values)


def row(parts: Any) -> Tensor:
    """All integers of some sequences in a tensor (1, sum of lengths)."""
    return torch.tensor([*chain.from_iterable(parts)], dtype=torch.long).unsqueeze(0)
