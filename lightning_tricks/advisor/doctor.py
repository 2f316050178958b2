"""Lints when training starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_tricks.advisor.lints import RULES, SYNC_DIST, Finding, lint, lint_training
from lightning_tricks.core.active import Trick
from lightning_tricks.core.checks import check_choice, check_strings
from lightning_tricks.core.trainer import is_fitting
from lightning_tricks.core.wrapping import wrap_method


@final
class Doctor(Trick):
    """Warns when training starts of what is probably not meant, each with its remedy; changes nothing.

    - ``reused-modules``: one dropout or activation stands at several places
    - ``redundant-biases``: biases in front of a BatchNorm
    - ``bf16-weights-in-fp16``: pretrained in bf16, trained in fp16
    - ``loader-workers``: more workers than cores
    - ``pinned-memory``: without a GPU, or a GPU without it
    - ``schedule-length``: torch's OneCycleLR or CosineAnnealingLR made for another number of steps than there are
    - ``sync-dist``: ``self.log(..., sync_dist=True)`` in ``training_step``, which waits for all ranks in every step

    Args:
        silence: Rules that are not to be looked at.

    Raises:
        ValueError: For a rule that does not exist.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[Doctor(silence=["loader-workers"])], accelerator="cpu", logger=False)
    """

    def __init__(self, silence: str | Sequence[str] = ()) -> None:
        check_strings("silence", silence)
        silence = (silence,) if isinstance(silence, str) else tuple(silence)
        for rule in silence:
            check_choice("silence", rule, RULES)
        self.silence = silence
        self._undo: Callable[[], None] | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if is_fitting(trainer):
            self._say(lint(pl_module))  # which traces it: before it is sharded or compiled

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._say(lint_training(pl_module, trainer))
        if trainer.world_size > 1 and SYNC_DIST not in self.silence:
            self._undo = wrap_method(pl_module, "log", self._logged)

    def _logged(self, log: Callable[..., None], name: str, *args: Any, **kwargs: Any) -> None:
        log(name, *args, **kwargs)
        given = inspect.signature(pl.LightningModule.log).bind(None, name, *args, **kwargs).arguments
        if given.get("sync_dist") and given.get("on_step") is not False:
            text = (
                f"self.log({name!r}, sync_dist=True) in training_step makes each step wait for all ranks. Log it with"
                " on_step=False, on_epoch=True, or without sync_dist: the epoch's mean of rank 0 is close."
            )
            self._say([Finding(SYNC_DIST, text)])
            self._leave()  # log_dict may have many

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._leave()  # one batch shows what is logged

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _say(self, findings: Sequence[Finding]) -> None:
        for rule, text in findings:
            if rule not in self.silence:
                rank_zero_warn(f"Doctor, {rule}: {text}")
