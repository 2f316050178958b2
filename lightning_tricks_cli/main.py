"""The entry point of the ``lightning-tricks`` command."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from lightning_tricks_cli.commands import (
    average,
    compare,
    completion,
    consolidate,
    cross_validate,
    demo,
    doctor,
    export,
    find_lr,
    find_workers,
    memory,
    optimizers,
    plot_schedule,
    presets,
    recommend,
    suggest,
    trainer,
    tricks,
)
from lightning_tricks_cli.commands.target import with_flags
from lightning_tricks_cli.nearest import did_you_mean

COMMANDS = (
    *(trainer, find_lr, find_workers, cross_validate, compare, demo),
    *(recommend, tricks, presets, optimizers, plot_schedule, memory, suggest, doctor),
    *(average, export, consolidate, completion),
)
# Headings in the help, by the first command below each.
GROUPS = {"fit": "training", "recommend": "looking", "average": "files"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 success, 1 an error, 2 wrong usage, 130 Ctrl-C.

    An error that the user can fix is printed on one line; other errors keep their traceback. Without arguments the
    help is printed.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments or ["--help"])
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into SystemExit.
            return 130
        raise
    except Exception as error:
        if options.debug or not _is_user_error(error):
            raise
        if isinstance(error, BrokenPipeError):  # A reader such as `| head` has read enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"lightning-tricks: {with_flags(' '.join(str(error).split()), options)}", file=sys.stderr)
        return 2 if isinstance(error, argparse.ArgumentError) else 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Make the parser of the complete command line."""
    main_parser = _Parser(
        prog="lightning-tricks",
        description="Training tricks for a stock Lightning Trainer.",
        epilog="lightning-tricks COMMAND --help explains a command, with examples. Exit codes: 0 success, 1 an error, 2"
        " wrong usage, 130 Ctrl-C.",
        allow_abbrev=False,
    )
    debug_help = "show the traceback of an error"
    main_parser.add_argument("--version", action=_Version, help="print the version and exit")
    main_parser.add_argument("--debug", action="store_true", help=debug_help)
    commands = main_parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=_Parser
    )
    for command in COMMANDS:
        known = set(commands.choices)
        command.add(commands)
        for name in commands.choices.keys() - known:
            commands.choices[name].set_defaults(run=command.run)
    for command_parser in commands.choices.values():
        command_parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug_help)
        command_parser.allow_abbrev = False  # `--step` for `--steps` is a mistake, or another option tomorrow.
        command_parser.formatter_class = argparse.RawDescriptionHelpFormatter  # Does not wrap examples.
        command_parser.set_defaults(parser=command_parser)
        command_parser.description = textwrap.fill(command_parser.description or "", 80)
    return main_parser


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        text = super().format_help()
        for first, group in GROUPS.items() if self.prog == "lightning-tricks" else ():
            text = re.sub(rf"^    {first} ", rf"   {group}\n\g<0>", text, flags=re.MULTILINE)
        return text

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with the choice that is most similar to a misspelt one; exit with 2."""
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            message += "." + did_you_mean(wrong[1], re.findall(r"[^\s',]+", wrong[2]))
        super().error(message)


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **settings)

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> NoReturn:
        # Read from the source: importing the package would import torch, which takes seconds.
        source = Path(str(find_spec("lightning_tricks").origin)).read_text()  # type: ignore[union-attr]
        print(f"lightning-tricks {re.findall(r'^__version__ = .(.+).$', source, re.MULTILINE)[0]}")
        parser.exit()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    main_parser = parser()
    options, others = main_parser.parse_known_args(arguments)
    if others and options.run is not trainer.run:
        command_parser = options.parser
        flags = re.findall(r"(?<!\w)--[\w-]+", command_parser.format_help())
        command_parser.error(
            f"{options.command} has no argument {' '.join(others)}: see lightning-tricks {options.command} -h."
            + did_you_mean(others[0].partition("=")[0], flags)
        )
    options.others = others
    return options


def _is_user_error(error: Exception) -> bool:
    if isinstance(error, ValueError | TypeError | ImportError | OSError | argparse.ArgumentError):
        return True
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)


if __name__ == "__main__":
    sys.exit(main())
