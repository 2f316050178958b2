"""Reading LightningCLI configurations: model, data and Trainer, for the commands that start from initial weights."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_tricks_cli.runs.lightning import Reader


def read_model(configs: Sequence[Path]) -> Any:
    """``read_config`` with a Trainer on one CPU: configurations may describe other machines than this one."""
    trainer = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "precision=null", "plugins=null")
    return read_config(configs, *(f"--trainer.{setting}" for setting in (*trainer, "logger=false")))


def read_config(configs: Sequence[Path], *arguments: str) -> Any:
    """A LightningCLI that has built model, data and Trainer; ``arguments`` override the configurations."""
    for config in configs:
        if not config.is_file():
            raise FileNotFoundError(f"There is no file {config}.")
    files = [f"--config={config}" for config in configs]
    try:
        return _FitReader(run=False, args=[*files, *arguments], save_config_callback=None)
    except ArgumentError as error:
        raise ArgumentError(None, f"{', '.join(map(str, configs))}: {error}") from error


def settings_of(cli: Any) -> dict[str, str]:
    """The configuration of a LightningCLI as text, without the names of files."""
    of_files = ("config", "trainer.default_root_dir")
    return {key: str(value) for key, value in cli.config.items() if key not in of_files}


class _FitReader(Reader):
    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # The configurations that LightningCLI saves have the arguments of `fit`.
        parser.add_method_arguments(L.Trainer, "fit", skip=set(self.subcommands()["fit"]))

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        if self._checkpoint is not None:
            raise ValueError(
                f"this command starts from the model's initial weights, got ckpt_path={self._checkpoint}: leave it out."
            )
