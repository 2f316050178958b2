"""Entry point of the ``lightning-tricks`` command."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence

from lightning_tricks_cli.commands import (
    average,
    consolidate,
    demo,
    doctor,
    export,
    find_lr,
    memory,
    plot_schedule,
    presets,
    suggest,
    trainer,
    tricks,
)

COMMANDS = (
    *(trainer, find_lr, demo),
    *(tricks, presets, plot_schedule, memory, suggest, doctor),
    *(average, export, consolidate),
)
GROUPS = {"fit": "training", "tricks": "looking", "average": "files"}  # of the help, by their first commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C.

    What the user can mend is printed on one line; other errors keep their traceback.
    """
    options = _options(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:  # which Lightning makes of Ctrl-C
        if isinstance(stop.__context__, KeyboardInterrupt):
            return 130
        raise
    except Exception as error:
        if options.debug or not _can_be_mended(error):
            raise
        if isinstance(error, BrokenPipeError):  # of `| head`, which has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"lightning-tricks: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, argparse.ArgumentError) else 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    whole = _Parser(
        prog="lightning-tricks",
        description="Training tricks for a stock Lightning Trainer.",
        epilog="lightning-tricks COMMAND --help explains one, with examples. Exit codes: 0 done, 1 an error, 2 wrong"
        " usage, 130 Ctrl-C.",
    )
    about = "show the traceback of an error"
    whole.add_argument("--debug", action="store_true", help=about)
    commands = whole.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", parser_class=argparse.ArgumentParser
    )
    for command in COMMANDS:
        command.add(commands)
    for each in commands.choices.values():
        each.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=about)
        each.formatter_class = argparse.RawDescriptionHelpFormatter  # examples on one line can be copied
        each.description = textwrap.fill(each.description or "", 80)
    return whole


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        text = super().format_help()
        for first, group in GROUPS.items():
            text = re.sub(rf"^    {first} ", rf"   {group}\n\g<0>", text, flags=re.MULTILINE)
        return text


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    whole = parser()
    options, others = whole.parse_known_args(arguments)
    if others and options.run is not trainer.run:
        whole.error(f"{options.command} has no argument {' '.join(others)}: see lightning-tricks {options.command} -h")
    options.others = others
    return options


def _can_be_mended(error: Exception) -> bool:
    if isinstance(error, ValueError | TypeError | ImportError | OSError | argparse.ArgumentError):
        return True
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)


if __name__ == "__main__":
    sys.exit(main())
