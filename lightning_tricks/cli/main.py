"""Entry point of the ``lightning-tricks`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks.schedules.lr_finder import Method


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 an error that is printed on one line, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, ImportError, OSError, MisconfigurationException) as error:
        if options.debug:
            raise
        print(f"lightning-tricks: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _demo(options: argparse.Namespace) -> None:
    from lightning_tricks.cli.demo import demo

    demo(options.output, seeds=options.seeds, epochs=options.epochs, noise=options.noise)


def _average(options: argparse.Namespace) -> None:
    from lightning_tricks.checkpoints import average_checkpoints

    average_checkpoints(options.checkpoints, options.output, options.weights, force=options.force)
    print(f"wrote {options.output}")


def _export(options: argparse.Namespace) -> None:
    from lightning_tricks.checkpoints import export_weights

    export_weights(
        options.checkpoint,
        options.output,
        which=options.which,
        callback=options.callback,
        strip_prefix=options.strip_prefix,
        force=options.force,
    )
    print(f"wrote {options.output}")


def _find_lr(options: argparse.Namespace) -> None:
    from lightning_tricks.cli.find_lr import find_lr_of

    if os.getcwd() not in sys.path:  # a configuration may name classes of the files here, as beside a script
        sys.path.insert(0, os.getcwd())
    find_lr_of(
        options.config,
        method=options.method,
        plot=options.plot,
        as_json=options.json,
        min_lr=options.min_lr,
        max_lr=options.max_lr,
        steps=options.steps,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-tricks", description="Training tricks for a stock Lightning Trainer."
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train on noisy handwritten digits, plain and with tricks, and compare",
        description="Train one small network on scikit-learn's handwritten digits with wrong training labels:"
        " plain, with each trick, with all. Prints a table, writes a picture and a checkpoint.",
        epilog="example: lightning-tricks demo --seeds 2 --output demo",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument("--output", type=Path, default=Path("demo"), help="folder for the results (default: demo)")
    demo.add_argument("--seeds", type=int, default=5, help="runs of each variant (default: 5)")
    demo.add_argument("--epochs", type=int, default=55, help="epochs of each run (default: 55)")
    demo.add_argument("--noise", type=float, default=0.4, help="share of wrong training labels (default: 0.4)")
    _add_average(commands)
    _add_export(commands)
    _add_find_lr(commands)
    return parser


def _add_average(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    average = commands.add_parser(
        "average",
        help="average the weights of checkpoint files",
        description="Average the weights of checkpoints of one model: Lightning checkpoints, files with a state_dict,"
        " .safetensors. Of Lightning checkpoints the result is one for testing and deployment, not for resuming.",
        epilog="example: lightning-tricks average epoch=8.ckpt epoch=9.ckpt -o mean.ckpt --weights 0.3 0.7",
    )
    average.set_defaults(run=_average)
    average.add_argument("checkpoints", type=Path, nargs="+", metavar="CKPT", help="the files to average")
    average.add_argument(
        "--weights", type=float, nargs="+", metavar="W", help="relative weight of each file (default: equal)"
    )
    _add_output(average)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export",
        help="write the averaged or raw weights of a checkpoint for a bare module",
        description="Write the weights of a checkpoint as a plain state_dict: the averaged ones if a callback such as"
        " EMA kept some, or the raw ones. Folders of FSDP and DeepSpeed become whole tensors; export only folders that"
        " you trust, since reading them can run code.",
        epilog="example: lightning-tricks export best.ckpt -o model.safetensors --strip-prefix model.",
    )
    export.set_defaults(run=_export)
    export.add_argument("checkpoint", type=Path, metavar="CKPT", help="the checkpoint file or folder")
    export.add_argument(
        "--which", choices=("averaged", "raw"), default="averaged", help="which weights (default: averaged)"
    )
    export.add_argument("--callback", metavar="KEY", help="whose averages, if several callbacks kept some")
    export.add_argument(
        "--strip-prefix", default="", metavar="PREFIX", help="take only this submodule, without its name"
    )
    _add_output(export)


def _add_find_lr(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    find = commands.add_parser(
        "find-lr",
        help="suggest a learning rate for a LightningCLI configuration",
        description="Train for some steps of rising learning rate what a configuration of LightningCLI describes, and"
        " print a learning rate for its optimizer. The configuration names model and data by class_path; modules in"
        " the current folder are found. Nothing is saved.",
        epilog="example: lightning-tricks find-lr -c config.yaml --plot lr.png",
    )
    find.set_defaults(run=_find_lr)
    find.add_argument(
        *("-c", "--config"),
        type=Path,
        action="append",
        required=True,
        metavar="YAML",
        help="the configuration; of several the later ones win",
    )
    find.add_argument("--min-lr", type=float, default=1e-8, metavar="LR", help="the first one (default: 1e-8)")
    find.add_argument("--max-lr", type=float, default=1.0, metavar="LR", help="the last one (default: 1)")
    find.add_argument("--steps", type=int, default=100, metavar="N", help="optimizer steps (default: 100)")
    find.add_argument("--plot", type=Path, metavar="OUT", help="draw losses and suggestions into this file")
    printed = find.add_mutually_exclusive_group()
    printed.add_argument(
        "--method", choices=get_args(Method), default="valley", help="how to choose the suggestion (default: valley)"
    )
    printed.add_argument("--json", action="store_true", help="print learning rates and losses instead")


def _add_output(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="OUT",
        help="file to write: .safetensors, .ckpt, .pt, .pth, .bin",
    )
    command.add_argument("--force", action="store_true", help="overwrite OUT if it exists")


if __name__ == "__main__":
    sys.exit(main())
