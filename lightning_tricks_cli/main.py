"""The entry point of the ``lightning-tricks`` command."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence

from lightning_tricks_cli.commands import (
    average,
    compare,
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
    suggest,
    trainer,
    tricks,
)
from lightning_tricks_cli.commands.target import with_flags

COMMANDS = (
    *(trainer, find_lr, find_workers, cross_validate, compare, demo),
    *(tricks, presets, optimizers, plot_schedule, memory, suggest, doctor),
    *(average, export, consolidate),
)
GROUPS = {
    "fit": "training",
    "tricks": "looking",
    "average": "files",
}  # Headings in the help, by the first command below each.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 success, 1 an error, 2 wrong usage, 130 Ctrl-C.

    An error that the user can fix is printed on one line; other errors keep their traceback.
    """
    options = _parse(arguments)
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
    )
    debug_help = "show the traceback of an error"
    main_parser.add_argument("--debug", action="store_true", help=debug_help)
    commands = main_parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=argparse.ArgumentParser
    )
    for command in COMMANDS:
        command.add(commands)
    for command_parser in commands.choices.values():
        command_parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug_help)
        command_parser.formatter_class = argparse.RawDescriptionHelpFormatter  # Does not wrap examples.
        command_parser.description = textwrap.fill(command_parser.description or "", 80)
    return main_parser


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        text = super().format_help()
        for first, group in GROUPS.items():
            text = re.sub(rf"^    {first} ", rf"   {group}\n\g<0>", text, flags=re.MULTILINE)
        return text


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    main_parser = parser()
    options, others = main_parser.parse_known_args(arguments)
    if others and options.run is not trainer.run:
        main_parser.error(
            f"{options.command} has no argument {' '.join(others)}: see lightning-tricks {options.command} -h"
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
