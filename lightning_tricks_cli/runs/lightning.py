"""LightningCLI as the commands use it."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentError
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from typing_extensions import override


class Reader(LightningCLI):
    """Finds classes of the current folder, and raises for a wrong configuration with what says what to change.

    Raises:
        ImportError: If jsonargparse is missing.
        ArgumentError: For a configuration or an argument that is wrong.
    """

    def __init__(self, **kwargs: Any) -> None:
        try:
            import jsonargparse  # noqa: F401  LightningCLI names no extra of ours
        except ImportError as error:
            raise ImportError("a configuration needs jsonargparse: pip install 'lightning-tricks[cli]'") from error
        if os.getcwd() not in sys.path:  # as beside a script
            sys.path.insert(0, os.getcwd())
        super().__init__(**kwargs)

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(**{**kwargs, "prog": "lightning-tricks", "exit_on_error": False})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # LightningCLI's own warns that there are other arguments: those of the command
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise ArgumentError(None, _reason(str(error))) from error

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:  # of a class, in jsonargparse's paragraphs
            raise ValueError(_reason(str(error))) from error


class _SaveBesideLogs(SaveConfigCallback):
    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.logger is not None:  # else it is written to the current folder, where config.yaml may be the user's
            super().setup(trainer, pl_module, stage)


class Prepared(Reader):
    """Everything is built; ``run`` fits, validates, tests or predicts."""

    def __init__(self, args: list[str]) -> None:
        super().__init__(args=args, save_config_callback=_SaveBesideLogs)

    def fit(self, **kwargs: Any) -> None:
        """Keep what the Trainer's method takes: LightningCLI calls this in its place."""
        self.arguments = kwargs

    validate = test = predict = fit

    @override
    def before_instantiate_classes(self) -> None:
        path = self.config[str(self.subcommand)].get("ckpt_path") or ""
        named = path in ("", "best", "last", "hpc") or path.startswith("registry") or "://" in path  # by Lightning
        if not named and not Path(path).exists():
            raise FileNotFoundError(f"There is no checkpoint {path}.")

    def run(self) -> None:
        """Call the Trainer's method."""
        getattr(self.trainer, str(self.subcommand))(**self.arguments)


def _reason(message: str) -> str:
    """What of jsonargparse's paragraphs says what to change: the key and the errors, not the types it has tried."""
    errors = re.search(r"Errors:\n(.*?)(?=\n *(Subclass types expect|Given value)|\Z)", message, re.DOTALL)
    if errors is None:
        return re.sub(r"Unexpected config:\s*$", "a configuration is empty.", message)
    first, _, _ = message.partition("\n")
    said = [line.strip(" -") for line in errors[1].splitlines()]
    tried = ("Expected a <class 'NoneType'>", "Not a valid subclass", "Does not validate", "Subtypes:", "Errors:")
    said = [line for line in dict.fromkeys(said) if not line.startswith(tried)]
    while len(said) > 1 and said[-1].endswith(":"):  # of a class, nothing of which is left
        said.pop()
    value = re.search(r"^ *Given value: (.{1,60})$", message, re.MULTILINE)
    given = f", got {value[1]}" if value and re.fullmatch(r"Expected a <class '\w+'>", said[-1]) else ""
    return " ".join([*([first] if first.endswith(":") else []), *said]) + given
