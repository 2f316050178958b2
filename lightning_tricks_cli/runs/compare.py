"""``compare`` for LightningCLI configurations."""

from __future__ import annotations

import json
import logging
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks.checkpoints.files import folder_of
from lightning_tricks.evaluation import Comparison, compare
from lightning_tricks.evaluation.plan import this_rank
from lightning_tricks_cli.runs.find_lr import read_config, settings_of
from lightning_tricks_cli.runs.picture import check_picture, picture

BASE = "base"


def compare_of(
    configs: Sequence[Path],
    *,
    added: Sequence[str] = (),
    removed: Sequence[str] = (),
    plot: Path | None = None,
    as_json: bool = False,
    **settings: Any,
) -> Comparison:
    """Run ``compare`` on configuration files as they are and with changes, and print its table.

    Args:
        configs: LightningCLI configurations; later ones override earlier ones.
        added: Changes, an arm each: another configuration file, or the class of a callback.
        removed: Classes of callbacks, an arm without each.
        plot: The picture to write.
        as_json: Whether to print JSON instead of the table.
        **settings: Arguments of ``compare``.

    Returns:
        The result of ``compare``.

    Raises:
        ArgumentError: If there is no change, or a configuration is wrong.
        ValueError: If a callback to remove is not there, or a run failed; the table is printed all the same.
    """
    if not added and not removed:
        raise ArgumentError(None, "nothing to compare: name a trick, --with EMA, --with sam.yaml or --without EMA.")
    folder_of("output", settings["folder"])
    if plot is not None:
        check_picture(plot)
    arms = {BASE: Configured(configs)}
    for change in added:
        is_file = Path(change).suffix in (".yaml", ".yml", ".json")
        files, arguments = ([Path(change)], []) if is_file else ([], [f"--trainer.callbacks+={change}"])
        arms[f"with {Path(change).stem if is_file else change.rpartition('.')[2]}"] = Configured(
            [*configs, *files], arguments
        )
    arms |= {f"without {name}": Configured(configs, removed=name) for name in removed}
    if len(arms) <= len(added) + len(removed):
        raise ArgumentError(None, f"two changes have the same name: got --with {added}, --without {removed}.")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # the same lines for every run
    result = compare(arms, **settings)
    if this_rank():
        return result
    if plot is not None:
        with picture(plot) as axes:
            result.plot(axes)
    print(json.dumps(result.to_dict(), allow_nan=False) if as_json else result)
    failed = [name for name, runs in result.runs.items() if any("error" in run for run in runs)]
    if failed:
        raise ValueError(
            f"runs failed: {', '.join(failed)}. {settings['folder']} has an error.txt for each; the same command makes"
            " them again."
        )
    return result


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
