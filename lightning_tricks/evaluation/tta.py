"""Test-time augmentation: the mean output over several views of each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeAlias, get_args

import lightning as L
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_tricks.core.checks import check_choice, check_type
from lightning_tricks.core.lightning.namespace import require_same_lightning
from lightning_tricks.evaluation.mean_output import (
    Mean,
    MeanOutput,
    OutputMean,
    logits_in,
    with_logits,
    with_mean_beside,
)

__all__ = ["tta"]

View: TypeAlias = Callable[[Any], Any] | tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]


def tta(module: L.LightningModule, views: Sequence[View], *, mean: Mean = "probabilities") -> L.LightningModule:
    """Average a module's outputs over views of the input: ``log(mean_i(softmax(x_i)))``, or ``mean_i(x_i)``.

    ``x_i = self(view_i(x))`` are the outputs of the module for each view, such as a flip or a crop.

    The result is for ``validate``, ``test`` and ``predict``: an instance of the module's class with the same weights,
    buffers and submodules, whose ``self(x)`` gives the mean, so that steps, metrics and hooks work as they are. Steps
    that do not call ``self(x)``, or call ``self.forward(x)``, would see one view only, and are refused. The module
    itself keeps its class, and has all attributes of the result: what a step or a hook writes is in both, as after a
    validation of the module.

    An output with places, such as that of a segmentation (B, C, H, W), has to be turned back: a view is a pair then, of
    what changes the input and what changes the output back. The classes are its dimension 1.

    Args:
        module: The module, trained.
        views: Functions of the first argument of ``forward``, one or more, or pairs of functions. Only these are
            averaged: name the input as it is, too, by ``nn.Identity()``.
        mean: "probabilities" for the logarithm of mean probabilities, "logits" for the mean of outputs as they are,
            also of those that are no logits.

    Returns:
        The module of the means.

    Raises:
        TypeError: For what is no LightningModule, or views that are no functions.
        ValueError: For no views, other values of ``mean``, and outputs that are no logits for "probabilities".
        MisconfigurationException: If ``forward`` was replaced in the module, which is no method then, or it has views
            already; when it runs, for a step that does not call ``self(...)`` or calls ``self.forward(...)``, outputs
            of views that have other shapes, and outputs with places without a function that turns them back; if it is
            trained.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> net = tta(BoringModel(), [nn.Identity(), lambda x: x.flip(-1)])
        >>> isinstance(net, BoringModel), round(net(torch.ones(1, 32)).exp().sum().item(), 4)
        (True, 1.0)
        >>> # L.Trainer().test(net, loader)

    References:
        Krizhevsky et al., ImageNet classification with deep convolutional neural networks, 2012 (crops and flips).
    """
    require_same_lightning(module, "tta")
    check_type("module", module, L.LightningModule)
    check_choice("mean", mean, get_args(Mean))
    if isinstance(module, TTA):
        raise MisconfigurationException(f"{type(module).__name__} has views already: name all of them in one tta().")
    averaged = _Views(checked_views(views), mean)
    own = vars(module).get("forward")
    if own is not None and (not isinstance(own, MethodType) or own.__self__ is not module):
        raise MisconfigurationException(
            f"{type(module).__name__}.forward was replaced by {own!r}, which tta cannot call for each view: compile"
            " submodules, or change the class."
        )
    if own is not None and own.__func__ is type(module).forward:  # DDP leaves the method there
        del vars(module)["forward"]
    return with_mean_beside(module, TTA, averaged)


def checked_views(views: Sequence[View]) -> list[tuple[Callable[[Any], Any], Callable[[Tensor], Tensor] | None]]:
    """Views as pairs, with None where nothing turns an output back.

    Raises:
        TypeError: For what is no sequence of functions and pairs of them.
        ValueError: For none.
    """
    if not isinstance(views, Sequence):
        raise TypeError(f"views must be a list of functions, got {type(views).__name__}.")
    if not views:
        raise ValueError("views must be one function or more, got none: name them, or leave tta out.")
    pairs: list[Any] = []
    for view in views:
        pair = view if isinstance(view, tuple) else (view, view if isinstance(view, nn.Identity) else None)
        if len(pair) != 2 or not callable(pair[0]) or (isinstance(view, tuple) and not callable(pair[1])):
            raise TypeError(f"views must be functions, or pairs of functions, got {view!r}.")
        pairs.append(pair)
    return pairs


class TTA(MeanOutput):
    """The class of the modules of ``tta``, beside their own."""

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_redirected():
            return super().__call__(*args, **kwargs)
        views = next(mean for mean in self.means if isinstance(mean, _Views))
        return views.averaged(super().__call__, args, kwargs)

    @override
    def configure_optimizers(self) -> Any:
        raise MisconfigurationException("a module of tta() is not trained: fit the module itself.")


class _Views(OutputMean):
    """The mean over views.

    Args:
        views: What changes the input, and what changes the output back or None.
        mean: What is averaged.
    """

    trick = "tta"
    remedy = "call it there"

    def __init__(self, views: list[Any], mean: Mean) -> None:
        super().__init__(mean, dim=1)
        self.views = views

    def averaged(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The mean of the outputs of ``call`` for views of its first argument."""
        named = () if args else next(iter(kwargs.items()), ())
        outputs: list[Any] = []
        for view, undo in self.views:
            if named:
                output = call(**{**kwargs, named[0]: view(_copied(named[1]))})
            else:
                output = call(*(view(_copied(arg)) for arg in args[:1]), *args[1:], **kwargs)
            outputs.append(self._turned_back(output, undo, outputs[0] if outputs else None))
        return self.of(outputs)

    def _turned_back(self, output: Any, undo: Callable[[Tensor], Tensor] | None, before: Any) -> Any:
        logits = logits_in(output)
        if not isinstance(logits, Tensor):
            raise MisconfigurationException(
                f"tta averages tensors, got {type(output).__name__} from forward: return logits from it."
            )
        if undo is None and logits.dim() > 2:
            raise MisconfigurationException(
                f"tta averages outputs of shape {tuple(logits.shape)}, whose places a view may have moved: pass pairs,"
                " (view, what changes the output back), with nn.Identity() where nothing is to be changed back."
            )
        turned = logits if undo is None else undo(logits)
        if before is not None and turned.shape != logits_in(before).shape:
            raise MisconfigurationException(
                f"tta averages outputs of one shape, got {tuple(logits_in(before).shape)} for a view and"
                f" {tuple(turned.shape)} for another: let their inputs have one shape, or pass pairs, (view, what"
                " changes the output back)."
            )
        return with_logits(output, turned)


def _copied(value: Any) -> Any:
    """An input whose tensors a view, or a layer, may change in place without the next view seeing it."""
    return apply_to_collection(value, Tensor, Tensor.clone)
