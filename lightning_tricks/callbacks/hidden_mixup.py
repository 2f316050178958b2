"""Mixup of hidden representations, for inputs that cannot be mixed."""

from __future__ import annotations

import difflib
from typing import Any, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.batches.mixing import Drawn, MixingCallback, permutation
from lightning_tricks.core.batches.paths import Names, get
from lightning_tricks.core.batches.pipeline import BatchContext
from lightning_tricks.core.conflicts import Conflict

__all__ = ["HiddenMixup"]


@final
class HiddenMixup(MixingCallback):
    """Trains on mixed hidden representations: ``h' = lam * h + (1 - lam) * h[index]`` for the input of a layer.

    ``loss = lam * L(f(h'), y) + (1 - lam) * L(f(h'), y[index])``. It is meant for text, whose token ids cannot be
    mixed: with the classification head as the layer, the representations of two sentences are mixed after the encoder
    (Mixup-Transformer). The partner comes from the same batch, so a sentence is encoded only once. Labels stay integers
    for the module, and a Hugging Face model may compute its loss inside ``forward``. The heads are "classifier" in
    BERT, RoBERTa, DeBERTa and ELECTRA, "pre_classifier" in DistilBERT and "head" in ModernBERT, after the name of the
    model's attribute.

    Decoder classifiers ("score" in GPT-2 or Llama) select the last token of a sentence only after the head. So for a
    linear layer over all tokens with one label per sentence, the logits are mixed where a loss of
    ``torch.nn.functional`` gets them. For a linear layer this is the same.

    A second label, the lengths of a loss or a weight of samples is refused, as by ``Mixup``, unless ``target`` names
    it, too: ``target=["labels", "weight"]``. So name a mask of tokens in integers by which losses are weighted; it
    cannot be told from an attention mask.

    Args:
        layer: Name of the layer whose input is mixed, as in ``named_modules()``: "model.classifier".
        alpha: Parameter of the Beta distribution, at least 0; 0 mixes nothing.
        prob: Share of the batches to mix, in [0, 1].
        start: When mixing begins (int optimizer steps, float fraction of training).
        stop: When mixing ends, in the form of ``start``.
        target: Key, index or path of the labels, or a list of those; None to find them in pairs and under usual names.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        MisconfigurationException: At fit start for an unknown layer, a ``training_step(dataloader_iter)`` or SAM with
            ``micro_batch_size``; after a batch in which the layer was not called, or no loss was computed from the
            labels.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[HiddenMixup("model.classifier")], accelerator="cpu", logger=False)

    References:
        Sun et al., arXiv 2010.02394; Verma et al., arXiv 1806.05236.
    """

    mixes_inputs = False
    conflicts = (
        Conflict(
            ("SAMHooks",),
            "the samples of a full batch are mixed, but micro_batch_size runs parts of it",
            "Remove micro_batch_size",
            lambda trick, hooks: hooks.sam.micro_batch_size is not None,
        ),
    )

    def __init__(
        self,
        layer: str,
        alpha: float = 0.2,
        *,
        prob: float = 1.0,
        start: int | float = 0,
        stop: int | float = 1.0,
        target: Names = None,
    ) -> None:
        if not isinstance(layer, str):
            raise TypeError(f"layer must be the name of a submodule such as 'model.classifier', got {layer!r}.")
        self.layer, self.alpha, self.prob = layer, alpha, prob
        self.start, self.stop, self.inputs, self.target = start, stop, None, target
        super().__init__()
        self._context: BatchContext | None = None
        self._called = False

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        # The layer may exist only now, after configure_model.
        layers = dict(pl_module.named_modules())
        if self.layer not in layers:
            near = difflib.get_close_matches(self.layer, layers, n=3, cutoff=0.3) or list(layers)[-3:]
            raise MisconfigurationException(
                f"{type(pl_module).__name__} has no layer {self.layer!r}; similar names are"
                f" {', '.join(map(repr, near))}."
            )
        torch.compiler.reset()  # code that was compiled without the hook would not call it
        try:
            hook = layers[self.layer].register_forward_pre_hook(self._before, with_kwargs=True)
        except RuntimeError as error:
            raise MisconfigurationException(
                f"HiddenMixup mixes the inputs of {self.layer}, which takes no hook ({error}): name another layer."
            ) from error
        self._undo.callback(hook.remove)

    @override
    def _begin(self) -> None:
        super()._begin()
        self._context = None

    @override
    def _checked(self, context: BatchContext) -> int:
        self._context, self._called = context, False
        return super()._checked(context)

    @override
    def _require_parts(self, context: BatchContext, size: int) -> None:
        """The inputs are not mixed."""

    @override
    def _mix(self, context: BatchContext, lam: float, size: int) -> Drawn:
        target = get(context.batch, self._paths(context, "target")[0])
        return Drawn(max(lam, 1 - lam), permutation(context.numbers, target))

    @torch.compiler.disable
    def _before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._context is None or not self._context.plan.open:
            return None
        self._called = True
        if self.drawn is None:
            return None
        lam, index = float(self.drawn.lam), self.drawn.index
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        tensors = [x for x in named.values() if isinstance(x, Tensor)]
        found = next((name for name, x in named.items() if isinstance(x, Tensor) and x.is_floating_point()), None)
        if found is None and tensors:
            raise MisconfigurationException(
                f"HiddenMixup({self.layer!r}) mixes floating-point inputs of a layer, and {type(layer).__name__} gets"
                f" {tensors[0].dtype}, which cannot be mixed: name a layer after the embeddings, such as the head"
                " (layer='model.classifier')."
            )
        if found is None or len(named[found]) != len(index):
            raise MisconfigurationException(
                f"HiddenMixup({self.layer!r}) needs a layer with an input ({len(index)}, ...), got"
                f" {', '.join(str(tuple(x.shape)) for x in tensors) or 'no tensor'}."
            )
        if isinstance(layer, nn.Linear) and named[found].ndim == 3 and self._labels_sentences(self._context):
            self._context.plan.mix_predictions = lam, index
            return None
        named[found] = torch.lerp(named[found].index_select(0, index), named[found], lam)
        return tuple(named[number] for number in range(len(args))), {name: named[name] for name in kwargs}

    def _labels_sentences(self, context: BatchContext) -> bool:
        """Whether labels, or rows of floating-point labels, belong to sentences, and not to tokens."""
        targets = [get(context.batch, path) for path in context.targets]
        return all(target.ndim == 1 or target.is_floating_point() for target in targets)

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        if pl_module.automatic_optimization:
            self._require_call(pl_module)
        super().on_before_backward(trainer, pl_module, loss)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._pipeline is not None, "setup comes first"
        if self._pipeline.descends:
            self._require_call(pl_module)
        self._context = None
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def _require_call(self, pl_module: L.LightningModule) -> None:
        if self._context is not None and not self._called:
            raise MisconfigurationException(
                f"HiddenMixup did nothing: {type(pl_module).__name__}.training_step did not call the layer"
                f" {self.layer!r}. Name a layer that it calls."
            )

    @override
    def _close(self) -> None:
        super()._close()
        self._context = None
