"""The learning-rate finder on what a LightningCLI configuration describes."""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks.core.whole_file import whole_file
from lightning_tricks.schedules import LRFinderResult, find_lr
from lightning_tricks.schedules.lr_finder import Method


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
        ValueError: For a configuration that is wrong, an ending that is no picture's, or without a suggestion.
    """
    for config in configs:
        if not config.is_file():
            raise FileNotFoundError(f"There is no file {config}.")
    if plot is not None:
        _check_plot(plot)  # before the work, not after it
    cli = read_config(configs)
    result = find_lr(cli.trainer, cli.model, datamodule=cli.datamodule, **sweep)
    if not cli.trainer.is_global_zero:
        return result
    if plot is not None:
        _draw(result, plot)
    print(json.dumps(result.to_dict()) if as_json else f"{result.suggestion(method):.3g}")
    return result


def _check_plot(plot: Path) -> None:
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'lightning_tricks[plot]'") from error
    if not plot.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {plot.parent} for the plot.")
    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if plot.suffix[1:].lower() not in endings:
        raise ValueError(f"the name of the plot must end in .{', .'.join(endings)}, got {plot.name}.")


def _draw(result: LRFinderResult, plot: Path) -> None:
    from matplotlib.figure import Figure  # not of pyplot, which may ask for a screen

    figure, _ = result.plot(Figure(layout="constrained").subplots())
    with whole_file(plot) as file:
        figure.savefig(file)


def read_model(configs: Sequence[Path]) -> Any:
    """``read_config`` for what is asked of model and data; its Trainer may be for other machines than this one."""
    places = ("accelerator=cpu", "devices=1", "num_nodes=1", "strategy=auto", "precision=null", "plugins=null")
    return read_config(configs, *(f"--trainer.{place}" for place in places), "--trainer.logger=false")


def read_config(configs: Sequence[Path], *arguments: str) -> Any:
    """A LightningCLI that has built everything and run nothing; arguments win over the files."""
    if os.getcwd() not in sys.path:  # a configuration may name classes of the files here, as beside a script
        sys.path.insert(0, os.getcwd())
    try:
        import jsonargparse  # noqa: F401  LightningCLI names no extra of ours
    except ImportError as error:
        raise ImportError("a configuration needs jsonargparse: pip install 'lightning_tricks[cli]'") from error
    from lightning.pytorch import Trainer
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    class Reader(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            # what `fit` takes stands in the configurations that LightningCLI saves
            parser.add_method_arguments(Trainer, "fit", skip=set(self.subcommands()["fit"]))

        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            # LightningCLI's own warns that there are other arguments: those of this command
            try:
                self.config = parser.parse_args(args)
            except ArgumentError as error:
                raise ValueError(f"{', '.join(map(str, configs))}: {_reason(str(error))}") from error
            if self.config.get("ckpt_path") is not None:
                raise ValueError(
                    "this starts from the weights that the model is made with, got ckpt_path="
                    f"{self.config.ckpt_path}: leave it out."
                )

    files = [f"--config={config}" for config in configs]
    return Reader(
        run=False, args=[*files, *arguments], save_config_callback=None, parser_kwargs={"exit_on_error": False}
    )


def _reason(message: str) -> str:
    """What of jsonargparse's paragraphs says what to change: the key and the errors, not the types it has tried."""
    errors = re.search(r"Errors:\n(.*?)(?=\n *(Subclass types expect|Given value)|\Z)", message, re.DOTALL)
    if errors is None:
        return message
    said = [line.lstrip(" -") for line in errors[1].splitlines() if "<class 'NoneType'>" not in line]
    return "\n".join([message.splitlines()[0], *said])
