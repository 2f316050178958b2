"""LightningCLI for the commands."""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_tricks.core.checks import EPOCHS
from lightning_tricks.core.install import required
from lightning_tricks_cli.runs.near_names import near_names


class Reader(LightningCLI):
    """A LightningCLI that finds classes of the current folder and reports errors in one line.

    Raises:
        ImportError: If jsonargparse is missing.
        ArgumentError: If a configuration or an argument is wrong.
    """

    def __init__(self, **kwargs: Any) -> None:
        with required("a configuration needs jsonargparse", "cli"):
            import jsonargparse  # noqa: F401  LightningCLI would not name the extra to install.
        if os.getcwd() not in sys.path:  # Python does so for scripts only.
            sys.path.insert(0, os.getcwd())
        super().__init__(**kwargs)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        own = {"prog": "lightning-tricks", "exit_on_error": False, "allow_abbrev": False}
        parser = super().init_parser(**{**kwargs, **own})
        self._parsers = [*getattr(self, "_parsers", []), parser]  # that of LightningCLI and those of its subcommands
        return parser

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # LightningCLI's method would warn that sys.argv has other arguments, namely those of the command.
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            if missing := re.search(r'Parser key "config": File does not exist: \'?(.*?)\'?$', str(error)):
                raise FileNotFoundError(f"There is no file {missing[1]}.") from error
            reason = _reason(str(error))
            hint = f". {EPOCHS}" if re.search(r"Expected a <class 'float'>, got .*epoch", reason) else ""
            raise ArgumentError(None, reason + (hint or near_names(reason, self._parsers))) from error
        # LightningCLI would put the checkpoint's hyperparameters over the configuration, and make what they name.
        self._checkpoint = self._of_run.pop("ckpt_path", None)

    @override
    def before_instantiate_classes(self) -> None:
        if self._checkpoint is not None:
            self._of_run["ckpt_path"] = self._checkpoint

    @property
    def _of_run(self) -> Any:
        """The part of the configuration with the arguments of the Trainer's method."""
        command = self.config.get("subcommand")
        return self.config[command] if command else self.config

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            reason = _reason(str(error))
            raise ValueError(reason + near_names(reason, self._parsers)) from error


class _SaveBesideLogs(SaveConfigCallback):
    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Without a logger it would be written to the current folder, over a config.yaml of the user.
        if trainer.logger is not None:
            super().setup(trainer, pl_module, stage)


class Prepared(Reader):
    """Builds model, data and Trainer at construction; ``run`` fits, validates, tests or predicts.

    Args:
        args: The subcommand and the arguments of LightningCLI.
    """

    def __init__(self, args: list[str]) -> None:
        super().__init__(args=args, save_config_callback=_SaveBesideLogs)

    def fit(self, **kwargs: Any) -> None:
        """Keep the arguments of the Trainer's method; LightningCLI calls this at construction."""
        self.arguments = kwargs

    validate = test = predict = fit

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        path = self._checkpoint or ""
        is_word = path in ("", "best", "last", "hpc", "newest") or path.startswith("registry") or "://" in path
        if not is_word and not (Path(path).is_file() or Path(path).is_dir()):
            raise FileNotFoundError(f"There is no checkpoint {path}.")

    def run(self) -> None:
        """Call the Trainer's method."""
        getattr(self.trainer, str(self.subcommand))(**self.arguments)

    def what_is_next(self, arguments: Sequence[str]) -> str:
        """After a fit, on rank zero: where the checkpoint is, and the command that evaluates it; nothing without one.

        Args:
            arguments: The arguments of the fit.
        """
        checkpoint = self.trainer.checkpoint_callback
        kept = checkpoint.best_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
        kept = kept or getattr(checkpoint, "last_model_path", "")
        if not kept or not self.trainer.is_global_zero:
            return ""
        path = os.path.relpath(kept) if Path(kept).is_relative_to(Path.cwd()) else kept
        told = f"checkpoint: {path}\n"
        source = self.model if self.datamodule is None else self.datamodule
        for command, parts in {"test": ("test_step", "test"), "validate": ("validation_step", "val")}.items():
            if is_overridden(parts[0], self.model) and is_overridden(f"{parts[1]}_dataloader", source):
                words = [command, *_without_checkpoint(arguments), "--ckpt_path", path]
                return f"{told}next: lightning-tricks {shlex.join(words)}\n"
        return told


def _without_checkpoint(arguments: Sequence[str]) -> list[str]:
    """Arguments of a fit without ``--ckpt_path PATH`` and ``--ckpt_path=PATH``."""
    pairs = zip(["", *arguments], arguments, strict=False)
    return [word for before, word in pairs if "--ckpt_path" not in (before, word.partition("=")[0])]


def _reason(message: str) -> str:
    """Shorten jsonargparse's message to the key and the errors, without the types that it has tried."""
    errors = re.search(r"Errors:\n(.*?)(?=\n *(Subclass types expect|Given value)|\Z)", message, re.DOTALL)
    if errors is None:
        return re.sub(r"Unexpected config:\s*$", "a configuration is empty.", message)
    first, _, _ = message.partition("\n")
    lines = [line.strip(" -") for line in errors[1].splitlines()]
    tried = ("Expected a <class 'NoneType'>", "Not a valid subclass", "Does not validate", "Subtypes:", "Errors:")
    lines = [line for line in dict.fromkeys(lines) if not line.startswith(tried)]
    while len(lines) > 1 and lines[-1].endswith(":"):  # A heading without errors below it.
        lines.pop()
    value = re.search(r"^ *Given value: (.{1,60})$", message, re.MULTILINE)
    given = f", got {value[1]}" if value and re.fullmatch(r"Expected a <class '\w+'>", lines[-1]) else ""
    return " ".join([*([first] if first.endswith(":") else []), *lines]) + given
