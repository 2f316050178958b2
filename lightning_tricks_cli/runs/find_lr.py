"""The learning-rate finder for a LightningCLI configuration."""

from __future__ import annotations

import json
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_tricks.schedules import LRFinderResult, find_lr
from lightning_tricks.schedules.lr_finder import Method
from lightning_tricks_cli.runs.lightning import Reader
from lightning_tricks_cli.runs.picture import check_picture, picture


def find_lr_of(
    configs: Sequence[Path],
    *,
    method: Method = "valley",
    plot: Path | None = None,
    as_json: bool = False,
    **sweep: Any,
) -> LRFinderResult:
    """Run ``find_lr`` on the model, data and Trainer of configuration files, and print its suggestion.

    Args:
        configs: LightningCLI configurations with a ``class_path`` for model and data; later ones override earlier ones.
        method: The method that chooses the suggestion.
        plot: The picture to write, even if there is no suggestion.
        as_json: Whether to print learning rates and losses instead of the suggestion.
        **sweep: Arguments of ``find_lr``.

    Returns:
        The learning rates and losses.

    Raises:
        ImportError: If jsonargparse is missing, or matplotlib for the plot.
        OSError: If a configuration, or the folder of the plot, does not exist.
        ArgumentError: If a configuration is wrong.
        ValueError: If a configuration has a checkpoint, the plot's suffix is unknown, or there is no suggestion.
    """
    if plot is not None:
        check_picture(plot)
    cli = read_config(configs)
    result = find_lr(cli.trainer, cli.model, datamodule=cli.datamodule, **sweep)
    if not cli.trainer.is_global_zero:
        return result
    if plot is not None:
        with picture(plot) as axes:
            result.plot(axes)
    print(json.dumps(result.to_dict()) if as_json else f"{result.suggestion(method):.3g}")
    return result


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
        parser.add_method_arguments(Trainer, "fit", skip=set(self.subcommands()["fit"]))

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        if self._checkpoint is not None:
            raise ValueError(
                f"this command starts from the model's initial weights, got ckpt_path={self._checkpoint}: leave it out."
            )
