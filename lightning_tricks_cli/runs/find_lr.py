"""The learning-rate finder on what a LightningCLI configuration describes."""

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
    """Run ``find_lr`` on the model, data and Trainer of configuration files, and print what it suggests.

    Args:
        configs: Files as ``LightningCLI`` reads them, with a ``class_path`` for model and data; later ones win.
        method: Of the suggestion.
        plot: Picture to write; without a suggestion too.
        as_json: Print learning rates and losses instead of the suggestion.
        **sweep: Arguments of ``find_lr``.

    Returns:
        What was measured.

    Raises:
        ImportError: If jsonargparse is missing, or matplotlib for the plot.
        OSError: For a missing configuration or a folder of the plot that does not exist.
        ArgumentError: For a configuration that is wrong.
        ValueError: For a checkpoint in it, an ending that is no picture's, or without a suggestion.
    """
    if plot is not None:
        check_picture(plot)  # before the work, not after it
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
    """``read_config`` for what is asked of model and data; its Trainer may be for other machines than this one."""
    places = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "precision=null", "plugins=null")
    return read_config(configs, *(f"--trainer.{place}" for place in places), "--trainer.logger=false")


def read_config(configs: Sequence[Path], *arguments: str) -> Any:
    """A LightningCLI that has built everything and run nothing; arguments win over the files."""
    for config in configs:
        if not config.is_file():
            raise FileNotFoundError(f"There is no file {config}.")
    files = [f"--config={config}" for config in configs]
    try:
        cli = _Built(run=False, args=[*files, *arguments], save_config_callback=None)
    except ArgumentError as error:
        raise ArgumentError(None, f"{', '.join(map(str, configs))}: {error}") from error
    return cli


class _Built(Reader):
    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # what `fit` takes stands in the configurations that LightningCLI saves
        parser.add_method_arguments(Trainer, "fit", skip=set(self.subcommands()["fit"]))

    @override
    def before_instantiate_classes(self) -> None:
        if self.config.get("ckpt_path") is not None:
            raise ValueError(
                "this starts from the weights that the model is made with, got ckpt_path="
                f"{self.config.ckpt_path}: leave it out."
            )
