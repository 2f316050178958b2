"""DeepSpeed ZeRO: optimizer states, gradients and weights in slices, one a process."""

from __future__ import annotations

from typing import Any, Literal, final

from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from typing_extensions import override

from lightning_tricks.core.checks import check_choice
from lightning_tricks.strategies.precision import FixedPrecision, PresetPrecision


@final
class ZeROPreset(FixedPrecision, DeepSpeedStrategy):
    """ZeRO of an ordinary LightningModule: the presets whose names begin with ``zero``.

    Args:
        precision: What to train in: "bf16-mixed", "16-mixed" or "32-true"; optimizer states are fp32 in each.
        stage: What is sharded: optimizer states (1), gradients too (2), weights too (3).
        offload: Where what is sharded waits: "none" on the device, "cpu" in host memory, "nvme" on a disk.
        nvme_path: Folder on that disk.
        **settings: Further arguments of Lightning's ``DeepSpeedStrategy``.

    Example:
        >>> import lightning.pytorch as pl
        >>> pl.Trainer(strategy=ZeROPreset(stage=2), accelerator="cpu", devices=1, logger=False).precision
        'bf16-mixed'
    """

    def __init__(
        self,
        *,
        precision: PresetPrecision = "bf16-mixed",
        stage: Literal[1, 2, 3] = 3,
        offload: Literal["none", "cpu", "nvme"] = "none",
        nvme_path: str | None = None,
        **settings: Any,
    ) -> None:
        check_choice("offload", offload, ("none", "cpu", "nvme"))
        super().__init__(precision=precision, stage=stage, **settings)

    @override
    def make_precision_plugin(self) -> Precision:
        return DeepSpeedPrecision(self.precision)
