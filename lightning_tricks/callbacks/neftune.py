"""NEFTune: noise on the embeddings of tokens while a language model is fine-tuned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.batches.callback import EveryBatchCallback
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.checks import check_range, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.random_numbers import random_numbers_from
from lightning_tricks.core.selection import check_patterns, outermost, select_modules

__all__ = ["NEFTune"]


def noisy_embeddings(x: Tensor, alpha: float) -> Tensor:
    """Embeddings with noise: ``x + alpha / sqrt(L * d) * u``, ``u`` uniform in [-1, 1].

    Args:
        x: The embeddings of sequences (B, L, d), floating-point; L is the padded length.
        alpha: The scale of the noise, at least 0.

    Example:
        >>> noisy_embeddings(torch.zeros(1, 4, 4), 1.0).abs().max() <= 1 / 4
        tensor(True)
    """
    u = torch.empty_like(x, requires_grad=False).uniform_(-1, 1)
    return x + alpha / math.sqrt(math.prod(x.shape[1:])) * u


@final
class NEFTune(EveryBatchCallback):
    """Trains on noisy embeddings of tokens: ``x' = x + alpha / sqrt(L * d) * u``, ``u`` uniform in [-1, 1].

    L is the padded length of the sequences in the batch, and d the width of the embeddings. There is no noise in
    validation, nor in an embedding that is in eval mode. The random numbers are those of a batch, not of a call: a step
    that is run again, as by SAM or a checkpointed block, has the noise of its first run, and an embedding that a step
    calls twice has the same noise twice. torch's random numbers, such as those of dropout, are not touched.

    Args:
        alpha: The scale of the noise, at least 0; 0 changes nothing. 5, 10 and 15 are usual.
        modules: Regular expressions searched in the names of the embeddings, or names of classes; one or a sequence.
            Of nested modules only the outermost are taken. None for the input embeddings of models of transformers, or
            for the only ``torch.nn.Embedding`` of any other module.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start, if it is not clear which embeddings are meant; in the first step, if it
            calls none of them, or for one whose output is not of shape (B, L, d).

    Example:
        >>> trainer = L.Trainer(callbacks=[NEFTune()], accelerator="cpu", logger=False)

    References:
        Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, arXiv 2310.05914.
    """

    order = -1  # before samples are compared by their losses
    conflicts = (
        Conflict(("NEFTune",), "both add noise to embeddings, whose scales do not add up"),
        Conflict(
            ("tensor_parallel",),
            "an embedding may be in shards, whose noise is not that of the whole",
            "Shard by data_parallel alone",
        ),
    )

    def __init__(self, alpha: float = 5.0, modules: str | Sequence[str] | None = None) -> None:
        check_range("alpha", alpha, 0.0)
        check_patterns("modules", modules, optional=True)
        self.alpha, self.modules = alpha, modules
        super().__init__()
        self.drawn: int | None = None  # the seed of the present batch's noise
        self._called = False  # whether a step has called an embedding

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._called = False
        torch.compiler.reset()  # code that was compiled without the hooks would not call them
        for name, embedding in self._embeddings(pl_module).items():  # which exist only after configure_model
            self._undo.callback(embedding.register_forward_hook(partial(self._behind, name)).remove)

    def _embeddings(self, module: L.LightningModule) -> dict[str, nn.Module]:
        """The embeddings by name; of nested ones the outermost.

        Raises:
            MisconfigurationException: If there is none, or it is not clear which are meant.
        """
        kind = type(module).__name__
        if self.modules is not None:
            try:
                selected = select_modules(module, self.modules)
            except ValueError as error:
                raise MisconfigurationException(f"NEFTune selects nothing in {kind}: {error}") from None
            return {name: part for name, part in selected.items() if part in outermost(selected.values())}
        tables: dict[str, nn.Module] = {n: part for n, part in module.named_modules() if isinstance(part, nn.Embedding)}
        inputs = input_embeddings(module)
        found = {name: table for name, table in tables.items() if table in inputs} or tables
        if inputs or len(found) == 1:
            return found
        rule = f"has several embeddings, {some(found)}" if found else "has no torch.nn.Embedding"
        raise MisconfigurationException(
            f"NEFTune({self.alpha}) does not know where the embeddings of tokens are: {kind} {rule}. Name them in"
            " modules=."
        )

    @override
    def _begin(self) -> None:
        self.drawn = None

    @override
    def _change(self, trainer: L.Trainer, context: BatchContext) -> None:
        self.drawn = context.numbers.getrandbits(32)

    @torch.compiler.disable
    def _behind(self, name: str, embedding: nn.Module, inputs: Any, output: Any) -> Any:
        """Add noise to what an embedding returns."""
        if self.drawn is None:
            return None
        self._called = True
        if not embedding.training:
            return None
        if not isinstance(output, Tensor) or output.ndim < 3 or not output.is_floating_point():
            got = f"{output.dtype} {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise MisconfigurationException(
                f"NEFTune needs embeddings of tokens (B, L, d), got {got} from {name}: name other ones in modules=."
            )
        with random_numbers_from(self.drawn, output.device):
            return noisy_embeddings(output, self.alpha)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        if not self._called:
            raise MisconfigurationException(
                f"NEFTune did nothing: {type(pl_module).__name__}.training_step did not call"
                f" {some(self._embeddings(pl_module))}. Name embeddings that it calls in modules=, and call them as"
                " modules, not by torch.nn.functional.embedding."
            )

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.drawn = None


def input_embeddings(module: nn.Module) -> list[nn.Module]:
    """The embeddings that models of transformers inside a module take for their inputs; none of other models."""
    found, models = [], [model for model in module.modules() if hasattr(model, "get_input_embeddings")]
    for model in models:
        with suppress(NotImplementedError):  # a model made of others, which say it themselves
            found.append(cast(Any, model).get_input_embeddings())
    return [table for table in found if isinstance(table, nn.Embedding)]
