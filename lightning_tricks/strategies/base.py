"""The base of all preset strategies, which bring their own precision: one string names both."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_tricks.core.checks import check_bool, check_choice
from lightning_tricks.core.conflicts import Participant
from lightning_tricks.core.fit_start import announce
from lightning_tricks.core.lightning.resume import begin_epoch
from lightning_tricks.core.lightning.trainer import requested_precision, saves_folder
from lightning_tricks.core.report import Row, settings
from lightning_tricks.core.safe_load.damage import refuse_program
from lightning_tricks.strategies.async_save import AsyncSaves

PresetPrecision = Literal["bf16-mixed", "16-mixed", "32-true"]


class PresetStrategy(Participant, AsyncSaves, Strategy):
    """Base of the strategies that take their precision as an argument.

    Lightning passes every strategy the precision plugin made from ``Trainer(precision=...)``, fp32 by default. The
    setter replaces that default with the strategy's own plugin and refuses any other precision. What a strategy
    changes outside of itself is undone through one stack, which is closed when the run ends or fails.

    Args:
        precision: The precision to train in, one of ``precisions``.
        async_save: Whether training goes on while the checkpoints of ``ModelCheckpoint`` are written.
        **settings: Arguments of Lightning's strategy.
    """

    precisions: tuple[str, ...] = ("bf16-mixed", "16-mixed", "32-true")

    def __init__(self, *, precision: PresetPrecision, async_save: bool = False, **settings: Any) -> None:
        check_choice("precision", precision, self.precisions)
        check_bool("async_save", async_save)
        self.precision = precision
        self.async_save = async_save
        self._undo = ExitStack()
        self.strategy_name = type(self).__name__  # Replaced by the preset's name in preset().
        super().__init__(**settings)

    def __repr__(self) -> str:
        # A Trainer of the other Lightning shows it in its error for what is no strategy of its own.
        where = "for lightning.pytorch; for pytorch_lightning `import pytorch_lightning_tricks as lt`"
        return f"<{self.strategy_name} of lightning_tricks, {where}>"

    @override
    def given(self) -> Row:
        given = {name: value for name, value in settings(self).items() if name != "config"}  # too long
        return self.strategy_name, given

    @override
    def written(self) -> str:
        return f"strategy={self.strategy_name!r}"

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None:
            own_plugin = self.make_precision_plugin()
            # The plugin does not tell what the user requested: on a CPU, "16-mixed" gets the plugin of "bf16-mixed".
            implied = self.precision if plugin.precision == "32-true" else plugin.precision
            requested = requested_precision() or implied
            if requested != self.precision:
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} trains in {self.precision!r}, got precision={requested!r}."
                    f" Leave precision= out, make it {self.precision!r}, or choose another strategy."
                )
            if plugin.precision != self.precision:
                plugin = own_plugin
            elif not isinstance(plugin, type(own_plugin)):
                raise MisconfigurationException(
                    f"strategy={self.strategy_name!r} needs the plugin {type(own_plugin).__name__}, got"
                    f" {type(plugin).__name__}. Leave the plugin out."
                )
        self._precision_plugin = plugin

    @override
    def connect(self, model: L.LightningModule) -> None:
        sharded_by = ""
        if not isinstance(self, DeepSpeedStrategy) and any(hasattr(p, "ds_id") for p in model.parameters()):
            sharded_by = "DeepSpeed"
        elif not isinstance(self, ModelParallelStrategy) and any(isinstance(m, FSDPModule) for m in model.modules()):
            sharded_by = "FSDP2"
        if sharded_by:
            raise MisconfigurationException(
                f"{type(model).__name__} is still sharded by {sharded_by} from an earlier run, got"
                f" strategy={self.strategy_name!r}. Create a new module and load its weights from a checkpoint."
            )
        super().connect(model)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            announce(self.lightning_module.trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if self.lightning_module is not None:
            begin_epoch(self.lightning_module.trainer, loader)
        return loader

    @override
    def teardown(self) -> None:
        self._undo.close()
        super().teardown()

    @property
    @override
    def launcher(self) -> Any:
        return None if self.is_single_process else super().launcher  # One process needs none, even in a notebook.

    @property
    def is_single_process(self) -> bool:
        """Whether the run has only one process."""
        return getattr(self, "num_nodes", 1) * getattr(self, "num_processes", 1) == 1

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        if str(checkpoint_path) == "newest" and not os.path.exists(checkpoint_path):
            raise MisconfigurationException(
                "ckpt_path='newest' needs the callback that knows the folder of the run: add"
                " callbacks=[Preemption(folder)], or pass ckpt_path=newest_checkpoint(folder)."
            )
        if os.path.isdir(checkpoint_path) and not saves_folder(self.lightning_module.trainer):
            raise MisconfigurationException(
                f"ckpt_path={str(checkpoint_path)!r} is a folder of shards, and strategy={self.strategy_name!r} loads"
                " one file. Resume with a preset like the one that saved it, or write its weights to one file with"
                " lightning-tricks consolidate and load that file into the module."
            )
        if os.path.isfile(checkpoint_path):
            refuse_program(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def make_precision_plugin(self) -> Precision:
        """Make the plugin of this precision for the Trainer's accelerator."""
        if self.precision == "32-true":
            return Precision()
        return MixedPrecision(self.precision, self.device_type)

    @property
    def device_type(self) -> str:
        """The type of the Trainer's devices, as torch names it."""
        assert self.accelerator is not None, "the Trainer sets it before the precision"
        device: torch.device = self.accelerator.get_parallel_devices(self.accelerator.parse_devices(1))[0]
        return device.type

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_undo": ExitStack()}
