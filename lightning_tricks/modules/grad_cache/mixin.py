"""Contrastive batches larger than memory, for a LightningModule that embeds and contrasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_tricks.core.checks import check_count
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import TORCH, require_engine
from lightning_tricks.core.lightning.trainer import is_fitting, takes_dataloader_iter
from lightning_tricks.core.replay.rerun import is_replaying
from lightning_tricks.core.replay.undone_fit import is_trial
from lightning_tricks.core.report import Row
from lightning_tricks.core.trick import Trick
from lightning_tricks.modules.grad_cache.engine import GradCache, check_embeddings

if TYPE_CHECKING:
    _Module = L.LightningModule  # what the mixin is mixed into; at run time it is a plain class
else:
    _Module = object

__all__ = ["GradCacheMixin"]


class GradCacheMixin(_Module):
    """Contrastive batches larger than memory: the activations of ``chunk`` samples at a time, the same gradient.

    ``loss = contrast(*embed(batch))``. A batch of more than ``chunk`` samples is embedded in chunks, without graphs.
    ``contrast`` compares all embeddings, and its gradient ``g`` with respect to them is kept. Then every chunk is
    embedded again, and ``sum(embed(chunk) * g[chunk])`` has the gradient of the loss. This happens inside ``backward``,
    so accumulation, clipping, mixed precision, DDP, FSDP2 and checkpoints work by the Trainer's own arguments. A step
    takes a second forward pass, and the embeddings twice. A smaller batch is trained on as without the mixin.

    Define ``embed(batch)``, which returns a tuple of embeddings (N, d) of a batch or some of its samples, and
    ``contrast(*embeddings)``, which returns the loss of all of them. The mixin has the ``training_step``; another one
    may call ``super().training_step(batch, batch_idx)``, log its loss and return it. ``validation_step`` calls
    ``embed`` and ``contrast`` as it likes. ``info_nce`` and ``clip_loss`` compare the samples of all devices.

    The second run of a chunk draws the same random numbers, and logs nothing; buffers and attributes of the module are
    as the first run left them. BatchNorm normalizes with the statistics of a chunk, and moves its running statistics
    once a chunk: the gradient is that of the chunks, as with accumulation. Chunks are of similar sizes.

    Raises:
        TypeError: If the mixin comes after LightningModule.
        MisconfigurationException: At fit start or in the first step, for what cannot be right: ``chunk`` is no count,
            ``embed`` or ``contrast`` is missing, a batch that cannot be cut, an ``embed`` whose tensors have no row for
            every sample, a loss that does not depend on them or reads attributes that ``embed`` sets, weights that
            ``embed`` writes, manual optimization, ``dataloader_iter``, DeepSpeed, ``static_graph=True``, SAM, mixed or
            filtered samples.

    Example:
        >>> import lightning_tricks as lt
        >>> class Net(lt.GradCacheMixin, L.LightningModule):
        ...     chunk = 32
        ...
        ...     def embed(self, batch):
        ...         return self.images(batch[0]), self.texts(batch[1])
        ...
        ...     def contrast(self, images, texts):
        ...         return lt.clip_loss(images, texts)

    References:
        Gao et al., arXiv 2101.06983.
    """

    chunk: int = 32
    _grad_cache: GradCache | None = None  # while a fit runs

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if L.LightningModule in order and order.index(L.LightningModule) < order.index(GradCacheMixin):
            raise TypeError(f"GradCacheMixin must come first: class {cls.__name__}(GradCacheMixin, LightningModule).")

    if TYPE_CHECKING:  # at run time they would hide those of a base class behind the mixin

        def embed(self, batch: Any) -> tuple[Tensor, ...]:
            """The embeddings of a batch or some of its samples: tensors (N, d), and perhaps others (N, ...)."""

        def contrast(self, *embeddings: Tensor) -> Tensor:
            """The loss, a scalar, of what ``embed`` returns for all samples of a batch."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        cache = self._grad_cache
        if cache is not None and cache.in_chunks:
            return cache.first_pass(batch)
        embeddings = self.embed(batch)
        if cache is None:
            return self.contrast(*embeddings)
        embeddings = check_embeddings(self, embeddings, cache.samples(batch))
        loss = self.contrast(*embeddings)
        cache.check_loss(loss, list(embeddings))
        return loss

    @override
    def configure_callbacks(self) -> list[Callback]:
        inherited = super().configure_callbacks()
        return [*([inherited] if isinstance(inherited, Callback) else inherited), GradCacheHooks(self)]

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        inherited = super().backward
        if self._grad_cache is not None:
            self._grad_cache.backward(loss, lambda part: inherited(part, *args, **kwargs))
        elif is_trial(self.trainer):
            inherited(loss, *args, **kwargs)
        else:
            raise MisconfigurationException(
                f"GradCacheMixin works in a Trainer's fit, in which {type(self).__name__}.configure_callbacks must"
                " include that of super()."
            )

    @override
    def log(self, *args: Any, **kwargs: Any) -> None:
        if not is_replaying():
            super().log(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_grad_cache": None}


class GradCacheHooks(Trick):
    """The hooks that ``GradCacheMixin`` adds to its Trainer: checks, and training steps that are cut."""

    conflicts = (
        Conflict(
            ("SAMHooks",), "SAM runs a step again at perturbed weights, and GradCacheMixin only a chunk of it at a time"
        ),
        Conflict(
            ("MixingCallback", "HardExampleFilter"),
            "the samples of a full batch are mixed or compared by their losses, and a chunk is a part of it",
        ),
        Conflict(("static_graph",), "DDP's static graph allows no second run of a step", "Remove static_graph"),
    )

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    @override
    def is_active(self, trainer: L.Trainer) -> bool:
        return trainer.lightning_module is self.module  # Lightning keeps the callbacks that an earlier module brought

    @override
    def written(self) -> str:
        return f"{type(self.module).__name__} with GradCacheMixin(chunk={self.module.chunk})"

    @override
    def given(self) -> Row:
        return "GradCacheMixin", {"chunk": self.module.chunk}

    @override
    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer) or not self.is_active(trainer):
            return
        _check(trainer, pl_module)
        pl_module._grad_cache = GradCache(pl_module)
        self._undo.callback(setattr, pl_module, "_grad_cache", None)
        self._wrap(trainer.strategy, "training_step", pl_module._grad_cache.training_step)

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.module._grad_cache is not None and self.module._grad_cache.pending:
            raise MisconfigurationException(
                f"{type(pl_module).__name__}.backward must call super().backward(loss): GradCacheMixin works inside it."
            )


def _check(trainer: L.Trainer, pl_module: Any) -> None:
    name = type(pl_module).__name__
    try:
        check_count(f"{name}.chunk", pl_module.chunk)
    except (TypeError, ValueError) as error:
        raise MisconfigurationException(f"{error} It is the largest number of samples in a chunk.") from None
    for method in ("embed", "contrast"):
        if not callable(getattr(pl_module, method, None)):
            raise MisconfigurationException(
                f"{name} inherits GradCacheMixin, which calls {method} in every training step: define it."
            )
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            f"GradCacheMixin works inside automatic optimization, got {name} with automatic_optimization=False: leave"
            " that out, or remove GradCacheMixin."
        )
    if takes_dataloader_iter(pl_module):
        raise MisconfigurationException(
            f"GradCacheMixin needs the batch: {name}.training_step must not take dataloader_iter."
        )
    require_engine(trainer, "GradCacheMixin", *TORCH, why="where gradients and optimizers are torch's own")
