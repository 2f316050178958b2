"""Fit a LightningCLI configuration with and without tricks, over seeds."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks_cli.commands.target import add_config

BASE = "base"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    compare = commands.add_parser(
        "compare",
        help="fit a configuration with and without tricks, over seeds, and tell whether they help",
        description="Fit a LightningCLI configuration as it is (base) and with changes, all of them with the same"
        " seeds, and print the differences of a metric with their 95% intervals, the verdict, and the ratio of times."
        " Finished runs are kept in the folder of the output: the same command goes on where it was interrupted.",
        epilog="examples:\n"
        "  lightning-tricks compare -c config.yaml --with EMA --with sam.yaml --metric val_accuracy --mode max\n"
        "  lightning-tricks compare -c config.yaml --without EMA --seeds 3 --metric val_loss --mode min",
    )
    add_config(compare)
    compare.add_argument(
        "--with",
        dest="added",
        action="append",
        default=[],
        metavar="TRICK",
        help="a change to the configuration: another file (.yaml), or a callback with its defaults, such as EMA",
    )
    compare.add_argument(
        "--without",
        dest="removed",
        action="append",
        default=[],
        metavar="CALLBACK",
        help="a callback to take out of the configuration, by its class",
    )
    compare.add_argument("--metric", required=True, metavar="NAME", help="a metric logged in validation or test")
    compare.add_argument("--mode", required=True, choices=("max", "min"), help="whether more or less of it is better")
    compare.add_argument("--seeds", type=int, default=5, metavar="N", help="number of seeds (default: 5)")
    compare.add_argument(
        "--output", type=Path, default=Path("compare"), metavar="FOLDER", help="folder of the runs (default: compare)"
    )
    compare.add_argument(
        "--checkpoint",
        choices=("last", "best"),
        default="last",
        help="the weights that are measured: of the end, or those that ModelCheckpoint calls best (default: last)",
    )
    compare.add_argument(
        "--equal-time", action="store_true", help="fit the base also for as long as a change of another time takes"
    )
    compare.add_argument("--plot", type=Path, metavar="OUT", help="write a picture of the differences")
    compare.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks.checkpoints.files import folder_of
    from lightning_tricks.evaluation import compare
    from lightning_tricks.evaluation.plan import this_rank
    from lightning_tricks_cli.runs.picture import check_picture, picture

    if not options.added and not options.removed:
        raise argparse.ArgumentError(
            None, "nothing to compare: name a trick, --with EMA, --with sam.yaml or --without EMA."
        )
    folder_of("output", options.output)
    if options.plot is not None:
        check_picture(options.plot)
    arms = _arms(options.config, options.added, options.removed)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # the same lines for every run
    result = compare(
        arms,
        metric=options.metric,
        mode=options.mode,
        seeds=options.seeds,
        folder=options.output,
        checkpoint=options.checkpoint,
        equal_time=options.equal_time,
    )
    if this_rank():
        return
    if options.plot is not None:
        with picture(options.plot) as axes:
            result.plot(axes)
    print(json.dumps(result.to_dict(), allow_nan=False) if options.json else result)
    if failed := [name for name, runs in result.runs.items() if any("error" in run for run in runs)]:
        raise ValueError(
            f"runs failed: {', '.join(failed)}. {options.output} has an error.txt for each; the same command makes them"
            " again."
        )


def _arms(configs: Sequence[Path], added: Sequence[str], removed: Sequence[str]) -> dict[str, Configured]:
    """The configuration as it is, and an arm for each change: another file, or a callback more or less."""
    arms = {BASE: Configured(configs)}
    for change in added:
        if Path(change).suffix in (".yaml", ".yml", ".json"):
            arms[f"with {Path(change).stem}"] = Configured([*configs, Path(change)])
        else:
            name = change.rpartition(".")[2]
            arms[f"with {name}"] = Configured(configs, [f"--trainer.callbacks+={change}"])
    arms |= {f"without {name}": Configured(configs, removed=name) for name in removed}
    if len(arms) <= len(added) + len(removed):
        raise argparse.ArgumentError(None, f"two changes have the same name: got --with {added}, --without {removed}.")
    return arms


class Configured:
    """An arm of ``compare``: what a configuration makes.

    Args:
        configs: The configuration files.
        arguments: Arguments of LightningCLI that override them.
        removed: The class of a callback that is taken out.

    Attributes:
        settings: The configuration as it was read, when the arm has been made.
    """

    def __init__(self, configs: Sequence[Path], arguments: Sequence[str] = (), removed: str | None = None) -> None:
        self._configs, self._arguments, self._removed = configs, arguments, removed
        self.settings: dict[str, str] = {}

    def __call__(self, folder: Path) -> tuple[Any, ...]:
        """Make Trainer, model and data."""
        from lightning_tricks_cli.runs.config import read_config, settings_of

        own = (f"default_root_dir={folder}", "enable_progress_bar=false", "enable_model_summary=false")
        trainer = [f"--trainer.{setting}" for setting in own]
        cli = read_config(self._configs, *self._arguments, *trainer, "--seed_everything=false")
        self.settings = {"without": str(self._removed), **settings_of(cli)}
        if self._removed is not None:
            names = [type(callback).__name__ for callback in cli.trainer.callbacks]
            if self._removed not in names:
                raise ValueError(f"--without {self._removed}: the configuration has no such callback, but {names}.")
            cli.trainer.callbacks = [each for each in cli.trainer.callbacks if type(each).__name__ != self._removed]
        return cli.trainer, cli.model, *([cli.datamodule] if cli.datamodule else [])
