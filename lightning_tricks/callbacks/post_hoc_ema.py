"""Two averages of the weights in snapshots on the disk, from which an average of any length is made after training."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar, final

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.checkpoints.post_hoc import check_length, power_of, snapshot_name, snapshots_in
from lightning_tricks.core.averaging.agree import agree_on
from lightning_tricks.core.averaging.averages import Averages
from lightning_tricks.core.averaging.coordinator import Averaging, coordinator_of
from lightning_tricks.core.averaging.state import callback_state, local_state
from lightning_tricks.core.checks import check_count, check_type, some
from lightning_tricks.core.conflicts import Conflict
from lightning_tricks.core.lightning.engine import TORCH, require_engine
from lightning_tricks.core.lightning.fit import fit_of
from lightning_tricks.core.lightning.steps import UnknownTotalSteps
from lightning_tricks.core.lightning.trainer import is_fitting
from lightning_tricks.core.report import Row, readable
from lightning_tricks.core.safe_load.atomic_file import atomic_write
from lightning_tricks.core.safe_load.own_folder import mark, remove_file, require_own
from lightning_tricks.core.weights.by_engine import local_weights

__all__ = ["PostHocEMA", "power_decay"]

_SNAPSHOTS = 32  # of each average, unless every_n_steps says otherwise
_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # The name of a run's folder, which comes from a checkpoint, too.


def power_decay(step: int, sigma_rel: float) -> float:
    """The decay of a power-function average at a step: ``d = (1 - 1/step) ** (gamma+1)``.

    The weights of step s count as ``s**gamma`` in the average after any number of steps, with gamma from
    ``sigma_rel**2 = (gamma+1) / ((gamma+2)**2 (gamma+3))``.

    Args:
        step: The number of optimizer steps so far, this one included, at least 1.
        sigma_rel: Length of the average: the standard deviation of that profile, as a share of the steps so far, above
            0 and below 0.2887.

    Returns:
        d of ``average = d * average + (1-d) * weight``.

    Example:
        >>> power_decay(1, 0.05), round(power_decay(1000, 0.05), 4)
        (0.0, 0.9822)
    """
    check_count("step", step)
    check_length("sigma_rel", sigma_rel)
    return (1 - 1 / step) ** (power_of(sigma_rel) + 1)


@final
class PostHocEMA(Averaging):
    """Saves averages of the weights in snapshots, from which one of any length is made after training.

    ``average += (1-d) * (weight - average)`` with the decays d of ``power_decay``, one for each length, after every
    training batch in which an optimizer stepped. Training, validation and checkpoints are those of the raw weights.
    ``post_hoc_average(folder, sigma_rel=0.13)`` then gives the average of a length that was not decided on before.

    Each fit makes a folder of its own in ``folder``, with files of half precision: snapshots x lengths x 2 bytes a
    trainable weight, 128 bytes with the defaults. The table of active tricks says how much disk that is. A tensor that
    half precision does not hold to a thousandth stays in fp32. The averages are in memory in fp32, and in checkpoints,
    so that a resumed fit goes on exactly; it replaces the snapshots of steps that it makes again. A weight that is
    unfrozen later joins at the next epoch. ``fast_dev_run`` writes nothing.

    Args:
        folder: The folder for the snapshots.
        sigma_rels: Lengths of the averages, at least two different ones, as shares of training: each above 0 and
            below 0.2887.
        every_n_steps: Optimizer steps between snapshots; None for 32 snapshots of each average over the training. The
            last step always has one.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a value out of range.
        NotADirectoryError: If the folder is a file.
        MisconfigurationException: At setup, under DeepSpeed; when training starts, without ``every_n_steps`` if its
            length is unknown; on resume, from a checkpoint with other lengths or weights.

    Example:
        >>> trainer = L.Trainer(callbacks=[PostHocEMA("runs/ema")], accelerator="cpu", logger=False)

    References:
        Karras et al. 2024, Analyzing and Improving the Training Dynamics of Diffusion Models, arXiv 2312.02696.
    """

    conflicts: ClassVar[tuple[Conflict, ...]] = (
        Conflict(
            ("ModelPruning",),
            "snapshots are combined by the names of the weights, which pruning changes amid training",
            "Use EMA, which follows the names, or prune after training",
        ),
    )

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sigma_rels: Sequence[float] = (0.05, 0.10),
        every_n_steps: int | None = None,
    ) -> None:
        self.folder = str(folder_of("folder", folder))
        check_type("sigma_rels", sigma_rels, list, tuple)
        for place, length in enumerate(sigma_rels):
            check_length(f"sigma_rels[{place}]", length)
        if len(set(sigma_rels)) < max(2, len(sigma_rels)):
            raise ValueError(f"sigma_rels must be two different lengths or more, got {sigma_rels!r}.")
        check_count("every_n_steps", every_n_steps, optional=True)
        self.sigma_rels = tuple(sigma_rels)
        self.every_n_steps = every_n_steps
        super().__init__()
        self._averages: dict[float, Averages] = {}
        self._every = 1  # optimizer steps between snapshots
        self._run = ""  # the name of the folder of this run
        self._saved = 0  # the step of the last snapshot, or that at which the fit began

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if not is_fitting(trainer):
            return
        require_engine(trainer, type(self).__name__, *TORCH)
        if not coordinator_of(trainer).join(self):
            self._begin(trainer, pl_module)

    def _begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin new averages, of a new run."""
        weights = local_weights(trainer, pl_module, type(self).__name__)
        self._averages, self._run = {length: Averages(weights) for length in self.sigma_rels}, ""

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if not is_fitting(trainer):
            return
        self._begin(trainer, pl_module)
        saved = checkpoint.get("callbacks", {}).get(self.state_key)
        if not saved:
            return
        if saved["averages"].keys() != set(self.sigma_rels):
            lengths = ", ".join(map(str, saved["averages"]))
            raise MisconfigurationException(
                f"{self.written()}: the checkpoint has averages of the lengths {lengths}, with which it can be resumed."
            )
        self._run = saved["run"] if _RUN.fullmatch(saved["run"]) else ""
        names = dict(pl_module.named_parameters())
        for length, state in saved["averages"].items():
            averages = self._averages[length]
            state = local_state(trainer, averages, self._key(length), state, checkpoint["global_step"])
            if unknown := state["averaged"].keys() - names.keys():
                raise MisconfigurationException(
                    f"{self.written()}: the checkpoint has averages of {some(sorted(unknown))}, which"
                    f" {type(pl_module).__name__} does not have. Resume with the module that was trained."
                )
            averages.load_state_dict(state, state["averaged"])

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._every = self._steps_between(trainer)
        for averages in self._averages.values():
            if averages.tracks:
                self._track(averages, joined=False)
        self._saved = self._steps_so_far
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._run = self._run or f"{datetime.now():%Y%m%d-%H%M%S}-{token_hex(2)}"
            folder = Path(self.folder) / self._run
            require_own(folder, "fit")
            folder.mkdir(parents=True, exist_ok=True)
            mark(folder, "fit")

    def _steps_between(self, trainer: L.Trainer) -> int:
        if self.every_n_steps is not None:
            return self.every_n_steps
        try:
            return math.ceil(fit_of(trainer).total / _SNAPSHOTS)
        except UnknownTotalSteps as error:
            raise MisconfigurationException(
                f"{self.written()} saves {_SNAPSHOTS} snapshots of a training whose length is unknown: {error.reason}."
                " Give every_n_steps, a number of optimizer steps."
            ) from error

    @override
    def row(self, trainer: L.Trainer) -> Row:
        name, given = super().row(trainer)
        weights = [weight for weight in trainer.lightning_module.parameters() if weight.requires_grad]
        size = 2 * len(self.sigma_rels) * sum(weight.numel() for weight in weights if not is_lazy(weight))
        try:
            total = fit_of(trainer).total
        except UnknownTotalSteps:
            return name, {**given, "disk": f"{readable(size)} a snapshot"}
        return name, {**given, "disk": readable(size * math.ceil(total / self._steps_between(trainer)))}

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch_idx == 0:
            for averages in self._averages.values():
                if averages.tracks:
                    self._track(averages)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.catch_up(trainer)
        step, due = self._steps_so_far, self._steps_so_far % self._every == 0
        if step < self._saved:  # a rewind has taken steps back
            self._saved = step if due else step - 1
        if due:
            self._snapshot(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._snapshot(trainer)

    @override
    def catch_up(self, trainer: L.Trainer) -> bool:
        if not self._observer.stepped():
            return False
        for length, averages in self._averages.items():
            if not averages.tracks:
                self._track(averages)
            averages.steps += 1
            averages.lerp(1 - power_decay(averages.steps, length))
        return True

    @override
    def running(self) -> dict[str, Averages]:
        return {self._key(length): averages for length, averages in self._averages.items()}

    @property
    def _steps_so_far(self) -> int:
        return next(iter(self._averages.values())).steps

    def _track(self, averages: Averages, *, joined: bool = True) -> None:
        """Average the trainable weights; without ``joined`` only those that have an average."""
        found = averages.weights.trainable()
        averages.track({name: part for name, part in found.items() if joined or name in averages.tensors})

    def _snapshot(self, trainer: L.Trainer) -> None:
        """Write a file for each average after a new step; all ranks take part."""
        step, folder = self._steps_so_far, Path(self.folder) / self._run
        if step == self._saved or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        for length, averages in self._averages.items():
            agree_on(trainer, averages)
            _write(averages, folder / snapshot_name(step, length) if trainer.is_global_zero else None)
        for later in snapshots_in(folder) if trainer.is_global_zero else ():
            if later.step > self._saved and later.step != step:
                remove_file(later.path)  # of steps that were taken back, by a rewind or a resume
        self._saved = step

    def _key(self, length: float) -> str:
        return f"{self.state_key}({length})"

    @override
    def state_dict(self) -> dict[str, Any]:
        shared = self.coordinator
        if shared is None or not self._averages or self.is_foreign:
            return {}
        states = {length: callback_state(shared.trainer, averages) for length, averages in self._averages.items()}
        return {"run": self._run, "averages": states}


def _write(averages: Averages, file: Path | None) -> None:
    """Write a snapshot, or only take part in gathering it where there is no file."""
    content = _halved(averages, keep=file is not None)
    if file is not None:
        with atomic_write(file) as temporary:
            torch.save(content, temporary)


@torch.no_grad()
def _halved(averages: Averages, *, keep: bool) -> dict[str, Any]:
    """The content of a snapshot, on the host: the averages in half precision, their names, and the module's buffers."""
    averages.parts()  # gives renamed weights' averages their names
    module, first, tied = averages.module, dict[int, str](), defaultdict[str, list[str]](list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied[first.setdefault(id(parameter), name)].append(name)
    state, names = dict[str, Tensor](), list[str]()
    for name, average in averages.tensors.items():
        full = averages.weights.unshard({name: average})[name]  # one at a time
        if keep:
            state |= dict.fromkeys(tied[name], _half(full))
            names += tied[name]
    if keep:
        saved = module.state_dict().keys()
        state |= {name: buffer.to("cpu", copy=True) for name, buffer in module.named_buffers() if name in saved}
    return {"state_dict": state, "averaged": names}


def _half(tensor: Tensor) -> Tensor:
    """A copy on the host, in half precision if that holds it to a thousandth."""
    full = tensor.to("cpu", copy=True)
    if not full.is_floating_point():
        return full
    half = full.half()
    return half if (half - full).norm() <= 2**-10 * full.norm() else full
