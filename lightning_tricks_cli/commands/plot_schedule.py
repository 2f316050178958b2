"""Draw a learning-rate schedule."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from lightning_tricks_cli.commands.target import at_least_one

CURVES = (
    *("constant", "cosine", "cosine_restarts", "flat_cos", "inverse_sqrt"),
    *("linear", "one_cycle", "polynomial", "step_decay", "wsd"),
)


def duration(text: str) -> int | float:
    """Parse a duration: steps (5) or a fraction of training (0.05)."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither steps (5) nor a fraction of training (0.05)") from error


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of the command."""
    plot = commands.add_parser(
        "plot-schedule",
        help="draw a learning-rate schedule",
        description="Draw the learning rate of every optimizer step as a multiple of the base learning rate. Lengths"
        " are steps (5) or fractions of training (0.05). The defaults are those of lightning_tricks.CURVE.",
        epilog="example: lightning-tricks plot-schedule cosine --warmup 0.05 --steps 1000 -o lr.png",
    )
    plot.add_argument("curve", choices=CURVES, metavar="CURVE", help=", ".join(CURVES))
    plot.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="picture to write")
    plot.add_argument("--steps", type=at_least_one, default=1000, metavar="N", help="steps of training (default: 1000)")
    settings = plot.add_argument_group("settings of the curve", argument_default=argparse.SUPPRESS)
    settings.add_argument("--warmup", type=duration, metavar="LENGTH", help="length of the linear warm-up")
    settings.add_argument("--floor", type=float, metavar="FACTOR", help="final learning rate")
    settings.add_argument("--flat", type=duration, metavar="LENGTH", help="flat_cos: when the cosine starts")
    settings.add_argument("--initial", type=float, metavar="FACTOR", help="one_cycle: first learning rate")
    settings.add_argument(
        "--momentum", type=float, nargs=2, metavar=("LOW", "HIGH"), help="one_cycle: momentum, cycled the other way"
    )
    settings.add_argument("--cooldown", type=duration, metavar="LENGTH", help="wsd: length of the final decay")
    settings.add_argument("--shape", help="wsd: shape of the final decay: 1-sqrt, linear or cosine")
    settings.add_argument("--cycles", type=int, metavar="N", help="cosine_restarts: number of cycles")
    settings.add_argument(
        "--growth", type=float, metavar="FACTOR", help="cosine_restarts: growth of the cycles' lengths"
    )
    settings.add_argument("--power", type=float, metavar="P", help="polynomial: exponent; 1 is a straight line")
    settings.add_argument(
        "--milestones", type=duration, nargs="+", metavar="LENGTH", help="step_decay: when the learning rate decays"
    )
    settings.add_argument("--gamma", type=float, metavar="FACTOR", help="step_decay: factor of each drop")


def run(options: argparse.Namespace) -> None:
    """Run the command."""
    from lightning_tricks import schedules
    from lightning_tricks.callbacks import LRSchedule
    from lightning_tricks.schedules.factories import CURVES as BY_NAME
    from lightning_tricks_cli.runs.picture import check_picture, picture

    common = ("command", "curve", "debug", "others", "output", "parser", "run", "steps")
    settings = {name: value for name, value in vars(options).items() if name not in common}
    check_picture(options.output)
    named = LRSchedule(options.curve, **settings)  # checks the settings; its errors list those of the curve
    with picture(options.output) as axes:
        curve = partial(BY_NAME[options.curve], **named.settings)
        schedules.plot_schedule(curve, options.steps, axes)
    print(f"wrote {options.output}")
